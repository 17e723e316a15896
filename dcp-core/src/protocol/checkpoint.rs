//! The contracts between the engine and a checkpoint format.
//!
//! [`StorageWriter`] and [`StorageReader`] have PyTorch's roles of the same names. A format
//! implements them once, over any [`Storage`](crate::Storage). Tensors stay with the caller:
//! [`DataSource`] provides the bytes of an item to write, [`DataSink`] the memory for an item to
//! read.

mod pointers;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::CheckpointError;
use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;
use crate::plans::plan::{GlobalPlan, LoadPlan, ReadItem, SavePlan, WritePlan};
use crate::state::value::{Dict, Value};
use crate::storages::storage::{Claim, OwnThreads};
use crate::tensors::payload::Payload;
use crate::tensors::tensor_view::TensorView;

/// A nested state dict: the value that a trainer saves and loads, as in PyTorch.
pub type StateDict = Dict;

/// An object whose state can be saved and restored, such as an optimizer.
///
/// PyTorch (2.15) expands such objects at the top level of a state dict only, and so does
/// `dcp::AppState`. `dcp::save` and `dcp::load` take any of them.
///
/// ```
/// use dcp_core::{CheckpointError, DType, StateDict, Stateful, Tensor, Value};
///
/// struct Sgd {
///     momentum: Tensor,
///     lr: f64,
/// }
///
/// impl Stateful for Sgd {
///     fn state_dict(&self) -> Result<StateDict, CheckpointError> {
///         // The clone of a tensor shares its memory, so a load fills it in place.
///         let momentum = Value::from(self.momentum.clone());
///         Ok(StateDict::from([("momentum", momentum), ("lr", Value::from(self.lr))]))
///     }
///
///     fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError> {
///         let lr = state.get("lr").and_then(Value::as_float);
///         self.lr = lr.ok_or_else(|| CheckpointError::application("\"lr\" is not a float"))?;
///         Ok(())
///     }
/// }
///
/// let saved = Sgd { momentum: Tensor::zeros(DType::Float32, [4])?, lr: 0.1 }.state_dict()?;
/// let mut restored = Sgd { momentum: Tensor::zeros(DType::Float32, [4])?, lr: 0.0 };
/// restored.load_state_dict(saved)?;
/// assert_eq!(restored.lr, 0.1);
/// # Ok::<(), CheckpointError>(())
/// ```
pub trait Stateful {
    /// The current state. Tensors share the object's memory.
    ///
    /// In a group, values without shards are the same on all ranks, of which one saves them. What differs by rank
    /// has a name with the rank, such as `rng/rank_3`.
    ///
    /// # Errors
    ///
    /// When the object has no state to save.
    fn state_dict(&self) -> Result<StateDict, CheckpointError>;

    /// Applies a loaded state. Its tensors were filled in place before this call.
    ///
    /// # Errors
    ///
    /// When the state does not fit.
    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError>;
}

/// A state dict is its own state: loading replaces its values, in place where they are tensors.
impl Stateful for StateDict {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        Ok(self.clone())
    }

    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError> {
        *self = state;
        Ok(())
    }
}

/// Provides the bytes of items to write.
#[async_trait]
pub trait DataSource: fmt::Debug + Send + Sync {
    /// The bytes `byte_range` of the item at position `item` of this rank's [`SavePlan`]: elements
    /// in row-major little-endian order, or the encoded object. Calls for different items are
    /// concurrent; within an item, ranges ascend without gaps and cover it exactly once.
    ///
    /// # Errors
    ///
    /// When the data is unavailable. The caller checks the length.
    #[doc(alias = "resolve_data")]
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError>;

    /// The maximum number of bytes per call: `u64::MAX` if all data is in memory, less if every
    /// call has to fetch it.
    fn segment_bytes(&self) -> u64;

    /// Threads on which [`resolve`](Self::resolve) does all of its work, and a writer writes the bytes
    /// where they are in the cache; none if it waits for another machine, or has no threads.
    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>>;
}

/// Receives the elements and objects that a load reads.
pub trait DataSink: fmt::Debug + Send + Sync {
    /// The memory for a tensor item: a view with the shape of the item's region. The reader fills
    /// it and then calls [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// When there is no such memory.
    #[doc(alias = "resolve_tensor")]
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError>;

    /// Reports that the item's destination is filled. All loans of it have ended.
    ///
    /// # Errors
    ///
    /// When the data cannot be processed further, such as copied to a device.
    #[doc(alias = "commit_tensor")]
    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError>;

    /// Receives an object.
    ///
    /// # Errors
    ///
    /// When the value is refused.
    #[doc(alias = "load_bytes")]
    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError>;
}

/// Writes checkpoints of one format to one location.
///
/// Order of calls in a save: `encode_object` on every rank; `begin` and `place` on the coordinator;
/// `write` on every rank; then `commit` on the coordinator, or `abandon` on every rank if any
/// failed. [`SaveRun`](crate::save_run::SaveRun) makes the calls in this order. State from `begin`
/// to
/// `commit` travels in the [`SaveSession`].
#[async_trait]
pub trait StorageWriter: fmt::Debug + Send + Sync {
    /// Encodes an object. The plan needs its length.
    ///
    /// # Errors
    ///
    /// When the format cannot store the value.
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError>;

    /// Examines what exists and chooses names that touch none of it. If the storage has claims, the
    /// session holds one, so that only one of several concurrent savers continues.
    ///
    /// # Errors
    ///
    /// When the location is not writable, another saver is at work in it, or it has a checkpoint
    /// that may not be replaced.
    async fn begin(&self) -> Result<SaveSession, CheckpointError>;

    /// Assigns a placement to every selected item, in the plan's metadata and in the returned plans
    /// of the ranks. Pure arithmetic: dtype and shape determine the encoded length of every item.
    ///
    /// # Errors
    ///
    /// When the format cannot store an item.
    #[doc(alias = "prepare_global_plan")]
    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError>;

    /// The name of an earlier plan's data file `file` in a session of `generation`, so that the
    /// plan can be reused.
    ///
    /// # Errors
    ///
    /// When [`place`](Self::place) assigns no such name.
    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError>;

    /// Writes this rank's items durably. Dropping the future leaves files that no metadata refers
    /// to.
    ///
    /// # Errors
    ///
    /// When the data or the storage fails. The caller then abandons the save.
    #[doc(alias = "write_data")]
    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError>;

    /// Checks that every file exists and is whole, publishes the checkpoint atomically, and then
    /// removes what the replaced checkpoint and dead saves left. Placements in `metadata` are where
    /// items are stored, also where [`WriteReport::stored`] differs from the plan.
    ///
    /// # Errors
    ///
    /// When the checkpoint was not published; the previous one is then unchanged. Removes what the
    /// ranks wrote, unless the storage may still publish it. The caller does not abandon the save.
    #[doc(alias = "finish")]
    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError>;

    /// Removes the files that [`write`](Self::write) created, after a failure; best effort.
    async fn abandon(&self, plan: &WritePlan);
}

/// The result of [`StorageWriter::begin`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SaveSession {
    /// 0 in an empty location; otherwise larger than in any existing name, so that names are new.
    pub generation: u64,
    /// Files of the replaced checkpoint and of dead saves, to remove after the commit.
    pub stale: Vec<Key>,
    /// A fingerprint of the writer's settings that affect [`place`](StorageWriter::place), such as
    /// the division of items into files. Plans are reused only if it is equal.
    pub layout: u64,
    /// Keeps other savers out until the last clone of the session is dropped, if the storage
    /// supports that.
    pub claim: Option<Arc<dyn Claim>>,
    state: WriterState,
}

/// A writer's state from [`StorageWriter::begin`] to [`StorageWriter::commit`].
#[derive(Clone, Default)]
struct WriterState(Option<Arc<dyn Any + Send + Sync>>);

impl fmt::Debug for WriterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "WriterState" } else { "None" })
    }
}

impl SaveSession {
    /// A session with names of `generation` that removes `stale` after the commit.
    #[must_use]
    pub fn new(generation: u64, stale: Vec<Key>) -> Self {
        Self { generation, stale, layout: 0, claim: None, state: WriterState::default() }
    }

    /// Sets the fingerprint of the writer's settings.
    #[must_use]
    pub fn with_layout(mut self, layout: u64) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the writer's state.
    #[must_use]
    pub fn with_state<T: Any + Send + Sync>(mut self, state: T) -> Self {
        self.state = WriterState(Some(Arc::new(state)));
        self
    }

    /// The writer's state, if it has this type.
    #[must_use]
    pub fn state<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.state.0.as_deref()?.downcast_ref()
    }

    /// Sets the claim on the object that the commit replaces.
    #[must_use]
    pub fn with_claim(mut self, claim: Option<Arc<dyn Claim>>) -> Self {
        self.claim = claim;
        self
    }
}

/// The result of one rank's write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteReport {
    /// The files, with their lengths in bytes.
    pub files: Vec<(Key, u64)>,
    /// SHA-256 hashes, if the writer computed any.
    pub sha256: BTreeMap<Key, [u8; 32]>,
    /// CRC-32s of chunks and objects, by the offset of their stored item in the file, if the writer
    /// computed any: of the elements of tensors before their encoding, and of encoded objects.
    pub checksums: BTreeMap<Key, Vec<(u64, u32)>>,
    /// The stored place of each item of files in which it differs from the plan, such as compressed
    /// ones: the planned offset, then the range of bytes in the file. Lists every item of such a file.
    pub stored: BTreeMap<Key, Vec<(u64, Range<u64>)>>,
    /// The duration of each file's write, if the writer measured it. Files are written concurrently, so the
    /// sum exceeds the duration of the write.
    pub durations: BTreeMap<Key, Duration>,
}

impl WriteReport {
    /// A report of `files` with their lengths in bytes.
    #[must_use]
    pub fn new(files: Vec<(Key, u64)>) -> Self {
        Self { files, ..Self::default() }
    }

    /// Sets the SHA-256 hashes of files.
    #[must_use]
    pub fn with_sha256(mut self, sha256: BTreeMap<Key, [u8; 32]>) -> Self {
        self.sha256 = sha256;
        self
    }

    /// Sets the CRC-32s of the chunks and objects of files.
    #[must_use]
    pub fn with_checksums(mut self, checksums: BTreeMap<Key, Vec<(u64, u32)>>) -> Self {
        self.checksums = checksums;
        self
    }

    /// Sets where the items of files are stored, by the offsets at which they were planned.
    #[must_use]
    pub fn with_stored(mut self, stored: BTreeMap<Key, Vec<(u64, Range<u64>)>>) -> Self {
        self.stored = stored;
        self
    }

    /// Sets how long files took.
    #[must_use]
    pub fn with_durations(mut self, durations: BTreeMap<Key, Duration>) -> Self {
        self.durations = durations;
        self
    }
}

/// Reads checkpoints of one format from one location.
#[async_trait]
pub trait StorageReader: fmt::Debug + Send + Sync {
    /// The checkpoint's index, validated: paths stay inside, numbers are in bounds.
    ///
    /// # Errors
    ///
    /// When there is no checkpoint, or its index is bad.
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError>;

    /// Reads the plan's items into the sink's memory, and little else: headers, and gaps that are
    /// cheaper to read than to skip.
    ///
    /// Dropping the future stops the load, with destinations partly filled.
    ///
    /// # Errors
    ///
    /// When the storage or the sink fails, or stored bytes contradict the metadata.
    #[doc(alias = "read_data")]
    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError>;
}

/// The cost of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadReport {
    /// The total size of the plan's items in bytes.
    pub bytes_needed: u64,
    /// Bytes requested from the storage, including headers and gaps.
    pub bytes_read: u64,
}

impl ReadReport {
    /// A report of reading `bytes_read` bytes for items of `bytes_needed`.
    #[must_use]
    pub fn new(bytes_needed: u64, bytes_read: u64) -> Self {
        Self { bytes_needed, bytes_read }
    }
}

/// Adds the costs of two reads.
impl AddAssign for ReadReport {
    fn add_assign(&mut self, other: Self) {
        self.bytes_needed = self.bytes_needed.saturating_add(other.bytes_needed);
        self.bytes_read = self.bytes_read.saturating_add(other.bytes_read);
    }
}
