//! Every clause of `Collective`, with a network for all messages and for those from 1 KiB on, with
//! none, and with NCCL where each rank has a device.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "the suite reports a group that cannot be formed as a panic"
)]

#[allow(dead_code, reason = "other tests use the rest")]
mod fake;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dcp_collectives::LocalGroup;
use dcp_collectives_nccl::{BulkCollective, Network};
use dcp_conformance::collective::trials;
use dcp_core::Collective;
use dcp_testing::on_each;

use crate::fake::{FakeNetwork, Fault, Hub};

/// A group of threads over these networks.
fn over<N: Network>(
    networks: Vec<N>,
    threshold: u64,
    deadline: Duration,
) -> Vec<Box<dyn Collective>> {
    let group = LocalGroup::new(networks.len() as u32).deadline(deadline).build();
    let members: Vec<_> = group.into_iter().zip(networks).collect();
    on_each(members, |(member, network)| {
        let bulk = BulkCollective::builder(Arc::new(member) as _, network);
        let bulk = bulk.threshold(threshold).chunk_bytes(100_003).deadline(deadline);
        Box::new(bulk.connect().unwrap()) as _
    })
}

fn fake(world_size: u32, threshold: u64, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let hub = Arc::new(Hub::default());
    let networks = (0..world_size).map(|_| FakeNetwork::new(&hub, Fault::None));
    over(networks.collect(), threshold, deadline)
}

fn without(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
    let hub = Arc::new(Hub::default());
    let fault = |rank| if rank == world_size - 1 { Fault::NoLibrary } else { Fault::None };
    let networks = (0..world_size).map(|rank| FakeNetwork::new(&hub, fault(rank)));
    over(networks.collect(), 0, deadline)
}

fn main() -> ExitCode {
    let mut all = trials("every message", Arc::new(|size, within| fake(size, 0, within)));
    all.extend(trials("large ones", Arc::new(|size, within| fake(size, 1 << 10, within))));
    all.extend(trials("none", Arc::new(without)));
    #[cfg(feature = "nccl")]
    match nccl::devices() {
        Ok(_) => all.extend(trials("nccl", Arc::new(nccl::group))),
        Err(reason) => println!("SKIPPED: the suite on NCCL: {reason}"),
    }
    #[cfg(not(feature = "nccl"))]
    println!("SKIPPED: the suite on NCCL: it needs --features nccl");
    dcp_conformance::run(all)
}

#[cfg(feature = "nccl")]
mod nccl {
    use std::time::Duration;

    use dcp_collectives_nccl::{NcclNetwork, Network as _};
    use dcp_core::Collective;

    /// The largest group of the suite.
    const RANKS: usize = 8;

    /// Whether each rank of the suite has a device: NCCL refuses two ranks on one.
    pub(super) fn devices() -> Result<(), String> {
        (0..RANKS).try_for_each(|device| {
            NcclNetwork::new(device).probe().map_err(|error| error.to_string())
        })
    }

    pub(super) fn group(world_size: u32, deadline: Duration) -> Vec<Box<dyn Collective>> {
        super::over((0..world_size as usize).map(NcclNetwork::new).collect(), 0, deadline)
    }
}
