//! Finds tensors that share stored bytes.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{FileId, Placement, TensorEntry};
use dcp_core::{CheckpointMetadata, Dims};

/// The placement and encoding of a chunk's bytes, and its offsets and sizes in the tensor.
pub(crate) type Place = (FileId, u16, u64, u64, Dims, Dims);

/// The places of a tensor's chunks; `None` when they do not determine its elements.
pub(crate) fn places(metadata: &CheckpointMetadata, tensor: &TensorEntry) -> Option<Vec<Place>> {
    let places = tensor.chunks.iter().map(|chunk| {
        let placement = chunk.placement?;
        let by_place = metadata.encoding(&placement)?.layout.is_fixed_by_place();
        let Placement { file, encoding, byte_offset, byte_len } = placement;
        let (offsets, sizes) = (chunk.offsets.into(), chunk.sizes.into());
        by_place.then_some((file, encoding, byte_offset, byte_len, offsets, sizes))
    });
    places.collect()
}

/// Tensors with the same placement and encoding as an earlier one: by position, with the name of
/// the earlier one. A number that several tensors share, as the step of all parameters of a group, is no tie.
pub(crate) fn ties(metadata: &CheckpointMetadata) -> HashMap<usize, Arc<str>> {
    let mut first: HashMap<_, &Arc<str>> = HashMap::new();
    let mut tied = HashMap::new();
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        let is_array =
            |tensor: &&TensorEntry| tensor.byte_len() != Some(0) && tensor.shape.ndim() > 0;
        let Some(tensor) = entry.as_tensor().filter(is_array) else { continue };
        let Some(places) = places(metadata, tensor).filter(|p| !p.is_empty()) else { continue };
        let same = (tensor.dtype, tensor.shape.clone(), places);
        match first.get(&same) {
            Some(name) => {
                tied.insert(index, Arc::clone(name));
            }
            None => {
                first.insert(same, fqn);
            }
        }
    }
    tied
}

#[cfg(test)]
mod tests {
    use dcp_core::metadata::{Encoding, Entry, Layout};
    use dcp_core::{DType, Key};

    use super::*;

    #[test]
    fn chunks_in_another_order_are_another_tensor() {
        let mut metadata = CheckpointMetadata::new();
        let file = metadata.intern_file(&Key::new("data").unwrap()).unwrap();
        let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
        // Two chunks, the one at byte 0 first.
        for (fqn, rows) in [("a", [0, 2]), ("b", [0, 2]), ("swapped", [2, 0])] {
            let mut tensor = TensorEntry::new(DType::UInt8, [4_u64]);
            for (row, byte_offset) in rows.into_iter().zip([0, 2]) {
                let placement = Placement { file, encoding, byte_offset, byte_len: 2 };
                tensor.chunks.push(&[row], &[2], Some(placement)).unwrap();
            }
            metadata.insert(Arc::from(fqn), Entry::Tensor(tensor));
        }
        assert_eq!(ties(&metadata), HashMap::from([(1, Arc::from("a"))]));
    }
}
