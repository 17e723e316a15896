//! Ports of this machine for programs that get their number.

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

use crate::Result;

/// A port at which nobody listens. Until the socket is dropped, nobody else gets it from the system;
/// whoever requests it by its number can listen there.
pub fn reserved() -> Result<(Socket, u16)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    let address = socket.local_addr()?.as_socket().ok_or("a port without a number")?;
    Ok((socket, address.port()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn reserved_ports_differ_and_can_be_listened_at() {
        let ports = [(); 100].map(|()| reserved().unwrap());
        let mut numbers = ports.each_ref().map(|(_, port)| *port);
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]), "{numbers:?}");
        for (_, port) in &ports {
            TcpListener::bind(("127.0.0.1", *port)).unwrap();
        }
    }
}
