//! The handshake of a connection: small CBOR items behind a magic number, a version and a length.
//! All numbers are little endian.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use dcp_core::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(super) use crate::mesh::frame::invalid;
use crate::mesh::frame::{decode, encode, is_pause};
use crate::mesh::{Patience, TICK};

/// How every handshake begins. A stranger hardly says this.
const MAGIC: [u8; 8] = *b"dcp-coll";

/// The version of the handshake, and of the frames that follow it.
const VERSION: u32 = 2;

/// The longest address table, in bytes.
pub(super) const MAX_TABLE: u32 = 64 << 20;

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
    /// Requests a sign of life from a rank that waits for the address table.
    Probe,
    /// Where each rank listens.
    Table(Vec<SocketAddr>),
    Refused {
        reason: String,
        retry: bool,
    },
}

/// What a waiting rank answers to [`Reply::Probe`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Presence {
    Here,
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
            let left = self.patience.left().ok_or(io::ErrorKind::TimedOut)?;
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
