//! Reads the header of an image in a storage.

use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, FormatError, Key, Storage};

use super::header::{Header, PREFIX_LEN, RangeProblem, header_len};
use super::sharding::{SHARDING, ShardingInfo};

/// The size of the first read; most headers are shorter and need one request.
const HEAD_BYTES: u64 = 32 << 10;

/// A safetensors image in a file.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) header: Header,
    /// The offset of its data in the file.
    pub(crate) data_start: u64,
    /// The positions of its tensors in the whole ones.
    pub(crate) sharding: ShardingInfo,
}

/// Reads the header of the image from `start` to the end of the file, which has `file_len` bytes.
/// Also returns the problem of its ranges, if there is one.
pub(crate) async fn read_image(
    storage: &dyn Storage,
    key: &Key,
    start: u64,
    file_len: u64,
) -> Result<(Image, Option<RangeProblem>), CheckpointError> {
    let located = |error: FormatError| error.in_file(key.as_str(), start);
    let image_len = file_len.saturating_sub(start);
    let head = storage.read_range(key, start..start + HEAD_BYTES.min(image_len)).await?;
    let prefix_len = head.len().min(PREFIX_LEN as usize);
    let json_len =
        header_len(head.get(..prefix_len).unwrap_or_default(), image_len).map_err(located)?;
    let json_start = start + PREFIX_LEN;
    let inside =
        usize::try_from(PREFIX_LEN + json_len).ok().and_then(|end| head.get(prefix_len..end));
    let json = match inside {
        Some(json) => head.slice_ref(json),
        None => storage.read_range(key, json_start..json_start + json_len).await?,
    };
    let data_len = image_len - PREFIX_LEN - json_len;
    let header = Header::parse_claims(&json).map_err(located)?;
    let sharding = match header.metadata().get(SHARDING) {
        None => ShardingInfo::default(),
        Some(text) => ShardingInfo::parse(text).map_err(located)?,
    };
    let problem = header.range_problem(data_len);
    Ok((Image { header, data_start: json_start + json_len, sharding }, problem))
}
