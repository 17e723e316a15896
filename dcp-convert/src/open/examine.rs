//! Decides whether a checkpoint is complete.

use dcp_core::StorageError;
use dcp_core::format::{CheckpointFormat, Examined, Place};
use dcp_core::storage::StorageExt as _;
use dcp_formats::dcp::DcpFormat;
use dcp_formats::incomplete_files::{incomplete_files, unwritten};

/// Bytes at the start of an index that a power failure would have left as zeros.
const HEAD_BYTES: u64 = 64;

/// Examines a checkpoint that its names call whole: its index against its files, and every file of
/// safetensors or `torch.save` against its own header. No tensor is read.
///
/// This is the one answer of `ls`, `prune`, `copy` and `verify`; RELIABILITY.md lists what each format
/// needs. Of files that are [known](Place::known_files), because another checkpoint with files of the same
/// names and lengths was examined, only the beginning of the index is read.
///
/// # Errors
///
/// When the storage fails. What is wrong with the checkpoint is [`Examined::problem`].
pub async fn examine_checkpoint(
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Examined, StorageError> {
    let mut examined = format.examine(place).await?;
    if examined.problem.is_some() || examined.unsupported.is_some() {
        return Ok(examined);
    }
    if place.has_any_known() {
        examined.problem = unwritten_index(format, place).await?;
        if examined.problem.is_some() {
            return Ok(examined);
        }
    }
    let files = incomplete_files(place).await?;
    examined.problem = files.first().map(|first| match files.len() - 1 {
        0 => first.to_string(),
        more => format!("{first}; {more} more files are incomplete"),
    });
    Ok(examined)
}

/// The problem of an index that begins with zeros. One file is read: that of PyTorch's format where there
/// is one, since frameworks build on it.
async fn unwritten_index(
    format: &dyn CheckpointFormat,
    place: &Place,
) -> Result<Option<String>, StorageError> {
    let folder = place.listing().root();
    let mut landmarks = DcpFormat.info().landmarks.iter().chain(format.info().landmarks);
    let Some(file) = landmarks.find_map(|landmark| folder.file(landmark)) else { return Ok(None) };
    let head = place.storage().read_range(&file.key, 0..file.byte_len.min(HEAD_BYTES)).await?;
    Ok(unwritten(&head).map(|problem| format!("{} {problem}", file.key)))
}
