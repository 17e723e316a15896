//! The record that a save writes about itself in a file besides the index.

/// The record of a save, such as dcp's sidecar: a file for facts that the index has no place for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaveRecord {
    /// There is none of this save.
    Absent,
    /// There is one that cannot be read, with the reason.
    Damaged(String),
    /// The facts of the record.
    Found(SaveFacts),
}

/// The facts in the record of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveFacts {
    /// The program that wrote the checkpoint, such as `dcp-formats 0.1.0`.
    pub tool: String,
    /// The number of ranks of the save.
    pub world_size: u32,
    /// The names and sizes of the dimensions of the device mesh, the outermost first.
    pub mesh: Vec<(String, u64)>,
    /// The step of the training run.
    pub step: Option<u64>,
    /// The step of the checkpoint before.
    pub parent_step: Option<u64>,
    /// The chunks and objects that were counted.
    pub items: u64,
    /// The number of [`items`](Self::items) whose checksums are noted.
    pub items_with_checksum: u64,
    /// The files that hold them.
    pub files: u64,
    /// The number of [`files`](Self::files) with a noted digest of all their bytes.
    pub files_with_digest: u64,
}
