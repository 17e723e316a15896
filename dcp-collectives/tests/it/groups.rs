//! Groups over loopback sockets, with threads as ranks.

use std::thread;
use std::time::Duration;

use dcp_collectives::{TcpCollective, TcpConfig};
pub(crate) use dcp_testing::{listener, loopback, reserved_port};

/// Long enough for a busy machine.
pub(crate) const PATIENT: Duration = Duration::from_secs(120);

/// Runs a test that waits until a deadline is over.
pub(crate) fn with_growing_deadline(test: impl Fn(Duration)) {
    dcp_testing::with_growing_deadline(Duration::from_secs(1), test);
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
