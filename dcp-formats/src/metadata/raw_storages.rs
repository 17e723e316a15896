//! Places tensors that ByteCheckpoint stored without an archive.
//!
//! ByteCheckpoint (0.0.2) writes PyTorch's index, with `Metadata` and `_StorageInfo` of its own module, and
//! data files of its own: a tensor's item in a file is the bytes of its *storage* alone. What an archive of
//! `torch.save` has in front of them, the pickle of the tensor, is in the index, as the value of
//! `all_tensor_metadata` for the same key; the value of an object is `None`, and its item an archive as in
//! PyTorch. So the placement of each chunk is moved to the elements that its pickle selects of the storage.
//!
//! The index alone decides: a chunk without a pickle stays an archive, and reading it fails as that.

use dcp_core::metadata::{Encoding, Entry, Layout};
use dcp_core::{Dims, FormatError};

use super::attributes::bad;
use super::places::Places;
use crate::pickle::{Node, NodeId};
use crate::torch_tensor::TensorLayout;

impl Places<'_, '_, '_> {
    /// Moves the placement of a chunk to its elements, after all placements were read. `index` is a key
    /// of `all_tensor_metadata`, and `tensor` its value.
    pub(super) fn locate_elements(
        &mut self,
        index: NodeId,
        tensor: NodeId,
    ) -> Result<(), FormatError> {
        if matches!(self.graph.pickle.node(tensor), Node::None) || !self.is_kept(index)? {
            return Ok(());
        }
        let pickle = self.graph.bytes(tensor, "a value of all_tensor_metadata")?;
        let Some((position, chunk)) = self.named_chunk(index)? else { return Ok(()) };
        let raw = Encoding::new(Layout::Raw);
        let encoding = self.out.intern_encoding(&raw).ok_or_else(too_many)?;
        let Some((fqn, Entry::Tensor(entry))) = self.out.at_mut(position) else { return Ok(()) };
        let Some(of_index) = entry.chunks.get(chunk) else { return Ok(()) };
        let Some(mut placement) = of_index.placement else { return Ok(()) };
        let what = || format!("the chunk of {fqn:?} at {:?}", of_index.offsets);
        let layout = TensorLayout::from_pickle(pickle)
            .map_err(|error| bad(format!("{}: {}", what(), error.problem())))?;
        if layout.dtype() != entry.dtype || **layout.sizes() != *of_index.sizes {
            let (dtype, sizes) = (layout.dtype(), layout.sizes());
            return Err(bad(format!(
                "{} is stored as {dtype} of {sizes}, the index says {} of {}",
                what(),
                entry.dtype,
                Dims::from(of_index.sizes)
            )));
        }
        let stored = layout.storage().byte_len;
        if stored != placement.byte_len {
            let found = placement.byte_len;
            return Err(bad(format!("{} has {found} bytes, its storage {stored}", what())));
        }
        let Some(range) = layout.contiguous_range() else {
            let strides = layout.strides();
            return Err(bad(format!(
                "{} is stored with strides {strides:?}: load it with ByteCheckpoint, and save it \
                 contiguous",
                what()
            )));
        };
        let byte_offset = placement.byte_offset.checked_add(range.start);
        placement.byte_offset =
            byte_offset.ok_or_else(|| bad(format!("{} ends beyond 64 bits", what())))?;
        placement.byte_len = range.end - range.start;
        placement.encoding = encoding;
        entry.chunks.place(chunk, placement);
        Ok(())
    }
}

fn too_many() -> FormatError {
    bad("it has more encodings than can be numbered")
}
