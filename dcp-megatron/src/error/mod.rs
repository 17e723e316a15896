//! Errors of Megatron-Core checkpoints.

mod common_differs;
mod job_error;
mod key_mismatch;
mod plan_refusal;

use dcp_core::error::RankFailure;
use dcp_core::error::TensorError;
use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, FormatError, PlanError, Rank, StorageError};
use dcp_jobs::JobError;

use crate::disk::tracker::Tracked;
use crate::layout::ParallelLayout;

#[cfg(test)]
pub(crate) use common_differs::LISTED;
pub use common_differs::{CommonDifference, CommonDiffers};
pub use key_mismatch::{KeyMismatch, UnknownStrictHandling};
pub use plan_refusal::PlanRefusal;

/// A checkpoint of Megatron-Core could not be read, written or understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MegatronError {
    /// An error of the checkpoint format or the storage.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A leaf of a sharded state dict contradicts itself.
    #[error(transparent)]
    Shard(#[from] crate::sharded::ShardError),
    /// The shards of all ranks do not make whole tensors.
    #[error(transparent)]
    Integrity(#[from] crate::sharded::IntegrityError),
    /// Request and checkpoint have different keys, and the strict handling refuses that.
    #[error(transparent)]
    Keys(#[from] KeyMismatch),
    /// The common states of the ranks differ.
    #[error(transparent)]
    CommonDiffers(#[from] CommonDiffers),
    /// Lists that hold sharded, plain and local elements side by side, which Megatron-Core saves
    /// and can never load again.
    #[error(
        "lists that mix sharded, plain and local elements cannot be loaded again: {}; divide them, \
         or allow mixed lists when saving", Message(&.paths.join(", "))
    )]
    MixedLists {
        /// The places of the lists.
        paths: Vec<String>,
    },
    /// No strategy is registered for a backend in its version.
    #[error("no registered strategy {does} {backend}; registered: {}", listed(.registered), backend = Message(.backend))]
    NoStrategy {
        /// The missing operation: `saves to` or `loads from`.
        does: &'static str,
        /// The backend and its version.
        backend: String,
        /// The registered backends and their versions.
        registered: Vec<String>,
    },
    /// There is no complete Megatron-Core checkpoint.
    #[error("{message}", message = Message(.message))]
    NotACheckpoint {
        /// The contents of the folder, and what to do.
        message: String,
    },
    /// The backend, or its version, is unknown. Register the strategy of a plug-in to open it
    /// ([`MegatronOpenOptions::with_strategies`](crate::MegatronOpenOptions::with_strategies)).
    #[error(
        "the {backend} in metadata.json cannot be read here: the sharded backend has to be \
         \"torch_dist\" or \"zarr\", the common backend \"torch\", all of version 1; if the file is \
         right, the checkpoint is of another Megatron-Core, which has to save it again", backend = Message(.backend))]
    UnknownBackend {
        /// The name and version of the backend.
        backend: String,
    },
    /// The common state is missing or no dict.
    #[error("the common state {problem}", problem = Message(.problem))]
    CommonState {
        /// The problem, and what to do.
        problem: String,
    },
    /// The tracker of a run cannot be parsed.
    #[error(
        "the latest checkpoint of the run is unknown; write its iteration into the tracker file, \
         or open the folder of a checkpoint itself"
    )]
    Tracker(#[source] FormatError),
    /// The tracker of a run names a checkpoint that is not there, or was not finished.
    #[error(
        "the tracker of the run says {tracked}, but {folder} is not a complete checkpoint; restore \
         it, write the iteration of another one into the tracker, or allow the load to fall back \
         to the last complete one", folder = Message(.folder))]
    TrackedAbsent {
        /// The checkpoint that the tracker names.
        tracked: Tracked,
        /// The folder of that checkpoint.
        folder: String,
    },
    /// A job that changes a checkpoint got the folder of a run instead of a checkpoint.
    #[error(
        "this is the folder of a run with several checkpoints; name the folder of one of them, \
         such as {folder}", folder = Message(.folder))]
    FolderOfRun {
        /// The folder of the checkpoint that the tracker names, or else of the last complete one.
        folder: String,
    },
    /// Files differ from `integrity.json`, or a requested verification finds no manifest.
    #[error("the checkpoint is damaged: {}", some(.problems))]
    Damaged {
        /// The problems, by file.
        problems: Vec<String>,
    },
    /// Ranks that load together have opened different checkpoints.
    #[error(
        "rank {rank} sees another checkpoint than rank 0: {differs}; all ranks have to load from \
         the same place, which must not change meanwhile", differs = Message(.differs))]
    OtherCheckpoint {
        /// The first rank that does.
        rank: Rank,
        /// The differences.
        differs: String,
    },
    /// The background saver has other ranks than the save.
    #[error(
        "this is rank {rank} of {world_size} in the group of the save, but rank {background_rank} \
         of {background_world_size} in that of the background saver; make the saver with a second \
         group of the same ranks in the same order"
    )]
    OtherGroup {
        /// The rank in the group of the save's options.
        rank: Rank,
        /// The ranks of that group.
        world_size: u32,
        /// The rank in the group of the background saver.
        background_rank: Rank,
        /// The ranks of that group.
        background_world_size: u32,
    },
    /// A [`SaveDistribution`](crate::parallel::SaveDistribution) that does not cover every shard.
    #[error(
        "the distribution decides on {decided} shards of this rank, but the rank has a \
         state of {shards} shards; it has to say so of each of them, in their order"
    )]
    Distribution {
        /// The number of shards that the distribution covers.
        decided: usize,
        /// The number of shards in the rank's state.
        shards: usize,
    },
    /// The stored shape of a flattened tensor (Megatron-Core 0.8 to 0.15) contradicts its own.
    #[error(
        "{fqn} was saved flattened, as {stored} for a tensor of shape {original}, which does not \
         go together: {problem}", fqn = Quoted(.fqn), stored = Message(.stored), original = Message(.original), problem = Message(.problem))]
    Flattened {
        /// The tensor.
        fqn: String,
        /// Its shape in the index.
        stored: String,
        /// Its shape for Megatron-Core.
        original: String,
        /// The contradiction between the two shapes.
        problem: String,
    },
    /// The parameters of optimizer state in this form cannot be searched.
    #[error("{what} {problem}", what = Quoted(.what), problem = Message(.problem))]
    Optimizer {
        /// The entry of the checkpoint.
        what: String,
        /// The reason that prevents the search.
        problem: String,
    },
    /// An invalid parallel layout.
    #[error("no job has the layout {layout}: {problem}", problem = Message(.problem))]
    Layout {
        /// The layout.
        layout: ParallelLayout,
        /// The reason why it is invalid.
        problem: String,
    },
    /// A dimension that the ranks cannot divide equally.
    #[error(
        "{key} cannot be divided into {parts} equal parts: it has {len} {what}{}",
        .axis.map(|axis| format!(" along axis {axis}")).unwrap_or_default(), key = Quoted(.key))]
    Indivisible {
        /// The tensor, or the stack of layers.
        key: String,
        /// The unit that would be divided: `elements`, `layers` or `experts`.
        what: &'static str,
        /// The axis, where it is one.
        axis: Option<usize>,
        /// The number of these units.
        len: u64,
        /// Into how many parts.
        parts: u64,
    },
    /// The optimizer's state is in flat buffers, one set for each rank of the model, and so belongs
    /// to another layout.
    #[error(
        "the optimizer's state is in flat buffers of {groups} model-parallel ranks, which cannot be \
         divided among those of {layout}: leave the optimizer out, or turn its state into that of \
         parameters first"
    )]
    FlatOptimizer {
        /// The number of model-parallel ranks with buffers of their own.
        groups: u64,
        /// The requested layout.
        layout: ParallelLayout,
    },
    /// An asynchronous save or one of its finalizers failed.
    #[error(
        "asynchronous save {call} failed and is not marked complete: {}",
        .failures.iter().map(|f| format!("rank {}: {}", f.rank, Message(&f.message))).collect::<Vec<_>>().join("; ")
    )]
    AsyncCall {
        /// The number of the call, counted from 1 in the order in which calls were scheduled.
        call: u64,
        /// Each failing rank and what it said.
        failures: Vec<RankFailure>,
        /// The calls that were finalized before this one was found to have failed, and that nobody
        /// reported yet; of a queue that was closed, also those after it.
        finalized: Vec<u64>,
    },
    /// Ranks schedule or finalize different asynchronous saves.
    #[error(
        "asynchronous calls do not match: rank {left_rank} is {left}, rank {right_rank} is {right}; \
         schedule and finalize on all ranks, in the same order", left = Message(.left), right = Message(.right))]
    UnmatchedCalls {
        /// The step that one rank is at, such as the finalizer of a call.
        left: String,
        /// The rank that is.
        left_rank: Rank,
        /// The step that another rank is at.
        right: String,
        /// That other rank.
        right_rank: Rank,
    },
    /// The folders of `--ckpt-format torch` do not make a checkpoint.
    #[error("{folder}: {problem}", folder = Message(.folder), problem = Message(.problem))]
    Legacy {
        /// The folder, such as `mp_rank_00_001`.
        folder: String,
        /// The problem, and what to do.
        problem: String,
    },
    /// An error of an offline job.
    #[error(transparent)]
    Convert(#[from] JobError),
}

fn some(problems: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> =
        problems.iter().take(SHOWN).map(|problem| Message(problem).to_string()).collect();
    let more = problems.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    shown.join("; ") + &more
}

fn listed(backends: &[String]) -> String {
    match backends {
        [] => "nothing else".to_owned(),
        some => some.join(", "),
    }
}

impl From<StorageError> for MegatronError {
    fn from(error: StorageError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<TensorError> for MegatronError {
    fn from(error: TensorError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<PlanError> for MegatronError {
    fn from(error: PlanError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<FormatError> for MegatronError {
    fn from(error: FormatError) -> Self {
        Self::Checkpoint(error.into())
    }
}
