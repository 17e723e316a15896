//! Connecting to a rank that listens.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use super::wire::{self, Hello, Reply};
use crate::mesh::Patience;
use crate::mesh::frame::MAX_ITEM;

/// The longest that one attempt waits for the other host.
const ATTEMPT: Duration = Duration::from_secs(5);

/// When keep-alive probes of a silent connection start, and their interval.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum DialError {
    Io(io::Error),
    Refused { reason: String, retry: bool },
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Connects and shakes hands.
pub(super) fn dial(
    address: SocketAddr,
    hello: &Hello,
    patience: Patience<'_>,
) -> Result<TcpStream, DialError> {
    let left = patience.deadline.left().ok_or(io::Error::from(io::ErrorKind::TimedOut))?;
    let stream = TcpStream::connect_timeout(&address, left.min(ATTEMPT))?;
    if stream.local_addr()? == stream.peer_addr()? {
        // On one host, a port without a listener may be given to the caller itself.
        return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
    }
    configure(&stream)?;
    wire::send(&stream, hello, patience)?;
    match wire::receive(&stream, MAX_ITEM, patience)? {
        Reply::Welcome => Ok(stream),
        Reply::Refused { reason, retry } => Err(DialError::Refused { reason, retry }),
        Reply::Table(_) | Reply::Probe => Err(wire::invalid("an answer out of turn").into()),
    }
}

/// Sets what every connection needs: small messages go out at once, and a host that vanished
/// silently is noticed.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}
