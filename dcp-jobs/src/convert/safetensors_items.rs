//! Prepares a checkpoint's tensors for safetensors files.

use std::sync::Arc;

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointMetadata, DType, Dims};
use dcp_formats::safetensors::{RawTypes, TIED};
use indexmap::IndexMap;
use serde_json::json;

use crate::error::JobError;
use crate::integrity::check::refuse_unsound;
use crate::integrity::checked_source::CheckedSource;
use crate::read::ties::ties;
use crate::write::stored_data_source::Part;
use crate::write::wrapped_tensors::refuse_wrapped;
use crate::write::written::ConversionReport;

/// The key of the header's `__metadata__` that lists omitted objects, as a JSON list of FQNs.
pub const LEFT_OUT: &str = "dcp.left_out";

/// The tensors to write to safetensors files.
pub(crate) struct Outgoing {
    pub(crate) tensors: Vec<OutgoingTensor>,
    /// The origin of each tensor's bytes.
    pub(crate) parts: Vec<Part>,
    /// Their total size in bytes.
    pub(crate) byte_len: u64,
    /// Omitted objects and raw tensors so far.
    pub(crate) report: ConversionReport,
    /// The texts that the source has.
    annotations: Arc<[(Arc<str>, Arc<str>)]>,
}

/// A tensor as the format stores it.
pub(crate) struct OutgoingTensor {
    pub(crate) fqn: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
}

impl Outgoing {
    /// Collects everything in `source`.
    pub(crate) async fn gather(source: &CheckedSource) -> Result<Self, JobError> {
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let mut outgoing = Self {
            tensors: Vec::new(),
            parts: Vec::new(),
            byte_len: 0,
            report: ConversionReport::default(),
            annotations: Arc::clone(&metadata.provenance().annotations),
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
            return Err(JobError::no_form("the checkpoint", problem));
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
    ) -> Result<(), JobError> {
        if RawTypes::default().stored_as(fqn, tensor.dtype, &tensor.shape).0 != tensor.dtype {
            self.report.raw.push(Arc::clone(fqn));
        }
        if &**fqn == "__metadata__" {
            let problem = "is not a name that a tensor can have in a safetensors file; leave it out \
                           or rename it";
            return Err(JobError::not_storable(fqn.to_string(), problem));
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

    /// Header entries: those of the source, and about data that the file omits: for each tied tensor
    /// the name of the one that was written, as `safetensors.torch.save_model` writes it, and the
    /// names of objects.
    pub(crate) fn header(&self) -> IndexMap<String, String> {
        let mut header = IndexMap::new();
        for (name, text) in &*self.annotations {
            header.insert(name.to_string(), text.to_string());
        }
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
