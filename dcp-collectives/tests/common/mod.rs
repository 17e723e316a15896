//! Groups over loopback sockets, with threads as ranks.
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(clippy::unwrap_used, reason = "panicking is how a test fails")]

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use dcp_collectives::{TcpCollective, TcpConfig};
use dcp_core::CollectiveError;

/// Long enough for a busy machine.
pub(crate) const PATIENT: Duration = Duration::from_secs(30);

/// A bound listener for rank 0, and its port.
pub(crate) fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    listener().1
}

pub(crate) fn config(rank: u32, world_size: u32, port: u16) -> TcpConfig {
    TcpConfig::new(rank, world_size, "127.0.0.1", port).deadline(PATIENT).connect_timeout(PATIENT)
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

/// Runs `rank_main` on a thread for each member.
pub(crate) fn on_ranks<C: Send, T: Send>(
    group: Vec<C>,
    rank_main: impl Fn(C) -> Result<T, CollectiveError> + Sync,
) -> Vec<Result<T, CollectiveError>> {
    thread::scope(|scope| {
        let rank_main = &rank_main;
        let threads = group.into_iter().map(|member| scope.spawn(move || rank_main(member)));
        let threads = threads.collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
