//! The messages of ranks before a connection is of use, once both are known to be of this job: small CBOR
//! items behind a length. All numbers are little endian.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dcp_core::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(super) use crate::mesh::frame::invalid;
use crate::mesh::frame::{decode, encode, is_pause};
use crate::mesh::{Channel, Patience, TICK};

/// The longest address table, in bytes.
pub(super) const MAX_TABLE: u32 = 64 << 20;

/// The first message of the dialing side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) job: String,
    pub(super) world_size: u32,
    pub(super) rank: Rank,
    /// The process that the sender expects at the other end.
    pub(super) to: Rank,
    pub(super) purpose: Purpose,
}

/// The purpose of a connection.
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
    /// Requests a sign of life from a rank that waits for the address table.
    Probe,
    /// The address at which each rank listens.
    Table(Vec<SocketAddr>),
    Refused {
        reason: String,
        retry: bool,
        /// The sender is not the process that was dialed, but one of another job, or another rank.
        #[serde(default)]
        stranger: bool,
    },
}

/// The answer of a waiting rank to [`Reply::Probe`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Presence {
    Here,
}

/// Sends one item of the handshake.
pub(super) fn send(
    channel: &dyn Channel,
    item: &impl Serialize,
    patience: Patience<'_>,
) -> io::Result<()> {
    write_all(channel, &encode(item)?, patience)
}

/// Receives one item of the handshake, of at most `limit` bytes. Memory grows with what has arrived,
/// not with what is announced.
pub(super) fn receive<T: DeserializeOwned>(
    channel: &dyn Channel,
    limit: u32,
    patience: Patience<'_>,
) -> io::Result<T> {
    const PIECE: usize = 16 << 10;
    let mut prefix = [0; 4];
    read_exact(channel, &mut prefix, patience)?;
    let len = u32::from_le_bytes(prefix);
    if len > limit {
        return Err(invalid(format!("an item of {len} bytes, the limit is {limit}")));
    }
    let len = len as usize;
    let mut body = Vec::new();
    while body.len() < len {
        let begin = body.len();
        body.resize(len.min(begin + PIECE), 0);
        read_exact(channel, body.get_mut(begin..).unwrap_or_default(), patience)?;
    }
    decode(&body)
}

pub(super) fn write_all(
    channel: &dyn Channel,
    mut bytes: &[u8],
    patience: Patience<'_>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let len = insist(patience, |wait| channel.write(bytes, wait))?;
        bytes = bytes.get(len..).unwrap_or_default();
    }
    insist(patience, |wait| channel.flush(wait))
}

pub(super) fn read_exact(
    channel: &dyn Channel,
    mut into: &mut [u8],
    patience: Patience<'_>,
) -> io::Result<()> {
    while !into.is_empty() {
        match insist(patience, |wait| channel.read(into, wait))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => into = into.get_mut(len..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Repeats an operation that ends with its time slice, until the deadline.
fn insist<T>(
    patience: Patience<'_>,
    mut attempt: impl FnMut(Duration) -> io::Result<T>,
) -> io::Result<T> {
    loop {
        let left = patience.left().ok_or(io::ErrorKind::TimedOut)?;
        match attempt(left.min(TICK)) {
            Err(error) if is_pause(&error) => {}
            done => return done,
        }
    }
}
