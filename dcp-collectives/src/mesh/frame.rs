//! The bytes on the channels of a group: control messages, or data frames.
//!
//! Control messages are small CBOR items behind a length. Data frames have a header of
//! [`HEADER_LEN`] bytes, then messages, each behind its length (`u64`). All numbers are little
//! endian.

use std::io;

use dcp_core::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::call::{Call, Op};
use crate::poison::Poison;

/// The longest CBOR item, in bytes.
pub(crate) const MAX_ITEM: u32 = 64 << 10;

const MAX_CBOR_DEPTH: usize = 16;

/// A message between neighbors in the control tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Control {
    /// The sender, a child, makes its next call.
    Enter(Call),
    /// Rank `who` has been waiting for long, in its call number `seq`, for rank `on`.
    Waiting { who: Rank, seq: u64, on: Rank },
    /// The group is broken.
    Poison(Poison),
    /// The sender has left after so many calls.
    Bye { calls: u64 },
}

/// An item in CBOR behind its length.
pub(crate) fn encode(item: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    ciborium::into_writer(item, &mut bytes).map_err(invalid)?;
    let len = u32::try_from(bytes.len() - 4).map_err(invalid)?;
    for (byte, value) in bytes.iter_mut().zip(len.to_le_bytes()) {
        *byte = value;
    }
    Ok(bytes)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    ciborium::de::from_reader_with_recursion_limit(bytes, MAX_CBOR_DEPTH).map_err(invalid)
}

/// Takes the first item off `buffer` once it is there as a whole.
pub(crate) fn take_item<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
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

pub(crate) fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Whether a read or write ended only because its time slice did.
pub(crate) fn is_pause(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// Bytes of a [`Header`].
pub(crate) const HEADER_LEN: usize = 24;

const FRAME_MAGIC: [u8; 2] = [0xdc, 0x9f];

/// The header before the messages of one call on a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) call: Call,
    pub(crate) seq: u64,
    /// Messages that follow.
    pub(crate) count: u32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_LEN] {
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
    pub(crate) fn from_bytes(bytes: [u8; HEADER_LEN]) -> Option<Self> {
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
