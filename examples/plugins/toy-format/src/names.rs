//! The names of the files.

use dcp_core::{Key, StorageError};

/// The index.
pub(crate) const INDEX: &str = "index.toy";

/// Bytes of the checksum behind each item and before the index.
pub(crate) const CRC_BYTES: u64 = 4;

pub(crate) fn index() -> Result<Key, StorageError> {
    Ok(Key::new(INDEX)?)
}

pub(crate) fn data_file(rank: usize, generation: u64) -> Result<Key, StorageError> {
    Ok(Key::new(format!("rank_{rank}.g{generation}.toy"))?)
}

/// The rank and generation of a data file; `None` for other files.
pub(crate) fn parse(key: &Key) -> Option<(usize, u64)> {
    let (rank, generation) =
        key.as_str().strip_prefix("rank_")?.strip_suffix(".toy")?.split_once(".g")?;
    let parsed = (rank.parse().ok()?, generation.parse().ok()?);
    // Other spellings of a number, such as `01`, are not ours.
    (data_file(parsed.0, parsed.1).ok()? == *key).then_some(parsed)
}
