//! Writes a file of a header and the elements of one tensor.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::{CheckpointError, FormatError, Key, Storage};

use crate::upload::{FileItem, FileOptions, FileSpec, Framing, PendingFile, prepare_file};

/// Writes `header` and item 0 of `data`, which has `byte_len` bytes, to a file without its name
/// yet. `options` say whether an existing file is replaced. A `.npy` file has this form.
///
/// # Errors
///
/// When the data or the storage fails. No file is created then.
pub async fn prepare_headed_file<'a>(
    storage: &'a dyn Storage,
    (key, options): (&Key, FileOptions),
    header: Bytes,
    byte_len: u64,
    data: Arc<dyn DataSource>,
) -> Result<PendingFile<'a>, CheckpointError> {
    let total = byte_len.saturating_add(header.len() as u64);
    let items = Arc::new([FileItem { item: 0, byte_len }]);
    let framing = Arc::new(Header { header, name: key.to_string() });
    let spec = FileSpec { key, byte_len: total, items, framing };
    prepare_file(storage, spec, options, &data, None).await
}

#[derive(Debug)]
struct Header {
    header: Bytes,
    name: String,
}

impl Framing for Header {
    fn before(&self, _: usize) -> Result<Bytes, FormatError> {
        Ok(self.header.clone())
    }

    fn after(&self, _: usize, _: u32) -> Result<Bytes, FormatError> {
        Ok(Bytes::new())
    }

    fn needs_crc(&self, _: usize) -> bool {
        false
    }

    fn name(&self, _: usize) -> &str {
        &self.name
    }
}
