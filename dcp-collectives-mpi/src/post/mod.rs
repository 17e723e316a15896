//! The state that the threads of a process share with the one that calls MPI: packets to be sent, and the
//! channels to which arriving ones belong.

mod pipe;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dcp_collectives::mesh::{Arrivals, Opening};
use dcp_core::Rank;

use self::pipe::Pipe;
use crate::packet::{ChannelId, HEADER, Head};

/// Bytes of packets that have been handed to MPI and not been received.
pub(crate) const BUDGET: u64 = 32 << 20;

/// The packets and channels of a process.
#[derive(Debug)]
pub(crate) struct Post {
    max_packet: usize,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    channels: HashMap<(Rank, ChannelId), Weak<Pipe>>,
    outgoing: VecDeque<(Rank, Vec<u8>)>,
    next: u32,
    /// Bytes of data packets that MPI may still hold.
    held: u64,
    stop: bool,
    ended: bool,
}

impl Post {
    pub(crate) fn new(max_packet: usize) -> Self {
        Self { max_packet: max_packet.max(1), state: Mutex::default(), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn max_packet(&self) -> usize {
        self.max_packet
    }

    /// Queues a packet.
    pub(crate) fn send(&self, to: Rank, packet: Vec<u8>) {
        let mut state = self.lock();
        if !state.ended {
            state.outgoing.push_back((to, packet));
            drop(state);
            self.work.notify_all();
        }
    }

    /// Opens a channel to another process.
    pub(crate) fn open(self: &Arc<Self>, to: Rank, opening: Opening) -> Option<Arc<Pipe>> {
        let mut state = self.lock();
        if state.ended {
            return None;
        }
        let id = ChannelId { number: state.next, is_mine: true };
        state.next = state.next.wrapping_add(1);
        let pipe = Arc::new(Pipe::new(Arc::clone(self), to, id));
        state.channels.insert((to, id), Arc::downgrade(&pipe));
        drop(state);
        self.send(to, Head::Open(opening).packet(id, &[]));
        Some(pipe)
    }

    pub(crate) fn forget(&self, peer: Rank, id: ChannelId) {
        self.lock().channels.remove(&(peer, id));
    }

    /// The next packet to hand to MPI, if there is room for it.
    pub(crate) fn take(&self) -> Option<(Rank, Vec<u8>)> {
        let mut state = self.lock();
        let len = state.outgoing.front().map(|(_, packet)| packet.len() as u64)?;
        if len > HEADER as u64 {
            if state.held > 0 && state.held + len > BUDGET {
                return None;
            }
            state.held += len;
        }
        state.outgoing.pop_front()
    }

    /// Hands a packet that arrived to its channel.
    pub(crate) fn deliver(self: &Arc<Self>, from: Rank, packet: Vec<u8>, arrivals: &Arrivals) {
        let Some((id, head)) = Head::parse(&packet) else {
            tracing::warn!(from, "dropped bytes that are no packet");
            return;
        };
        if packet.len() > HEADER {
            self.send(from, Head::Received(packet.len() as u64).packet(id, &[]));
        }
        match head {
            Head::Received(bytes) => {
                let mut state = self.lock();
                state.held = state.held.saturating_sub(bytes);
            }
            Head::Open(opening) => self.take_in(from, id, opening, arrivals),
            head => {
                let pipe = self.lock().channels.get(&(from, id)).and_then(Weak::upgrade);
                if let Some(pipe) = pipe {
                    pipe.deliver(head, packet);
                }
            }
        }
    }

    fn take_in(self: &Arc<Self>, from: Rank, id: ChannelId, opening: Opening, all: &Arrivals) {
        let pipe = Arc::new(Pipe::new(Arc::clone(self), from, id));
        self.lock().channels.insert((from, id), Arc::downgrade(&pipe));
        let taken: io::Result<_> = all.put(opening, || Ok(pipe));
        if let Ok(Some(away)) = taken {
            tracing::debug!(from, reason = away.reason, "turned a channel away");
        }
    }

    /// Waits for a packet to be sent, or for `wait`.
    pub(crate) fn rest(&self, wait: Duration) {
        let idle = |state: &mut State| state.outgoing.is_empty() && !state.stop;
        drop(self.work.wait_timeout_while(self.lock(), wait, idle));
    }

    /// Has the thread of MPI come to an end.
    pub(crate) fn stop(&self) {
        self.lock().stop = true;
        self.work.notify_all();
    }

    /// Whether the end has come, and whether everything is sent and received by then.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stop
    }

    pub(crate) fn is_drained(&self) -> bool {
        let state = self.lock();
        state.outgoing.is_empty() && state.held == 0
    }

    /// Breaks all channels.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.outgoing.clear();
        let channels = std::mem::take(&mut state.channels);
        drop(state);
        for pipe in channels.into_values().filter_map(|pipe| pipe.upgrade()) {
            pipe.abandon();
        }
    }
}
