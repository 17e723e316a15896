//! A channel whose bytes travel in packets.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_collectives::mesh::Channel;
use dcp_core::Rank;

use super::Post;
use crate::packet::{ChannelId, HEADER, Head};

/// Bytes that a channel sends before the peer has consumed the first of them.
const WINDOW: u64 = 4 << 20;

/// One end of a channel.
#[derive(Debug)]
pub(crate) struct Pipe {
    post: Arc<Post>,
    peer: Rank,
    id: ChannelId,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Packets with their headers.
    incoming: VecDeque<Vec<u8>>,
    /// Bytes of the first packet that are read.
    read: usize,
    /// Bytes that were sent and that the peer has not consumed.
    in_flight: u64,
    /// No more will come.
    ended: bool,
    /// The own direction has ended.
    finished: bool,
    /// The reason that nothing can be sent.
    broken: Option<&'static str>,
}

impl Pipe {
    pub(crate) fn new(post: Arc<Post>, peer: Rank, id: ChannelId) -> Self {
        Self { post, peer, id, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `blocked` says so, and returns the state, or an error when the wait is over.
    fn wait_while(
        &self,
        wait: Duration,
        blocked: impl FnMut(&mut State) -> bool,
    ) -> io::Result<MutexGuard<'_, State>> {
        let waited = self.changed.wait_timeout_while(self.lock(), wait, blocked);
        let (state, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
        if outcome.timed_out() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(state) }
    }

    fn send(&self, head: Head, bytes: &[u8]) {
        self.post.send(self.peer, head.packet(self.id, bytes));
    }

    /// Takes in what the peer sent.
    pub(crate) fn deliver(&self, head: Head, packet: Vec<u8>) {
        let mut state = self.lock();
        match head {
            Head::Data if packet.len() > HEADER => state.incoming.push_back(packet),
            Head::Credit(bytes) => state.in_flight = state.in_flight.saturating_sub(bytes),
            Head::Finish => state.ended = true,
            Head::Cut => {
                state.ended = true;
                state.broken = Some("the peer closed the channel");
            }
            Head::Data | Head::Open(_) | Head::Received(_) => {}
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the channel because MPI is gone.
    pub(crate) fn abandon(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.broken = Some("MPI has ended");
        drop(state);
        self.changed.notify_all();
    }
}

impl Channel for Pipe {
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize> {
        let mut state = self.wait_while(wait, |state| state.incoming.is_empty() && !state.ended)?;
        let begin = HEADER + state.read;
        let Some(packet) = state.incoming.front() else { return Ok(0) };
        let bytes = packet.get(begin..).unwrap_or_default();
        let len = bytes.len().min(into.len());
        for (to, from) in into.iter_mut().zip(bytes) {
            *to = *from;
        }
        let is_consumed = len == bytes.len();
        let payload = packet.len() - HEADER;
        state.read += len;
        if is_consumed {
            state.incoming.pop_front();
            state.read = 0;
            drop(state);
            self.send(Head::Credit(payload as u64), &[]);
        }
        Ok(len)
    }

    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        let is_full = |state: &mut State| state.in_flight >= WINDOW && state.broken.is_none();
        let mut state = self.wait_while(wait, is_full)?;
        if let Some(reason) = state.broken {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, reason));
        }
        let len = bytes.len().min(self.post.max_packet());
        state.in_flight += len as u64;
        // In the order of the writes, so before another one can begin.
        self.send(Head::Data, bytes.get(..len).unwrap_or_default());
        Ok(len)
    }

    fn flush(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) {
        let mut state = self.lock();
        if !state.finished {
            state.finished = true;
            state.broken.get_or_insert("this side has closed the channel");
            self.send(Head::Finish, &[]);
        }
    }

    fn cut(&self) {
        self.finish();
        let mut state = self.lock();
        state.ended = true;
        state.incoming.clear();
        drop(state);
        self.changed.notify_all();
        self.send(Head::Cut, &[]);
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.post.forget(self.peer, self.id);
        self.send(Head::Cut, &[]);
    }
}
