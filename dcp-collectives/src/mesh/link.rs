//! A data connection to one peer: buffered, and patient only as long as the group stands.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::Rank;

use super::TICK;
use super::channel::Channel;
use super::frame::{HEADER_LEN, Header, is_pause};
use super::group::Group;
use crate::call::Call;
use crate::deadline::Deadline;
use crate::poison::Poison;

/// Bytes that are collected before a write, and requested in a read, so that small messages share
/// system calls.
const BUFFER: usize = 16 << 10;

/// The most that a relay holds of a message, and the first allocation for one, in bytes.
pub(super) const CHUNK: usize = 256 << 10;

/// One call of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'a> {
    pub(super) group: &'a Group,
    pub(super) call: Call,
    pub(super) seq: u64,
    pub(super) deadline: Deadline,
    pub(super) max_message: u64,
}

impl Turn<'_> {
    /// Whether to wait on for a peer.
    pub(super) fn keep_waiting(&self, peer: Rank) -> Result<(), Poison> {
        self.group.keep_waiting(peer, self.seq, self.deadline)
    }

    pub(super) fn lost(&self, peer: Rank, message: &str) -> Poison {
        self.group.lost(peer, message)
    }

    fn wrong(&self, peer: Rank, message: String) -> Poison {
        self.group.fail(Poison::Wrong { rank: peer, op: self.call.op, message })
    }
}

/// A data connection.
#[derive(Debug)]
pub(super) struct Link {
    peer: Rank,
    channel: Arc<dyn Channel>,
    input: Box<[u8]>,
    /// The unread part of `input`.
    unread: std::ops::Range<usize>,
    output: Vec<u8>,
}

impl Link {
    pub(super) fn new(peer: Rank, channel: Arc<dyn Channel>) -> Self {
        Self {
            peer,
            channel,
            input: vec![0; BUFFER].into_boxed_slice(),
            unread: 0..0,
            output: Vec::with_capacity(BUFFER),
        }
    }

    /// Announces `count` messages.
    pub(super) fn begin(&mut self, turn: &Turn<'_>, count: u32) -> Result<(), Poison> {
        let header = Header { call: turn.call, seq: turn.seq, count };
        self.write(turn, &header.to_bytes())
    }

    pub(super) fn write_message(&mut self, turn: &Turn<'_>, message: &[u8]) -> Result<(), Poison> {
        self.write_len(turn, message.len() as u64)?;
        self.write(turn, message)
    }

    pub(super) fn write_len(&mut self, turn: &Turn<'_>, len: u64) -> Result<(), Poison> {
        self.write(turn, &len.to_le_bytes())
    }

    pub(super) fn write(&mut self, turn: &Turn<'_>, bytes: &[u8]) -> Result<(), Poison> {
        if self.output.len() + bytes.len() > BUFFER {
            self.send_output(turn)?;
        }
        if bytes.len() >= BUFFER {
            return send(&*self.channel, self.peer, turn, bytes);
        }
        self.output.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn flush(&mut self, turn: &Turn<'_>) -> Result<(), Poison> {
        self.send_output(turn)?;
        attempt(self.peer, turn, || self.channel.flush(TICK))
    }

    fn send_output(&mut self, turn: &Turn<'_>) -> Result<(), Poison> {
        send(&*self.channel, self.peer, turn, &self.output)?;
        self.output.clear();
        Ok(())
    }

    /// Waits for the peer's announcement of `count` messages for this call.
    pub(super) fn expect(&mut self, turn: &Turn<'_>, count: u32) -> Result<(), Poison> {
        let mut bytes = [0; HEADER_LEN];
        self.read_exact(turn, &mut bytes)?;
        match Header::from_bytes(bytes) {
            None => Err(turn.wrong(self.peer, "it sent bytes that are not a frame".to_owned())),
            Some(Header { call, .. }) if call != turn.call => {
                let (one, other) = ((self.peer, call), (turn.group.rank, turn.call));
                Err(turn.group.fail(Poison::Differ { one, other }))
            }
            Some(Header { seq, .. }) if seq != turn.seq => {
                let message = format!("it is at its call {seq}, this rank at {}", turn.seq);
                Err(turn.wrong(self.peer, message))
            }
            Some(header) if header.count != count => {
                let message = format!("it sends {} messages instead of {count}", header.count);
                Err(turn.wrong(self.peer, message))
            }
            Some(_) => Ok(()),
        }
    }

    /// The length of the next message.
    pub(super) fn read_len(&mut self, turn: &Turn<'_>) -> Result<u64, Poison> {
        let mut bytes = [0; 8];
        self.read_exact(turn, &mut bytes)?;
        let len = u64::from_le_bytes(bytes);
        if len > turn.max_message || usize::try_from(len).is_err() {
            let limit = turn.max_message;
            let message = format!("it sends a message of {len} bytes, the limit is {limit}");
            return Err(turn.wrong(self.peer, message));
        }
        Ok(len)
    }

    /// Receives a message whole.
    pub(super) fn read_message(&mut self, turn: &Turn<'_>) -> Result<Bytes, Poison> {
        let len = self.read_len(turn)?;
        self.read_body(turn, len, |_| Ok(()))
    }

    /// Receives the `len` bytes of a message, and shows each piece of it as it comes.
    ///
    /// Memory grows with what has arrived, not with what is announced.
    pub(super) fn read_body(
        &mut self,
        turn: &Turn<'_>,
        len: u64,
        mut each: impl FnMut(&[u8]) -> Result<(), Poison>,
    ) -> Result<Bytes, Poison> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let mut message = Vec::new();
        while message.len() < len {
            let begin = message.len();
            let end = len.min(begin.saturating_add(CHUNK));
            if end > message.capacity() {
                message.reserve_exact(len.min(begin.saturating_mul(2).max(CHUNK)) - begin);
            }
            message.resize(end, 0);
            let piece = message.get_mut(begin..).unwrap_or_default();
            self.read_exact(turn, piece)?;
            each(piece)?;
        }
        Ok(message.into())
    }

    /// Passes a message on to `to`, holding no more than a chunk of it.
    pub(super) fn relay(
        &mut self,
        turn: &Turn<'_>,
        to: &mut Self,
        chunk: &mut Vec<u8>,
    ) -> Result<(), Poison> {
        let mut left = self.read_len(turn)?;
        to.write_len(turn, left)?;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK);
            if chunk.len() < want {
                chunk.resize(want, 0);
            }
            let len = self.read_some(turn, chunk.get_mut(..want).unwrap_or_default())?;
            to.write(turn, chunk.get(..len).unwrap_or_default())?;
            left = left.saturating_sub(len as u64);
        }
        Ok(())
    }

    fn read_exact(&mut self, turn: &Turn<'_>, into: &mut [u8]) -> Result<(), Poison> {
        let mut filled = 0;
        while filled < into.len() {
            filled += self.read_some(turn, into.get_mut(filled..).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Reads at least one byte into `into`, which is not empty.
    fn read_some(&mut self, turn: &Turn<'_>, into: &mut [u8]) -> Result<usize, Poison> {
        if self.unread.is_empty() {
            if into.len() >= BUFFER {
                return receive(&*self.channel, self.peer, turn, into);
            }
            self.unread = 0..receive(&*self.channel, self.peer, turn, &mut self.input)?;
        }
        let ready = self.input.get(self.unread.clone()).unwrap_or_default();
        let len = ready.len().min(into.len());
        for (to, from) in into.iter_mut().zip(ready) {
            *to = *from;
        }
        self.unread.start += len;
        Ok(len)
    }
}

/// Repeats an operation that ends with its time slice.
fn attempt<T>(
    peer: Rank,
    turn: &Turn<'_>,
    mut operation: impl FnMut() -> io::Result<T>,
) -> Result<T, Poison> {
    loop {
        match operation() {
            Ok(done) => return Ok(done),
            Err(error) if is_pause(&error) => turn.keep_waiting(peer)?,
            Err(error) => return Err(turn.lost(peer, &format!("its connection broke: {error}"))),
        }
    }
}

fn receive(
    channel: &dyn Channel,
    peer: Rank,
    turn: &Turn<'_>,
    into: &mut [u8],
) -> Result<usize, Poison> {
    match attempt(peer, turn, || channel.read(into, TICK))? {
        0 => Err(turn.lost(peer, "it closed its connection")),
        len => Ok(len),
    }
}

fn send(
    channel: &dyn Channel,
    peer: Rank,
    turn: &Turn<'_>,
    mut bytes: &[u8],
) -> Result<(), Poison> {
    while !bytes.is_empty() {
        let len = attempt(peer, turn, || channel.write(bytes, TICK))?;
        bytes = bytes.get(len..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::super::socket::Socket;
    use super::*;
    use crate::call::Op;

    const CALL: Call = Call { op: Op::Broadcast, root: 1 };
    const LIMIT: u64 = 64 << 30;

    /// Returns what rank 0 gets when rank 1 sends these bytes and leaves.
    fn hear(bytes: &[u8]) -> Result<Bytes, Poison> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut link = Link::new(1, Arc::new(Socket::new(listener.accept().unwrap().0)));
        peer.write_all(bytes).unwrap();
        drop(peer);
        let deadline = Duration::from_secs(20);
        let mut group = Group::new(0, 0, 2, deadline, Default::default(), Vec::new());
        // Nobody else says why the peer left.
        group.graces.reason = Duration::ZERO;
        let deadline = Deadline::after(deadline);
        let turn = Turn { group: &group, call: CALL, seq: 3, deadline, max_message: LIMIT };
        link.expect(&turn, 1)?;
        link.read_message(&turn)
    }

    fn frame(call: Call, seq: u64, count: u32, len: u64) -> Vec<u8> {
        let mut bytes = Header { call, seq, count }.to_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes
    }

    #[test]
    fn a_message_arrives() {
        let mut bytes = frame(CALL, 3, 1, 5);
        bytes.extend_from_slice(b"hello");
        assert_eq!(hear(&bytes), Ok(Bytes::from_static(b"hello")));
    }

    #[test]
    fn a_length_is_no_reason_to_allocate() {
        let mut bytes = frame(CALL, 3, 1, LIMIT);
        bytes.extend_from_slice(&[7; 1000]);
        assert!(matches!(hear(&bytes), Err(Poison::Lost { rank: 1, .. })));
        let error = hear(&frame(CALL, 3, 1, LIMIT + 1)).unwrap_err();
        assert!(matches!(error, Poison::Wrong { rank: 1, op: Op::Broadcast, .. }), "{error:?}");
    }

    #[test]
    fn a_frame_of_another_call_is_noticed() {
        let other = Call::new(Op::Scatter, 1);
        let differ = Poison::Differ { one: (1, other), other: (0, CALL) };
        assert_eq!(hear(&frame(other, 3, 1, 0)), Err(differ));
        for bad in [frame(CALL, 2, 1, 0), frame(CALL, 3, 2, 0), vec![0xff; 100]] {
            assert!(matches!(hear(&bad), Err(Poison::Wrong { rank: 1, .. })));
        }
    }
}
