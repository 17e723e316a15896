//! The state of a group on one rank: whether it is usable, and what the other ranks are doing.
//!
//! The ranks form a control tree (that of root 0). News travel along its edges, each of which is
//! a connection with a thread on either end: a rank that died is noticed by its neighbors there,
//! which notify all other ranks. A heartbeat to every rank would need a connection to every rank.
//!
//! A group has two states, and goes from the first to the second once:
//!
//! ```text
//!            fail(first reason): own call, a neighbor's end, news
//!   whole ───────────────────────────────────────────────────────▶ poisoned
//!     │  enter ▶ current call ▶ exit                                  every call returns the reason
//!     └─ close ▶ Bye { calls } to the neighbors
//! ```
//!
//! Invariants:
//!
//! - The first reason stays. `fail` sets it and sends it along the tree under one lock (`telling`), so
//!   no farewell of this rank overtakes it, and all ranks converge on a reason that some rank had first.
//! - Calls match along each edge. A child announces each call to its parent, and the parent compares it
//!   with its own call of that number. A [`Ledger`] holds the calls that one side has made and the other
//!   has not; one of its two queues is always empty. Comparing along edges alone finds every
//!   mismatch: where all edges agree, all ranks do.
//! - A closed connection is not yet a reason. The rank may have closed it because of news that have not
//!   arrived here, so [`lost`](Group::lost) waits for `Graces::reason`; a rank that is only done
//!   sends `Bye` with its number of calls, which is a loss only for a call beyond that number.
//! - A timeout names the rank that is late. Every rank that waits for long says so to all
//!   (`Control::Waiting`), and the one whose deadline ends first follows the chain of those reports to
//!   the rank that waits for nobody.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dcp_core::Rank;

use super::TICK;
use super::channel::Channel;
use super::edge::{Edge, Neighbor};
use super::frame::{self, Control};
use super::inbox::Inbox;
use crate::call::{Call, Op};
use crate::deadline::Deadline;
use crate::poison::Poison;

/// The times for which a group waits for news that may still be on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Graces {
    /// For the reason, after a connection closed without one. A rank may close because it heard bad
    /// news that has not arrived here yet. They come along the tree, also where the machine is busy;
    /// only a connection that broke alone has no other reason, and is named after this time.
    pub(super) reason: Duration,
    /// For the end of this rank, after the process of a neighbor ended without a farewell: it may
    /// have been done with everything.
    pub(super) farewell: Duration,
}

impl Graces {
    fn of(deadline: Duration) -> Self {
        let reason = (deadline / 4).clamp(Duration::from_secs(1), Duration::from_secs(30));
        Self { reason, farewell: Duration::from_millis(250) }
    }
}

/// The number of times in a deadline that a rank announces for whom it waits. It begins after one such
/// period, and an announcement holds for three.
const ANNOUNCEMENTS: u32 = 16;

/// Calls that a child may be ahead of this rank.
const MAX_AHEAD: usize = 1 << 20;

/// One rank's view of one group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: u64,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) deadline: Duration,
    pub(super) graces: Graces,
    pub(super) inbox: Arc<Inbox>,
    edges: Vec<Edge>,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while news is being sent, so that a farewell cannot overtake it.
    telling: Mutex<()>,
    closing: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    poison: Option<Poison>,
    /// Calls that this rank has begun.
    calls: u64,
    current: Option<Call>,
    ledgers: HashMap<Rank, Ledger>,
    /// Neighbors that left, and after how many calls.
    byes: HashMap<Rank, u64>,
    /// Neighbors from which nothing more will be heard.
    ended: HashSet<Rank>,
    waits: HashMap<Rank, Wait>,
    /// The wait that this rank announced last of itself.
    announced: Option<Wait>,
}

/// The calls that only one side of an edge has made so far.
#[derive(Debug, Default)]
struct Ledger {
    mine: VecDeque<Call>,
    theirs: VecDeque<Call>,
}

/// Whom a rank said it was waiting for.
#[derive(Debug)]
struct Wait {
    seq: u64,
    on: Rank,
    since: Instant,
}

impl State {
    fn op(&self) -> Op {
        self.current.map_or(Op::Idle, |call| call.op)
    }
}

impl Group {
    /// A group whose control connections are open.
    pub(super) fn new(
        id: u64,
        rank: Rank,
        world_size: u32,
        deadline: Duration,
        inbox: Arc<Inbox>,
        neighbors: Vec<Neighbor>,
    ) -> Self {
        let children = neighbors.iter().filter(|neighbor| !neighbor.is_parent);
        let ledgers = children.map(|child| (child.rank, Ledger::default())).collect();
        let edges = neighbors.into_iter().map(Edge::new);
        Self {
            id,
            rank,
            world_size,
            deadline,
            graces: Graces::of(deadline),
            inbox,
            edges: edges.collect(),
            state: Mutex::new(State { ledgers, ..State::default() }),
            changed: Condvar::new(),
            telling: Mutex::new(()),
            closing: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub(super) fn poison(&self) -> Option<Poison> {
        self.lock().poison.clone()
    }

    /// The reason why the group is broken, if it is or is about to be.
    pub(super) fn poison_within_grace(&self) -> Option<Poison> {
        let whole = |state: &mut State| state.poison.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), self.graces.reason, whole);
        waited.unwrap_or_else(PoisonError::into_inner).0.poison.clone()
    }

    /// Begins a call and returns its number.
    pub(super) fn enter(&self, call: Call) -> Result<u64, Poison> {
        let mut state = self.lock();
        if let Some(poison) = &state.poison {
            return Err(poison.clone());
        }
        let seq = state.calls;
        state.calls += 1;
        state.current = Some(call);
        // A neighbor that left has made `calls` calls, so it takes no part in call number `calls`.
        let gone = state.byes.iter().find(|(_, calls)| **calls <= seq).map(|(rank, _)| *rank);
        let trouble = gone.map(|rank| left(rank, call.op)).or_else(|| {
            let mut first = None;
            for (peer, ledger) in &mut state.ledgers {
                match ledger.theirs.pop_front() {
                    Some(theirs) if theirs == call => {}
                    Some(theirs) => {
                        let (one, other) = ((*peer, theirs), (self.rank, call));
                        first = Some(Poison::Differ { one, other });
                    }
                    None => ledger.mine.push_back(call),
                }
            }
            first
        });
        drop(state);
        if let Some(trouble) = trouble {
            return Err(self.fail(trouble));
        }
        if let Some(edge) = self.edges.iter().find(|edge| edge.is_parent) {
            edge.notify(&Control::Enter(call));
        }
        Ok(seq)
    }

    /// Ends the call.
    pub(super) fn exit(&self) {
        self.lock().current = None;
    }

    /// Poisons the group and sends the reason to all ranks. Returns the first reason.
    pub(super) fn fail(&self, poison: Poison) -> Poison {
        self.fail_from(poison, None)
    }

    fn fail_from(&self, poison: Poison, source: Option<Rank>) -> Poison {
        if let Some(first) = self.poison() {
            return first;
        }
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut state = self.lock();
            if let Some(first) = &state.poison {
                return first.clone();
            }
            state.poison = Some(poison.clone());
        }
        self.changed.notify_all();
        tracing::debug!(rank = self.rank, ?poison, "the group is broken");
        self.tell_all(&Control::Poison(poison.clone()), source);
        poison
    }

    fn tell_all(&self, news: &Control, source: Option<Rank>) {
        for edge in self.edges.iter().filter(|edge| Some(edge.peer) != source) {
            edge.notify(news);
        }
    }

    /// Breaks the group because a connection to `peer` is closed, unless the true reason turns up.
    pub(super) fn lost(&self, peer: Rank, message: &str) -> Poison {
        let state = self.lock();
        let no_reason = |state: &mut State| state.poison.is_none() && !state.ended.contains(&peer);
        let waited = self.changed.wait_timeout_while(state, self.graces.reason, no_reason);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let op = state.op();
        drop(state);
        self.fail(Poison::Lost { rank: peer, op, message: message.to_owned() })
    }

    /// Says whether to wait on for `peer`; called every now and then while waiting.
    pub(super) fn keep_waiting(
        &self,
        peer: Rank,
        seq: u64,
        deadline: Deadline,
    ) -> Result<(), Poison> {
        let left = deadline.left().unwrap_or_default();
        let mut state = self.lock();
        if let Some(poison) = &state.poison {
            return Err(poison.clone());
        }
        if left.is_zero() {
            let (rank, op) = (self.who_is_late(&state, peer, seq), state.op());
            drop(state);
            return Err(self.fail(Poison::Timeout { rank, op, deadline: self.deadline }));
        }
        let period = self.deadline / ANNOUNCEMENTS;
        let is_long = self.deadline.saturating_sub(left) > period;
        let is_known = state.announced.as_ref().is_some_and(|last| {
            (last.seq, last.on) == (seq, peer) && last.since.elapsed() < period
        });
        if is_long && !is_known {
            state.announced = Some(Wait { seq, on: peer, since: Instant::now() });
            drop(state);
            self.tell_all(&Control::Waiting { who: self.rank, seq, on: peer }, None);
        }
        Ok(())
    }

    /// The rank at the end of the chain of those that wait for each other.
    fn who_is_late(&self, state: &State, peer: Rank, seq: u64) -> Rank {
        let valid = self.deadline / ANNOUNCEMENTS * 3;
        let is_fresh = |wait: &&Wait| wait.seq <= seq && wait.since.elapsed() < valid;
        let mut late = peer;
        // The reports are of different moments and may form a circle: no chain is longer than the group.
        for _ in 0..self.world_size {
            match state.waits.get(&late).filter(is_fresh) {
                Some(wait) if wait.on != self.rank => late = wait.on,
                // It waits for this rank, which waits for it: a message between the two is lost.
                Some(_) => return peer,
                None => return late,
            }
        }
        peer
    }

    /// Reads from a neighbor, on a thread of its own, until the connection ends.
    pub(super) fn listen(&self, peer: Rank, channel: &dyn Channel) {
        let outcome = self.hear(peer, channel);
        let said_bye = {
            let mut state = self.lock();
            state.ended.insert(peer);
            state.byes.contains_key(&peer)
        };
        self.changed.notify_all();
        if self.is_closing() || said_bye {
            return;
        }
        let is_deaf = |edge: &Edge| edge.peer == peer && edge.is_deaf();
        let message = match outcome {
            Ok(()) if self.edges.iter().any(is_deaf) => "it does not read its messages".to_owned(),
            Ok(()) => "its process ended".to_owned(),
            Err(error) => format!("its connection broke: {error}"),
        };
        let until = Deadline::after(self.graces.farewell);
        let mut state = self.lock();
        while let (Some(left), None, false) = (until.left(), &state.poison, self.is_closing()) {
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let op = state.op();
        drop(state);
        if !self.is_closing() {
            self.fail(Poison::Lost { rank: peer, op, message });
        }
    }

    fn hear(&self, peer: Rank, channel: &dyn Channel) -> io::Result<()> {
        /// The time to listen on after a farewell, so that closing does not cut it off.
        const LINGER: Duration = Duration::from_secs(2);
        let mut linger = None;
        let mut buffer = Vec::new();
        let mut piece = [0; 4096];
        loop {
            if self.is_closing() {
                let until = *linger.get_or_insert_with(|| Deadline::after(LINGER));
                if until.left().is_none() {
                    return Ok(());
                }
            }
            match channel.read(&mut piece, 8 * TICK) {
                Ok(0) => return Ok(()),
                Ok(len) => buffer.extend_from_slice(piece.get(..len).unwrap_or_default()),
                Err(error) if frame::is_pause(&error) => continue,
                Err(error) => return Err(error),
            }
            while let Some(news) = frame::take_item(&mut buffer)? {
                self.take(peer, news);
            }
        }
    }

    fn take(&self, peer: Rank, news: Control) {
        match news {
            Control::Enter(call) => self.child_entered(peer, call),
            Control::Poison(poison) => drop(self.fail_from(poison, Some(peer))),
            Control::Waiting { who, seq, on } => {
                if who < self.world_size && on < self.world_size {
                    let wait = Wait { seq, on, since: Instant::now() };
                    self.lock().waits.insert(who, wait);
                    self.tell_all(&Control::Waiting { who, seq, on }, Some(peer));
                }
            }
            Control::Bye { calls } => {
                let mut state = self.lock();
                state.byes.insert(peer, calls);
                state.ended.insert(peer);
                let is_missed = state.calls > calls;
                let op = state.op();
                drop(state);
                self.changed.notify_all();
                if is_missed && !self.is_closing() {
                    self.fail(left(peer, op));
                }
            }
        }
    }

    fn child_entered(&self, peer: Rank, call: Call) {
        let mut state = self.lock();
        let op = state.op();
        let Some(ledger) = state.ledgers.get_mut(&peer) else { return };
        let trouble = match ledger.mine.pop_front() {
            Some(mine) if mine == call => None,
            Some(mine) => Some(Poison::Differ { one: (peer, call), other: (self.rank, mine) }),
            None if ledger.theirs.len() >= MAX_AHEAD => {
                let message = format!("it is {MAX_AHEAD} calls ahead");
                Some(Poison::Wrong { rank: peer, op, message })
            }
            None => {
                ledger.theirs.push_back(call);
                None
            }
        };
        drop(state);
        if let Some(trouble) = trouble {
            self.fail(trouble);
        }
    }

    /// Takes leave of the neighbors.
    pub(super) fn close(&self) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        self.closing.store(true, Ordering::SeqCst);
        let calls = self.lock().calls;
        self.changed.notify_all();
        for edge in &self.edges {
            edge.notify(&Control::Bye { calls });
            edge.close();
        }
    }
}

fn left(rank: Rank, op: Op) -> Poison {
    Poison::Lost { rank, op, message: "it left the group".to_owned() }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use socket2::SockRef;

    use super::super::socket::Socket;
    use super::*;

    /// A connection whose buffers are as small as the system allows.
    fn narrow() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        SockRef::from(&listener).set_recv_buffer_size(1).unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        SockRef::from(&here).set_send_buffer_size(1).unwrap();
        (here, listener.accept().unwrap().0)
    }

    /// Rank 0 of 3, which receives news of rank 2 through rank 1 alone, and its connection to rank 1.
    fn behind_one(graces: Graces) -> (Group, Arc<dyn Channel>, TcpStream) {
        let (here, there) = narrow();
        let here: Arc<dyn Channel> = Arc::new(Socket::new(here));
        let neighbor = Neighbor { rank: 1, is_parent: false, channel: Arc::clone(&here) };
        let deadline = Duration::from_secs(60);
        let mut group = Group::new(0, 0, 3, deadline, Default::default(), vec![neighbor]);
        group.graces = graces;
        (group, here, there)
    }

    const AT_ONCE: Graces = Graces { reason: Duration::ZERO, farewell: Duration::ZERO };
    const ENOUGH: Duration = Duration::from_secs(600);

    fn said(poison: &Poison, there: &mut TcpStream) {
        there.write_all(&frame::encode(&Control::Poison(poison.clone())).unwrap()).unwrap();
    }

    #[test]
    fn a_connection_that_breaks_alone_is_named_and_else_the_reason_that_comes_later() {
        let reason = Poison::Aborted { rank: 2, reason: "no space".to_owned() };
        for (grace, is_reason) in [(Duration::ZERO, false), (ENOUGH, true)] {
            let (group, here, mut there) = behind_one(Graces { reason: grace, ..AT_ONCE });
            let poison = thread::scope(|scope| {
                let lost = scope.spawn(|| group.lost(2, "it closed its connection"));
                if is_reason {
                    scope.spawn(|| group.listen(1, &*here));
                    said(&reason, &mut there);
                }
                let poison = lost.join().unwrap();
                group.close();
                drop(there);
                poison
            });
            let message = "it closed its connection".to_owned();
            let alone = Poison::Lost { rank: 2, op: Op::Idle, message };
            assert_eq!(poison, if is_reason { reason.clone() } else { alone });
        }
    }

    #[test]
    fn a_process_that_ends_without_a_farewell_is_lost_unless_this_rank_is_done_as_well() {
        for (grace, is_done) in [(Duration::ZERO, false), (ENOUGH, true)] {
            let (group, here, there) = behind_one(Graces { farewell: grace, ..AT_ONCE });
            drop(there);
            let poison = thread::scope(|scope| {
                let listening = scope.spawn(|| group.listen(1, &*here));
                if is_done {
                    group.close();
                }
                listening.join().unwrap();
                group.poison()
            });
            let message = "its process ended".to_owned();
            let lost = Poison::Lost { rank: 1, op: Op::Idle, message };
            assert_eq!(poison, (!is_done).then_some(lost));
        }
    }

    #[test]
    fn a_neighbor_that_does_not_read_is_lost_and_learns_it_when_it_does() {
        let (here, mut there) = narrow();
        let here: Arc<dyn Channel> = Arc::new(Socket::new(here));
        let neighbor = Neighbor { rank: 1, is_parent: false, channel: Arc::clone(&here) };
        let group = Group::new(0, 0, 2, ENOUGH, Default::default(), vec![neighbor]);
        let poison = thread::scope(|scope| {
            scope.spawn(|| group.listen(1, &*here));
            let begun = Instant::now();
            while group.poison().is_none() && begun.elapsed() < ENOUGH {
                group.tell_all(&Control::Waiting { who: 0, seq: 0, on: 1 }, None);
            }
            let poison = group.poison();
            there.set_read_timeout(Some(ENOUGH)).unwrap();
            let end = there.read_to_end(&mut Vec::new());
            group.close();
            drop(there);
            end.expect("the neighbor would wait for news that never come");
            poison
        });
        let expected = "it does not read its messages".to_owned();
        assert_eq!(poison, Some(Poison::Lost { rank: 1, op: Op::Idle, message: expected }));
    }
}
