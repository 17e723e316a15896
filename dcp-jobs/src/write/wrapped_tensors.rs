//! Refuses tensors of subclasses that a target cannot store.

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::{Placement, WrappedTensor};
use dcp_formats::dcp::shows_wrapped;

use crate::error::JobError;
use crate::keys::select::list;

/// The classes of which an object is one rank's part of a tensor.
const RANK_PARTS: &[&str] = &[".DTensor", ".ShardedTensor"];

fn is_rank_part(tensor: &WrappedTensor) -> bool {
    RANK_PARTS.iter().any(|class| tensor.class.ends_with(class))
}

/// The tensors of subclasses, which are objects here, by FQN.
fn wrapped(metadata: &CheckpointMetadata) -> impl Iterator<Item = (&str, &WrappedTensor)> {
    metadata.iter().filter_map(|(fqn, entry)| Some((&**fqn, entry.as_object()?.tensor.as_deref()?)))
}

fn no_form(tensors: &[(&str, &WrappedTensor)], problem: &str) -> JobError {
    let names: Vec<_> =
        tensors.iter().map(|(fqn, tensor)| format!("{fqn:?} ({})", tensor.class)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    JobError::no_form(list(&names), problem)
}

/// Refuses the parts of one rank, such as DTensors in the file of a rank: every target but a
/// `torch.save` file stores tensors as whole ones.
///
/// # Errors
///
/// [`JobError::NoForm`] with the FQNs and classes of such tensors.
pub fn refuse_rank_parts(metadata: &CheckpointMetadata) -> Result<(), JobError> {
    let parts: Vec<_> = wrapped(metadata).filter(|(_, tensor)| is_rank_part(tensor)).collect();
    let Some((_, first)) = parts.first() else { return Ok(()) };
    let class = first.class.rsplit('.').next().unwrap_or_default();
    let problem = format!(
        "cannot be written as whole tensors: a {class} is one rank's part; load the files of all \
         ranks in PyTorch, and save them with torch.distributed.checkpoint; `Destination::to` \
         torch-save keeps the parts, and `Keys::exclude` leaves them out"
    );
    Err(no_form(&parts, &problem))
}

/// Refuses all tensors of subclasses, for a format of plain tensors alone.
pub(crate) fn refuse_wrapped(metadata: &CheckpointMetadata) -> Result<(), JobError> {
    refuse_rank_parts(metadata)?;
    let wrapped: Vec<_> = wrapped(metadata).collect();
    if wrapped.is_empty() {
        return Ok(());
    }
    let problem = "are tensors of classes of their own, which a safetensors file cannot hold; \
                   `Destination::to` dcp and `Destination::to` torch-save keep them as they are, \
                   `Conversion::dequantize` makes plain numbers of those of torchao that are \
                   known; `Keys::exclude` leaves them out";
    Err(no_form(&wrapped, problem))
}

/// Refuses tensors of subclasses that a reader of the planned checkpoint could not tell from plain
/// ones: its index lists both in the same way.
pub(crate) fn refuse_unreadable(
    tensors: &[(&str, &WrappedTensor, Option<Placement>)],
    planned: &CheckpointMetadata,
) -> Result<(), JobError> {
    let is_unreadable = |tensor: &WrappedTensor, placement: Option<Placement>| {
        // PyTorch's own quantized tensors are read by their dtype.
        let placed = placement.filter(|_| !tensor.dtype.is_quantized());
        placed.is_some_and(|placement| !shows_wrapped(planned, &placement, tensor))
    };
    let unreadable: Vec<_> = tensors
        .iter()
        .filter(|(_, tensor, placement)| is_unreadable(tensor, *placement))
        .map(|(fqn, tensor, _)| (*fqn, *tensor))
        .collect();
    if unreadable.is_empty() {
        return Ok(());
    }
    let problem = "are tensors of classes of their own that are too small, or compressed, to be \
                   distinguished from plain ones in PyTorch's format; `Destination::to` \
                   torch-save keeps them as they are, `Conversion::dequantize` makes plain \
                   numbers of those of torchao, `Keys::exclude` leaves them out";
    Err(no_form(&unreadable, problem))
}
