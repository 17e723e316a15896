//! The first message of a connection and its answer.

use std::io;

use dcp_collectives::mesh::{Kind, Opening};

/// The length of the first message: group, world size, rank and kind, little-endian.
pub(crate) const HELLO_BYTES: usize = 17;

/// The answers, a byte each.
pub(crate) const WELCOME: u8 = 0;
pub(crate) const LATER: u8 = 1;
pub(crate) const REFUSED: u8 = 2;

/// The first message. `None` for a kind that this version does not have.
pub(crate) fn encode(opening: &Opening) -> Option<[u8; HELLO_BYTES]> {
    let kind = match opening.kind {
        Kind::Control => 0,
        Kind::Data => 1,
        _ => return None,
    };
    let mut hello = [kind; HELLO_BYTES];
    hello[..8].copy_from_slice(&opening.group.to_le_bytes());
    hello[8..12].copy_from_slice(&opening.world_size.to_le_bytes());
    hello[12..16].copy_from_slice(&opening.rank.to_le_bytes());
    Some(hello)
}

/// What a first message says.
pub(crate) fn decode(hello: &[u8; HELLO_BYTES]) -> io::Result<Opening> {
    let [g0, g1, g2, g3, g4, g5, g6, g7, w0, w1, w2, w3, r0, r1, r2, r3, kind] = *hello;
    let kind = match kind {
        0 => Kind::Control,
        1 => Kind::Data,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    Ok(Opening {
        group: u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]),
        world_size: u32::from_le_bytes([w0, w1, w2, w3]),
        rank: u32::from_le_bytes([r0, r1, r2, r3]),
        kind,
    })
}
