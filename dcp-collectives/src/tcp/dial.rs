//! Connecting to a rank that listens.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use super::security::Security;
use super::wire::{self, Hello, Reply};
use crate::mesh::frame::MAX_ITEM;
use crate::mesh::{Channel, Patience};

/// The longest that one attempt waits for the other host.
const ATTEMPT: Duration = Duration::from_secs(5);

/// The silence of a connection before its first keep-alive probe, and the interval of the probes.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The reason why there is no connection.
#[derive(Debug)]
pub(super) enum DialError {
    Io(io::Error),
    /// The peer hung up during the handshake.
    Ended(io::Error),
    Refused {
        reason: String,
        retry: bool,
    },
    /// The peer is of another job, another rank, or protects its connections in another way.
    Stranger(String),
}

impl DialError {
    /// A connection that ends before the peer has answered may have made way for another one: a rank
    /// that has many handshakes under way drops the oldest. So it can be made again.
    fn before_welcome(self) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let ended = [UnexpectedEof, ConnectionReset, ConnectionAborted, BrokenPipe];
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Self::Stranger(error.to_string())
            }
            Self::Io(error) if ended.contains(&error.kind()) => Self::Ended(error),
            other => other,
        }
    }
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Connects and shakes hands. A peer greets at once, so `greeting` may be shorter than `patience`.
pub(super) fn dial(
    address: SocketAddr,
    security: &Security,
    hello: &Hello,
    greeting: Patience<'_>,
    patience: Patience<'_>,
) -> Result<Arc<dyn Channel>, DialError> {
    let left = patience.left().ok_or(io::Error::from(io::ErrorKind::TimedOut))?;
    let stream = TcpStream::connect_timeout(&address, left.min(ATTEMPT))?;
    if stream.local_addr()? == stream.peer_addr()? {
        // On one host, a port without a listener may be given to the caller itself.
        return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
    }
    configure(&stream)?;
    let channel = security.dial(stream, greeting).map_err(DialError::before_welcome)?;
    let reply = wire::send(&*channel, hello, patience)
        .and_then(|()| wire::receive(&*channel, MAX_ITEM, patience))
        .map_err(|error| DialError::Io(error).before_welcome())?;
    match reply {
        Reply::Welcome => Ok(channel),
        Reply::Refused { reason, stranger: true, .. } => Err(DialError::Stranger(reason)),
        Reply::Refused { reason, retry, .. } => Err(DialError::Refused { reason, retry }),
        Reply::Table(_) | Reply::Probe => Err(wire::invalid("an answer out of turn").into()),
    }
}

/// Sets the options of every connection: small messages go out at once, and a host that vanished
/// silently is noticed.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}
