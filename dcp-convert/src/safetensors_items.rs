//! What of a checkpoint goes into safetensors files.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointMetadata, DType, Dims, Entry, FileId, Placement, TensorEntry};
use dcp_formats::safetensors::{RawTypes, TIED};
use indexmap::IndexMap;
use serde_json::json;

use crate::check::refuse_unsound;
use crate::checked_source::CheckedSource;
use crate::error::ConvertError;
use crate::select::list;
use crate::stored_data_source::Part;
use crate::written::WriteReport;

/// The entry of the header's `__metadata__` that lists objects which were left out, as a JSON
/// list of FQNs.
pub const LEFT_OUT: &str = "dcp.left_out";

/// The tensors of a checkpoint on their way into safetensors files.
pub(crate) struct Outgoing {
    pub(crate) tensors: Vec<OutgoingTensor>,
    /// What each of them is made from.
    pub(crate) parts: Vec<Part>,
    /// Bytes of all of them.
    pub(crate) byte_len: u64,
    /// What is left out and what is stored as bytes, so far.
    pub(crate) report: WriteReport,
}

/// A tensor as the format is to have it.
pub(crate) struct OutgoingTensor {
    pub(crate) fqn: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
}

impl Outgoing {
    /// Everything that `source` has.
    pub(crate) async fn gather(source: &CheckedSource) -> Result<Self, ConvertError> {
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let mut outgoing = Self {
            tensors: Vec::new(),
            parts: Vec::new(),
            byte_len: 0,
            report: WriteReport::default(),
        };
        let ties = ties(&metadata);
        for (index, (fqn, entry)) in metadata.iter().enumerate() {
            match entry {
                Entry::Tensor(tensor) => match ties.get(&index) {
                    Some(first) => {
                        outgoing.report.tied.insert(Arc::clone(fqn), Arc::clone(first));
                    }
                    None => outgoing.tensor(source, &metadata, index, fqn, tensor)?,
                },
                _ => outgoing.report.left_out.push(Arc::clone(fqn)),
            }
        }
        refuse_wrapped(&metadata)?;
        if outgoing.tensors.is_empty() && !outgoing.report.left_out.is_empty() {
            let problem = "has no tensors, only objects, and a safetensors file can hold none of \
                           them; of a pickled module, save the state_dict()";
            return Err(ConvertError::unsupported("the checkpoint", problem));
        }
        outgoing.report.tensors = outgoing.tensors.len();
        outgoing.report.chunks = outgoing.tensors.len();
        Ok(outgoing)
    }

    fn tensor(
        &mut self,
        source: &CheckedSource,
        metadata: &Arc<CheckpointMetadata>,
        index: usize,
        fqn: &Arc<str>,
        tensor: &TensorEntry,
    ) -> Result<(), ConvertError> {
        if RawTypes::default().stored_as(fqn, tensor.dtype, &tensor.shape).0 != tensor.dtype {
            self.report.raw.push(Arc::clone(fqn));
        }
        if &**fqn == "__metadata__" {
            let problem = "is no name that a tensor can have in a safetensors file; leave it out \
                           or rename it";
            return Err(ConvertError::unsupported(format!("{fqn:?}"), problem));
        }
        if tensor.dtype.is_quantized() {
            self.report.without_scale.push(Arc::clone(fqn));
        }
        self.byte_len = self.byte_len.saturating_add(tensor.byte_len().unwrap_or(0));
        let (fqn, shape) = (Arc::clone(fqn), tensor.shape.clone());
        self.tensors.push(OutgoingTensor { fqn, dtype: tensor.dtype, shape });
        self.parts.push(Part::whole_tensor(source, metadata, index, tensor)?);
        Ok(())
    }

    /// What a header says of what is not in the file: for each tied tensor the name of the one
    /// that was written, as `safetensors.torch.save_model` has it, and which objects there were.
    pub(crate) fn header(&self) -> IndexMap<String, String> {
        let mut header = IndexMap::new();
        for (fqn, first) in &self.report.tied {
            header.entry(fqn.to_string()).or_insert_with(|| first.to_string());
        }
        if !self.report.tied.is_empty() {
            header.insert(TIED.to_owned(), json!(self.report.tied).to_string());
        }
        if !self.report.left_out.is_empty() {
            header.insert(LEFT_OUT.to_owned(), json!(self.report.left_out).to_string());
        }
        header
    }
}

/// Fails where tensors would be left out because they are objects here.
fn refuse_wrapped(metadata: &CheckpointMetadata) -> Result<(), ConvertError> {
    let wrapped = metadata.iter().filter_map(|(fqn, entry)| {
        let tensor = entry.as_object()?.tensor.as_ref()?;
        Some((format!("{fqn:?} ({})", tensor.class), &*tensor.class))
    });
    let (names, classes): (Vec<_>, Vec<_>) = wrapped.unzip();
    if names.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let advice = if classes.iter().any(|class| class.ends_with(".DTensor")) {
        "a DTensor is one rank's part: load the files of all ranks in PyTorch, and save them with \
         torch.distributed.checkpoint"
    } else {
        "--to dcp and --to torch-save keep them as they are, --dequantize makes plain numbers of \
         those of torchao that are known"
    };
    let problem = format!(
        "are tensors of classes of their own, which a safetensors file cannot hold; {advice}; \
         --exclude leaves them out"
    );
    Err(ConvertError::unsupported(list(&names), problem))
}

/// Where a chunk's bytes lie and how they are encoded, and its offsets and sizes in the tensor.
pub(crate) type Place = (FileId, u16, u64, u64, Dims, Dims);

/// The places of all chunks of a tensor; `None` where they do not tell what its elements are.
pub(crate) fn places(metadata: &CheckpointMetadata, tensor: &TensorEntry) -> Option<Vec<Place>> {
    let places = tensor.chunks.iter().map(|chunk| {
        let placement = chunk.placement?;
        let told = metadata.encoding(&placement)?.layout.is_told_by_place();
        let Placement { file, encoding, byte_offset, byte_len } = placement;
        let (offsets, sizes) = (chunk.offsets.into(), chunk.sizes.into());
        told.then_some((file, encoding, byte_offset, byte_len, offsets, sizes))
    });
    places.collect()
}

/// Tensors that are stored in the very same place and way as an earlier one, by their positions, with
/// the name of that one.
pub(crate) fn ties(metadata: &CheckpointMetadata) -> HashMap<usize, Arc<str>> {
    let mut first: HashMap<_, &Arc<str>> = HashMap::new();
    let mut tied = HashMap::new();
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor().filter(|t| t.byte_len() != Some(0)) else { continue };
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
    use dcp_core::{Encoding, Key, Layout};

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
