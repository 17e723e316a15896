//! Writes a safetensors file to a storage.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::PutMode;
use dcp_core::{CheckpointError, FormatError, Key, Storage};
use indexmap::IndexMap;

use super::encode::{EncodedHeader, SafetensorsItem, encode_header};
use crate::upload::{
    ByteProgress, FileItem, FileOptions, FileSpec, Framing, PendingFile, Sending, SentFile,
    prepare_file, send_file, write_file,
};

/// Writes a file that must not exist yet, and returns its header. Items of `data` are numbered as
/// `items`; their bytes are streamed.
///
/// # Errors
///
/// When the header cannot be encoded (see [`encode_header`]), or the data or the storage fails. No
/// file is created then.
pub async fn write(
    storage: &dyn Storage,
    key: &Key,
    items: &[SafetensorsItem],
    metadata: &IndexMap<String, String>,
    data: Arc<dyn DataSource>,
    progress: Option<&ByteProgress>,
) -> Result<EncodedHeader, CheckpointError> {
    let (encoded, items, framing) = frame(items, metadata)?;
    let spec = FileSpec { key, byte_len: encoded.byte_len, items, framing };
    write_file(storage, spec, &data, FileOptions::new(PutMode::Create), progress).await?;
    Ok(encoded)
}

/// Writes such a file without its name yet; `options` say whether an existing file is replaced.
///
/// # Errors
///
/// As [`write()`]. Nothing remains of the file then.
pub async fn prepare<'a>(
    storage: &'a dyn Storage,
    (key, options): (&Key, FileOptions),
    items: &[SafetensorsItem],
    metadata: &IndexMap<String, String>,
    data: Arc<dyn DataSource>,
    progress: Option<&ByteProgress>,
) -> Result<PendingFile<'a>, CheckpointError> {
    let (encoded, items, framing) = frame(items, metadata)?;
    let spec = FileSpec { key, byte_len: encoded.byte_len, items, framing };
    prepare_file(storage, spec, options, &data, progress).await
}

/// Uploads such a file without its name, and computes its CRC-32; `options` say whether an existing
/// file is replaced when it is named.
pub(crate) async fn send(
    storage: &dyn Storage,
    (key, options): (&Key, FileOptions),
    items: &[SafetensorsItem],
    metadata: &IndexMap<String, String>,
    data: Arc<dyn DataSource>,
    progress: Option<&ByteProgress>,
) -> Result<SentFile, CheckpointError> {
    let (encoded, items, framing) = frame(items, metadata)?;
    let spec = FileSpec { key, byte_len: encoded.byte_len, items, framing };
    send_file(storage, spec, &data, Sending { options, hashed: true }, progress).await
}

type Framed = (EncodedHeader, Arc<[FileItem]>, Arc<Image>);

/// The header, the items in file order, and the bytes around them.
fn frame(
    items: &[SafetensorsItem],
    metadata: &IndexMap<String, String>,
) -> Result<Framed, FormatError> {
    let encoded = encode_header(items, metadata)?;
    let mut file_items = vec![FileItem { item: 0, byte_len: 0 }];
    let mut names = vec![Arc::from("")];
    for &index in &encoded.order {
        let Some(item) = items.get(index) else { continue };
        let byte_range = encoded.header.get(&item.name).map(|info| info.byte_range.clone());
        let byte_len = byte_range.map_or(0, |range| range.end - range.start);
        file_items.push(FileItem { item: index, byte_len });
        names.push(Arc::clone(&item.name));
    }
    let framing = Image { header: encoded.bytes.clone(), names };
    Ok((encoded, file_items.into(), Arc::new(framing)))
}

/// The header precedes an empty first item; nothing separates tensors.
#[derive(Debug)]
struct Image {
    header: Bytes,
    names: Vec<Arc<str>>,
}

impl Framing for Image {
    fn before(&self, position: usize) -> Result<Bytes, FormatError> {
        Ok(if position == 0 { self.header.clone() } else { Bytes::new() })
    }

    fn after(&self, _: usize, _: u32) -> Result<Bytes, FormatError> {
        Ok(Bytes::new())
    }

    fn needs_crc(&self, _: usize) -> bool {
        false
    }

    fn name(&self, position: usize) -> &str {
        self.names.get(position).map_or("", |name| name)
    }
}
