//! Every clause of `Collective`, on threads and on sockets.

#![expect(
    clippy::unwrap_used,
    reason = "the suite reports a group that cannot be formed as a panic"
)]

use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp_collectives::{LocalGroup, Secret, TcpConfig};
use dcp_conformance::collective::trials;
use dcp_core::Collective;

fn local(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let group = LocalGroup::new(world_size).deadline(deadline).build();
    group.into_iter().map(|member| Box::new(member) as _).collect()
}

fn tcp(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    over_tcp(world_size, deadline, |config| config)
}

fn secret(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let secret = Secret::new([7; 32]).unwrap();
    over_tcp(world_size, deadline, move |config| config.secret(secret.clone()))
}

#[cfg(feature = "tls")]
fn tls(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let at = |name: &str| format!("{}/tests/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let tls = dcp_collectives::Tls::from_files(at("rank.pem"), at("rank.key"), at("ca.pem"));
    let tls = tls.unwrap();
    over_tcp(world_size, deadline, move |config| config.tls(tls.clone()))
}

fn over_tcp(
    world_size: u32,
    deadline: Duration,
    protect: impl Fn(TcpConfig) -> TcpConfig,
) -> Vec<Box<dyn Collective>> {
    let (listener, port) = dcp_testing::listener();
    let master = dcp_testing::loopback().to_string();
    let config =
        |rank| protect(TcpConfig::new(rank, world_size, &*master, port).deadline(deadline));
    let mut master = Some(listener);
    let ranks = (0..world_size)
        .map(|rank| match master.take() {
            Some(listener) => config(rank).listener(listener),
            None => config(rank),
        })
        .map(|config| thread::spawn(move || Box::new(config.connect().unwrap()) as _))
        .collect::<Vec<_>>();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn main() -> ExitCode {
    let mut all = trials("local", Arc::new(local));
    all.extend(trials("tcp", Arc::new(tcp)));
    all.extend(trials("secret", Arc::new(secret)));
    #[cfg(feature = "tls")]
    all.extend(trials("tls", Arc::new(tls)));
    dcp_conformance::run(all)
}
