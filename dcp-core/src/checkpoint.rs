//! The contracts between the engine and a checkpoint format.
//!
//! [`StorageWriter`] and [`StorageReader`] are PyTorch's roles of the same names, implemented
//! once per format over any [`Storage`](crate::Storage). Tensors stay with the caller:
//! [`DataSource`] yields the bytes of an item to write, [`DataSink`] the memory for an item to
//! read.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{AddAssign, Range};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::CheckpointError;
use crate::key::Key;
use crate::metadata::CheckpointMetadata;
use crate::payload::Payload;
use crate::plan::{GlobalPlan, LoadPlan, ReadItem, SavePlan, WritePlan};
use crate::storage::Claim;
use crate::tensor_view::TensorView;
use crate::value::{Dict, Value};

/// A nested state dict: what a trainer saves and loads, as in PyTorch.
pub type StateDict = Dict;

/// Something with state of its own that can be saved and restored, such as an optimizer.
///
/// PyTorch expands such values at the top level of a state dict only (2.15), and so does the
/// engine.
pub trait Stateful {
    /// The present state; tensors share the object's memory.
    ///
    /// # Errors
    ///
    /// When there is no state that could be saved.
    fn state_dict(&self) -> Result<StateDict, CheckpointError>;

    /// Takes over a loaded state. Tensors were filled in place before this call.
    ///
    /// # Errors
    ///
    /// When the state does not fit.
    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError>;
}

/// Yields the bytes of items to write.
#[async_trait]
pub trait DataSource: fmt::Debug + Send + Sync {
    /// The bytes `byte_range` of the item at position `item` of this rank's [`SavePlan`]: elements
    /// in row-major little-endian order, or the encoded object. Called concurrently for different
    /// items; within an item the ranges ascend without gaps and cover it exactly once.
    ///
    /// # Errors
    ///
    /// When the data cannot be had. The length is checked by the caller.
    #[doc(alias = "resolve_data")]
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError>;

    /// The most bytes to ask for at once: `u64::MAX` where all data is in memory anyway, less
    /// where every call has to fetch it first.
    fn segment_bytes(&self) -> u64;
}

/// Takes what a load reads.
pub trait DataSink: fmt::Debug + Send + Sync {
    /// The memory for a tensor item: a view whose shape is the item's region. The reader fills it
    /// and then calls [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// When the memory cannot be had.
    #[doc(alias = "resolve_tensor")]
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError>;

    /// The item's destination has been filled, and no loan of it is out any more.
    ///
    /// # Errors
    ///
    /// When the data cannot be taken on, such as to a device.
    #[doc(alias = "commit_tensor")]
    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError>;

    /// An object was read.
    ///
    /// # Errors
    ///
    /// When the value cannot be taken.
    #[doc(alias = "load_bytes")]
    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError>;
}

/// Writes checkpoints of one format to one place.
///
/// Order of calls in a save: `encode_object` on every rank; `begin` and `place` on the
/// coordinator; `write` on every rank; then `commit` on the coordinator, or `abandon` on every
/// rank when any of them failed. [`SaveRun`](crate::SaveRun) makes the calls so. What a writer
/// learns in `begin` and needs in `commit` travels in the [`SaveSession`].
#[async_trait]
pub trait StorageWriter: fmt::Debug + Send + Sync {
    /// The bytes of an object, whose length the plan needs.
    ///
    /// # Errors
    ///
    /// When the format has no way to store the value.
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError>;

    /// Looks at what is there and decides on names that touch none of it. Where the storage has
    /// claims, the session holds one, so that of savers that meet in one place one goes on.
    ///
    /// # Errors
    ///
    /// When the place cannot be written, another saver is at work in it, or holds a checkpoint that must not be replaced.
    async fn begin(&self) -> Result<SaveSession, CheckpointError>;

    /// Gives every selected item its place, in the plan's metadata and in the returned plans of
    /// the ranks. Pure arithmetic: the encoded length of every item is known from its dtype and
    /// shape.
    ///
    /// # Errors
    ///
    /// When an item cannot be stored in this format.
    #[doc(alias = "prepare_global_plan")]
    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError>;

    /// What the data file `file` of an earlier plan is called in a session of `generation`, so that
    /// the plan can serve again.
    ///
    /// # Errors
    ///
    /// When it is no name that [`place`](Self::place) gives.
    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError>;

    /// Writes this rank's items, durably. Dropping the future leaves files that no metadata
    /// refers to.
    ///
    /// # Errors
    ///
    /// When data or storage fail; then the caller abandons the save.
    #[doc(alias = "write_data")]
    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError>;

    /// Makes the checkpoint visible, atomically, after checking that every file is there and
    /// whole; then removes what the replaced checkpoint and dead saves left.
    ///
    /// # Errors
    ///
    /// When it did not become visible; the previous checkpoint is then untouched. What the ranks
    /// wrote is removed, unless the storage may still make it visible. The caller does not abandon
    /// the save.
    #[doc(alias = "finish")]
    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError>;

    /// Removes the files that [`write`](Self::write) made, after a failure; best effort.
    async fn abandon(&self, plan: &WritePlan);
}

/// What [`StorageWriter::begin`] found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SaveSession {
    /// 0 in a fresh place; otherwise larger than in any name found, so that names are new.
    pub generation: u64,
    /// Files of the checkpoint that is replaced and of dead saves, for removal after the commit.
    pub stale: Vec<Key>,
    /// A fingerprint of the writer's own settings that [`place`](StorageWriter::place) depends
    /// on, such as how items are divided into files. Plans are only reused under the same one.
    pub layout: u64,
    /// What keeps other savers out until the last clone of the session is dropped, where the
    /// storage can do that.
    pub claim: Option<Arc<dyn Claim>>,
    state: WriterState,
}

/// What a writer remembers from [`StorageWriter::begin`] to [`StorageWriter::commit`].
#[derive(Clone, Default)]
struct WriterState(Option<Arc<dyn Any + Send + Sync>>);

impl fmt::Debug for WriterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "WriterState" } else { "None" })
    }
}

impl SaveSession {
    /// A session with names of `generation`, to remove `stale` after the commit.
    #[must_use]
    pub fn new(generation: u64, stale: Vec<Key>) -> Self {
        Self { generation, stale, layout: 0, claim: None, state: WriterState::default() }
    }

    /// The same, for a writer with these settings.
    #[must_use]
    pub fn with_layout(mut self, layout: u64) -> Self {
        self.layout = layout;
        self
    }

    /// The same, with what the writer has to remember until the commit.
    #[must_use]
    pub fn with_state<T: Any + Send + Sync>(mut self, state: T) -> Self {
        self.state = WriterState(Some(Arc::new(state)));
        self
    }

    /// What [`with_state`](Self::with_state) was given, if it is of this type.
    #[must_use]
    pub fn state<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.state.0.as_deref()?.downcast_ref()
    }

    /// The same, holding the object that the commit replaces.
    #[must_use]
    pub fn with_claim(mut self, claim: Option<Arc<dyn Claim>>) -> Self {
        self.claim = claim;
        self
    }
}

/// What one rank wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteReport {
    /// Each file and its length in bytes.
    pub files: Vec<(Key, u64)>,
    /// The SHA-256 of files, where the writer has made them; of all, some or none.
    pub sha256: BTreeMap<Key, [u8; 32]>,
}

impl WriteReport {
    /// `files` were written, with their lengths in bytes.
    #[must_use]
    pub fn new(files: Vec<(Key, u64)>) -> Self {
        Self { files, sha256: BTreeMap::new() }
    }

    /// The same with the SHA-256 of files.
    #[must_use]
    pub fn with_sha256(mut self, sha256: BTreeMap<Key, [u8; 32]>) -> Self {
        self.sha256 = sha256;
        self
    }
}

/// Reads checkpoints of one format from one place.
#[async_trait]
pub trait StorageReader: fmt::Debug + Send + Sync {
    /// The checkpoint's index, validated: every path stays inside, every number is in bounds.
    ///
    /// # Errors
    ///
    /// When there is no checkpoint, or its index is bad.
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError>;

    /// Reads the plan's items into the sink's memory, and no more bytes than they need (but for
    /// headers and gaps that are cheaper to read than to skip).
    ///
    /// Dropping the future stops the load; destinations are then partly filled.
    ///
    /// # Errors
    ///
    /// When storage or sink fail, or stored bytes are not what the metadata says.
    #[doc(alias = "read_data")]
    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError>;
}

/// What a read cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadReport {
    /// Bytes that the plan's items have.
    pub bytes_needed: u64,
    /// Bytes that were requested from the storage, headers and gaps included.
    pub bytes_read: u64,
}

impl ReadReport {
    /// `bytes_read` were read to get `bytes_needed`.
    #[must_use]
    pub fn new(bytes_needed: u64, bytes_read: u64) -> Self {
        Self { bytes_needed, bytes_read }
    }
}

/// What two reads cost together.
impl AddAssign for ReadReport {
    fn add_assign(&mut self, other: Self) {
        self.bytes_needed = self.bytes_needed.saturating_add(other.bytes_needed);
        self.bytes_read = self.bytes_read.saturating_add(other.bytes_read);
    }
}
