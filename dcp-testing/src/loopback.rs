//! An address of this process alone, so that test processes do not meet at each other's ports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::OnceLock;

use socket2::{Domain, Socket, Type};

/// The loopback address of this process, where the system serves all of 127.0.0.0/8, as Linux does;
/// 127.0.0.1 elsewhere.
///
/// A port that one process gives back is soon another's. On one address, a rank that still dials
/// would then join a stranger's group.
#[must_use]
pub fn loopback() -> Ipv4Addr {
    static ADDRESS: OnceLock<Ipv4Addr> = OnceLock::new();
    *ADDRESS.get_or_init(|| {
        let [_, a, b, c] = std::process::id().to_be_bytes();
        // Neither the network's first address nor its last.
        let own = Ipv4Addr::new(127, a.wrapping_add(1).clamp(1, 254), b, c.clamp(1, 254));
        TcpListener::bind((own, 0)).map_or(Ipv4Addr::LOCALHOST, |_| own)
    })
}

/// A listener at a free port of [`loopback`], and its port.
#[must_use]
pub fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind(SocketAddr::new(IpAddr::V4(loopback()), 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A port at which nobody listens, and what keeps others from taking it. Whoever requests it by number
/// can listen there all the same.
#[must_use]
pub fn reserved_port() -> (Socket, u16) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((loopback(), 0)).into()).unwrap();
    let port = socket.local_addr().unwrap().as_socket().unwrap().port();
    (socket, port)
}
