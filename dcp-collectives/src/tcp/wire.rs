//! The bytes of a connection: a handshake, then either control messages or data frames.
//!
//! Handshake and control messages are small CBOR items behind a length. Data frames have a header
//! of [`HEADER_LEN`] bytes, then messages, each behind its length (`u64`). All numbers are little
//! endian.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use dcp_core::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::call::{Call, Op};
use crate::deadline::Deadline;
use crate::poison::Poison;

/// How every handshake begins. A stranger hardly says this.
const MAGIC: [u8; 8] = *b"dcp-coll";

/// The version of everything in this module.
const VERSION: u32 = 1;

/// The longest CBOR item but the address table, in bytes.
pub(super) const MAX_ITEM: u32 = 64 << 10;

/// The longest address table, in bytes.
pub(super) const MAX_TABLE: u32 = 64 << 20;

/// How long a blocked thread sleeps before it looks whether the group still stands.
pub(super) const TICK: Duration = Duration::from_millis(50);

const MAX_CBOR_DEPTH: usize = 16;

/// The first message of the dialing side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) job: String,
    pub(super) world_size: u32,
    pub(super) rank: Rank,
    pub(super) purpose: Purpose,
}

/// Why a connection is made.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// To take part; the sender listens at this port, and at this address unless that of the
    /// connection is right.
    Join { port: u16, ip: Option<IpAddr> },
    /// For the control messages of a group.
    Control { group: u64 },
    /// For the data of a group.
    Data { group: u64 },
}

/// The answer of the accepting side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome,
    /// Where each rank listens.
    Table(Vec<SocketAddr>),
    Refused {
        reason: String,
        retry: bool,
    },
}

/// A message between neighbors in the control tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Control {
    /// The sender, a child, makes its next call.
    Enter(Call),
    /// Rank `who` has been waiting for long, in its call number `seq`, for rank `on`.
    Waiting { who: Rank, seq: u64, on: Rank },
    /// The group is broken.
    Poison(Poison),
    /// The sender has left after so many calls.
    Bye { calls: u64 },
}

/// Sends one item of the handshake.
pub(super) fn send(
    stream: &TcpStream,
    item: &impl Serialize,
    patience: Patience<'_>,
) -> io::Result<()> {
    let body = encode(item)?;
    let mut bytes = Vec::with_capacity(16 + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&body);
    Timed { stream, patience }.write_all(&bytes)
}

/// Receives one item of the handshake, of at most `limit` bytes.
pub(super) fn receive<T: DeserializeOwned>(
    stream: &TcpStream,
    limit: u32,
    patience: Patience<'_>,
) -> io::Result<T> {
    let mut stream = Timed { stream, patience };
    let mut prefix = [0; 16];
    stream.read_exact(&mut prefix)?;
    let [.., v0, v1, v2, v3, l0, l1, l2, l3] = prefix;
    if !prefix.starts_with(&MAGIC) {
        return Err(invalid("the peer does not speak this protocol"));
    }
    let version = u32::from_le_bytes([v0, v1, v2, v3]);
    if version != VERSION {
        return Err(invalid(format!("the peer speaks version {version}, this rank {VERSION}")));
    }
    let len = u32::from_le_bytes([l0, l1, l2, l3]);
    if len > limit {
        return Err(invalid(format!("an item of {len} bytes, the limit is {limit}")));
    }
    let mut body = Vec::new();
    stream.take(u64::from(len)).read_to_end(&mut body)?;
    if body.len() as u64 != u64::from(len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    decode(&body)
}

/// An item in CBOR behind its length.
pub(super) fn encode(item: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    ciborium::into_writer(item, &mut bytes).map_err(invalid)?;
    let len = u32::try_from(bytes.len() - 4).map_err(invalid)?;
    for (byte, value) in bytes.iter_mut().zip(len.to_le_bytes()) {
        *byte = value;
    }
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    ciborium::de::from_reader_with_recursion_limit(bytes, MAX_CBOR_DEPTH).map_err(invalid)
}

/// Takes the first item off `buffer` once it is there as a whole.
pub(super) fn take_item<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    let Some((prefix, rest)) = buffer.split_first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*prefix);
    if len > MAX_ITEM {
        return Err(invalid(format!("an item of {len} bytes, the limit is {MAX_ITEM}")));
    }
    let Some(body) = rest.get(..len as usize) else { return Ok(None) };
    let item = decode(body)?;
    buffer.drain(..4 + len as usize);
    Ok(Some(item))
}

pub(super) fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// How long the parties of a handshake wait for each other.
#[derive(Clone, Copy)]
pub(super) struct Patience<'a> {
    pub(super) deadline: Deadline,
    /// Called periodically; `true` ends the wait early.
    pub(super) give_up: &'a dyn Fn() -> bool,
}

impl Patience<'static> {
    pub(super) fn until(deadline: Deadline) -> Self {
        Self { deadline, give_up: &|| false }
    }
}

/// A stream whose reads and writes all end at one deadline.
struct Timed<'a> {
    stream: &'a TcpStream,
    patience: Patience<'a>,
}

impl Timed<'_> {
    fn insist<T>(
        &self,
        set_timeout: impl Fn(Option<Duration>) -> io::Result<()>,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let left = self.patience.deadline.left().ok_or(io::ErrorKind::TimedOut)?;
            if (self.patience.give_up)() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            set_timeout(Some(left.min(TICK)))?;
            match attempt() {
                Err(error) if is_pause(&error) => {}
                done => return done,
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.insist(|timeout| stream.set_read_timeout(timeout), || stream.read(buf))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.insist(|timeout| stream.set_write_timeout(timeout), || stream.write(buf))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a read or write ended only because its time slice did.
pub(super) fn is_pause(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// Bytes of a [`Header`].
pub(super) const HEADER_LEN: usize = 24;

const FRAME_MAGIC: [u8; 2] = [0xdc, 0x9f];

/// What precedes the messages of one call on a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) call: Call,
    pub(super) seq: u64,
    /// Messages that follow.
    pub(super) count: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let fields = FRAME_MAGIC
            .into_iter()
            .chain([self.call.op as u8, 0])
            .chain(self.call.root.to_le_bytes())
            .chain(self.seq.to_le_bytes())
            .chain(self.count.to_le_bytes());
        for (byte, value) in bytes.iter_mut().zip(fields) {
            *byte = value;
        }
        bytes
    }

    /// The header in these bytes, or `None` when they are none.
    pub(super) fn from_bytes(bytes: [u8; HEADER_LEN]) -> Option<Self> {
        let [m0, m1, op, _, r0, r1, r2, r3, s0, s1, s2, s3, s4, s5, s6, s7, c0, c1, c2, c3, ..] =
            bytes;
        (FRAME_MAGIC == [m0, m1]).then_some(())?;
        Some(Self {
            call: Call::new(Op::from_wire(op)?, u32::from_le_bytes([r0, r1, r2, r3])),
            seq: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            count: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_round_trip(op in 0_u8..7, root: u32, seq: u64, count: u32) {
            let call = Call::new(Op::from_wire(op).unwrap(), root);
            let header = Header { call, seq, count };
            prop_assert_eq!(Header::from_bytes(header.to_bytes()), Some(header));
        }

        #[test]
        fn no_bytes_make_the_parser_panic(mut bytes: Vec<u8>) {
            while let Ok(Some(_)) = take_item::<Control>(&mut bytes) {}
        }
    }

    #[test]
    fn items_arrive_in_pieces() {
        let items = [
            Control::Enter(Call::new(Op::Gather, 7)),
            Control::Poison(Poison::Aborted { rank: 3, reason: "é".repeat(500) }),
            Control::Bye { calls: u64::MAX },
        ];
        let bytes = items.iter().flat_map(|item| encode(item).unwrap()).collect::<Vec<_>>();
        let (mut buffer, mut got) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(7) {
            buffer.extend_from_slice(piece);
            while let Some(item) = take_item::<Control>(&mut buffer).unwrap() {
                got.push(item);
            }
        }
        assert_eq!(got, items);
        assert!(buffer.is_empty());
    }

    #[test]
    fn a_long_item_is_refused_before_it_arrives() {
        let mut buffer = (MAX_ITEM + 1).to_le_bytes().to_vec();
        assert!(take_item::<Control>(&mut buffer).is_err());
    }
}
