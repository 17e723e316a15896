//! Checks the bytes of an archive outside the data of records.

use dcp_core::{CheckpointError, FormatError, Key, Storage};

use super::contents::{Contents, TAIL};
use super::file::File;
use crate::torch_zip::{ArchiveEntry, ArchiveIndex, Sparse};

/// The number of records to check together.
const BATCH: usize = 512;

/// Calls `found` with each problem, by record.
pub(super) async fn check(
    storage: &dyn Storage,
    key: &Key,
    contents: &Contents,
    mut found: impl FnMut(FormatError),
) -> Result<(), CheckpointError> {
    if contents.records.is_empty() {
        return Ok(());
    }
    let mut file = File::open(storage, key).await?;
    let len = file.byte_len();
    file.bring(len.saturating_sub(TAIL)..len).await?;
    let index = file.parse(len, ArchiveIndex::parse).await?;
    match file.parse(len, |blob| index.check_ends(blob)).await {
        Ok(()) => {}
        Err(CheckpointError::Format(error)) => found(error),
        Err(error) => return Err(error),
    }
    let entries: Vec<&ArchiveEntry> = index.entries().collect();
    for batch in entries.chunks(BATCH) {
        let mut around = Vec::with_capacity(batch.len());
        for entry in batch {
            let Some(record) = contents.records.get(entry.name()) else { continue };
            match entry.ranges_around(record) {
                Ok(ranges) => around.push((*entry, record, ranges)),
                Err(error) => found(file.locate(error)),
            }
        }
        let ranges: Vec<_> = around.iter().flat_map(|(.., ranges)| ranges.clone()).collect();
        let bytes = file.scattered(&ranges).await?;
        for ((entry, record, [before, behind]), bytes) in around.iter().zip(bytes.chunks(2)) {
            let [head, tail] = bytes else { continue };
            let blob = Sparse::new(len).with(before.start, head).with(behind.start, tail);
            let checked = entry.check_around(record, &blob).and_then(|progress| progress.ready());
            if let Err(error) = checked {
                found(file.locate(error));
            }
        }
    }
    Ok(())
}
