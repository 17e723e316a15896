//! A whole checkpoint as one safetensors file.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointMetadata, Entry, Placement, TensorEntry};
use dcp_formats::safetensors::{self, RAW, RawTypes, SafetensorsItem};
use indexmap::IndexMap;
use serde_json::json;

use crate::check::refuse_unsound;
use crate::data::{CheckpointData, Part};
use crate::error::ConvertError;
use crate::job::JobOptions;
use crate::source::Source;
use crate::target::Target;
use crate::written::WriteReport;

/// The entry of the header's `__metadata__` that lists objects which were left out, as a JSON
/// list of FQNs.
pub const LEFT_OUT: &str = "dcp.left_out";

/// Writes every tensor of a checkpoint, under its FQN, to one safetensors file, piece by piece.
/// The file appears under its name when it is complete and every stored chunk was found to be
/// what its checksum says.
///
/// # Errors
///
/// When the target exists, the checkpoint is unsound or damaged, or a storage fails; then there
/// is no new file.
pub async fn to_safetensors(
    source: &Source,
    target: &Target,
    options: &JobOptions,
) -> Result<WriteReport, ConvertError> {
    target.check().await?;
    let source = source.for_job(options.parallelism);
    let mut outgoing = Outgoing::gather(&source).await?;
    let header = outgoing.header();
    let report = std::mem::take(&mut outgoing.report);
    if options.dry_run {
        let byte_len = safetensors::encode_header(&outgoing.items, &header)?.byte_len;
        let report = report.with_files([(target.key.to_string(), byte_len)]);
        return Ok(report.planned(&*source.metadata().await?));
    }
    options.start(outgoing.byte_len);
    let data = CheckpointData::new(&source, outgoing.parts, options).settling(outgoing.byte_len);
    let (creator, items) = (target.creator(), &outgoing.items);
    let written =
        safetensors::write(&*creator, &target.key, items, &header, Arc::new(data), None).await?;
    Ok(report.with_files([(target.key.to_string(), written.byte_len)]))
}

/// The tensors of a checkpoint on their way into safetensors files.
pub(crate) struct Outgoing {
    pub(crate) items: Vec<SafetensorsItem>,
    /// What each of them is made from.
    pub(crate) parts: Vec<Part>,
    /// Bytes of all of them.
    pub(crate) byte_len: u64,
    /// What is left out and what is stored as bytes, so far.
    pub(crate) report: WriteReport,
    raw: RawTypes,
}

impl Outgoing {
    /// Everything that `source`, in its form for a job, has.
    pub(crate) async fn gather(source: &Source) -> Result<Self, ConvertError> {
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let mut outgoing = Self {
            items: Vec::new(),
            parts: Vec::new(),
            byte_len: 0,
            report: WriteReport::default(),
            raw: RawTypes::default(),
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
        outgoing.report.tensors = outgoing.items.len();
        outgoing.report.chunks = outgoing.items.len();
        Ok(outgoing)
    }

    fn tensor(
        &mut self,
        source: &Source,
        metadata: &Arc<CheckpointMetadata>,
        index: usize,
        fqn: &Arc<str>,
        tensor: &TensorEntry,
    ) -> Result<(), ConvertError> {
        let (dtype, shape) = self.raw.stored_as(fqn, tensor.dtype, &tensor.shape);
        if dtype != tensor.dtype {
            self.report.raw.push(Arc::clone(fqn));
        }
        self.byte_len = self.byte_len.saturating_add(tensor.byte_len().unwrap_or(0));
        self.items.push(SafetensorsItem { name: Arc::clone(fqn), dtype, shape });
        self.parts.push(Part::whole_tensor(source, metadata, index, tensor)?);
        Ok(())
    }

    /// What is said of the tensors beside them: `format` as the safetensors library has it, for
    /// each tied tensor the name of the one that was written as `safetensors.torch.save_model`
    /// has it, and what the format could not hold.
    pub(crate) fn header(&self) -> IndexMap<String, String> {
        let mut header = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
        for (fqn, first) in &self.report.tied {
            header.entry(fqn.to_string()).or_insert_with(|| first.to_string());
        }
        if !self.report.left_out.is_empty() {
            header.insert(LEFT_OUT.to_owned(), json!(self.report.left_out).to_string());
        }
        if !self.raw.is_empty() {
            header.insert(RAW.to_owned(), self.raw.to_json());
        }
        header
    }
}

/// Tensors that are stored in the very same place as an earlier one, by their positions, with
/// the name of that one.
pub(crate) fn ties(metadata: &CheckpointMetadata) -> HashMap<usize, Arc<str>> {
    let mut first: HashMap<_, &Arc<str>> = HashMap::new();
    let mut tied = HashMap::new();
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor().filter(|t| t.byte_len() != Some(0)) else { continue };
        let places = tensor.chunks.iter().map(|chunk| {
            let placement = chunk.placement?;
            let Placement { file, encoding, byte_offset, byte_len } = placement;
            Some((file, encoding, byte_offset, byte_len))
        });
        let Some(places) = places.collect::<Option<Vec<_>>>().filter(|p| !p.is_empty()) else {
            continue;
        };
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
