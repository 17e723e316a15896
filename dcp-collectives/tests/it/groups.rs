//! Groups over loopback sockets, with threads as ranks.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::Duration;

use dcp_collectives::{TcpCollective, TcpConfig};
pub(crate) use dcp_testing::{listener, loopback};
use socket2::{Domain, Socket, Type};

/// Long enough for a busy machine.
pub(crate) const PATIENT: Duration = Duration::from_secs(120);

/// Runs a test that waits until a deadline is over. On a busy machine a short one can be over too
/// soon, so a test that fails runs again with longer ones.
pub(crate) fn with_growing_deadline(test: impl Fn(Duration)) {
    let mut deadline = Duration::from_secs(1);
    while let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(deadline))) {
        if deadline > Duration::from_secs(30) {
            resume_unwind(panic);
        }
        deadline *= 8;
    }
}

/// A port at which nobody listens, and what keeps others from taking it. Whoever requests it by number
/// can listen there all the same.
pub(crate) fn reserved_port() -> (Socket, u16) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((loopback(), 0)).into()).unwrap();
    let port = socket.local_addr().unwrap().as_socket().unwrap().port();
    (socket, port)
}

pub(crate) fn config(rank: u32, world_size: u32, port: u16) -> TcpConfig {
    let config = TcpConfig::new(rank, world_size, loopback().to_string(), port);
    config.deadline(PATIENT).connect_timeout(PATIENT)
}

/// Forms a group whose ranks are configured alike.
pub(crate) fn tcp_group(
    world_size: u32,
    configure: impl Fn(TcpConfig) -> TcpConfig,
) -> Vec<TcpCollective> {
    let (listener, port) = listener();
    let mut listener = Some(listener);
    let threads = (0..world_size)
        .map(|rank| {
            let mut config = configure(config(rank, world_size, port));
            if let Some(listener) = listener.take() {
                config = config.listener(listener);
            }
            thread::spawn(move || config.connect())
        })
        .collect::<Vec<_>>();
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}
