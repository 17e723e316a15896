//! Ranks as threads, in the groups that Megatron-Core makes of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp_collectives::{LocalCollective, LocalGroup};
use dcp_core::Collective;
pub(crate) use dcp_testing::on_boxed_ranks;

/// Far more than any test takes.
const PATIENT: Duration = Duration::from_secs(120);

/// A rank among `tp` tensor-parallel ranks with `dp` replicas each, tensor-parallel ranks next to
/// each other.
#[derive(Clone, Debug)]
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) tp_rank: u32,
    /// All ranks.
    pub(crate) world: Arc<dyn Collective>,
    /// Those with the same tensor-parallel rank.
    pub(crate) replicas: Arc<dyn Collective>,
}

/// Runs `main` on `tp * dp` threads.
pub(crate) fn on_mesh<T: Send>(tp: u32, dp: u32, main: impl Fn(Mesh) -> T + Sync) -> Vec<T> {
    let replicas: Vec<Mutex<Vec<Option<LocalCollective>>>> = (0..tp)
        .map(|_| LocalGroup::new(dp).deadline(PATIENT).build())
        .map(|group| Mutex::new(group.into_iter().map(Some).collect()))
        .collect();
    on_boxed_ranks(tp * dp, |rank, world| {
        let (tp_rank, dp_rank) = (rank % tp, rank / tp);
        let group = replicas[tp_rank as usize].lock().unwrap()[dp_rank as usize].take();
        let replicas = Arc::new(group.unwrap());
        main(Mesh { rank, tp_rank, world: world.into(), replicas })
    })
}
