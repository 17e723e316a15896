//! Writes a checkpoint as one `torch.save` file.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::Key;
use dcp_core::metadata::Entry;
use dcp_formats::pickle::ForeignName;
use dcp_formats::torch_save::{
    TorchSaveContent, TorchSaveGraphs, TorchSaveItem, TorchSaveOptions, TorchSavePlan,
    TorchSaveReader, TorchSaveRewrite,
};

use crate::error::JobError;
use crate::integrity::callables;
use crate::integrity::check::refuse_unsound;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::read::objects::{object_entries, read_objects, unread};
use crate::read::ties::ties;
use crate::source::{KeptObjects, Source};
use crate::view::with_quantizers;
use crate::write::stored_data_source::{CheckpointData, Part};
use crate::write::target::Target;
use crate::write::written::ConversionReport;

/// Writes all tensors and objects of a checkpoint to one `torch.save` file, in segments: as nested
/// dicts and lists if the checkpoint records how its keys nest, as PyTorch's `dcp_to_torch_save`
/// does, and as a flat dict otherwise. Tied tensors are stored once. Objects of unknown classes are
/// copied unchanged.
///
/// A source that is a `torch.save` file, not a view of one, keeps its exact objects: keys that are
/// not strings, empty containers, views of one storage.
///
/// The file gets its name when it is complete and every stored chunk matches its checksum.
///
/// # Errors
///
/// When the target exists, the checkpoint is inconsistent or damaged, a quantized tensor's scale is
/// unknown, or a storage fails. No file is created then.
#[doc(alias = "dcp_to_torch_save")]
pub async fn to_torch_save(
    source: &Source,
    target: &Target,
    how: TorchSaveOptions,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    target.check().await?;
    let source = CheckedSource::new(source, options);
    if let Some(reader) = source.extension::<TorchSaveReader>()
        && let Some(again) = reader.again(target.key(), &how).await.map_err(JobError::unwritable)?
    {
        let callables = callables::admit(callables::in_index(&source).await?, options)?;
        let report = ConversionReport { callables, ..ConversionReport::default() };
        let from = reader.key().clone();
        return write_again(source, &from, target, again, report, options).await;
    }
    let source = with_quantizers(source, |_| true).await?;
    let mut outgoing = Outgoing::gather(&source, options).await?;
    let plan =
        TorchSavePlan::new(target.key(), &outgoing.items, &how).map_err(JobError::unwritable)?;
    if let Some(kept) = source.kept() {
        for record in plan.kept() {
            outgoing.byte_len = outgoing.byte_len.saturating_add(record.byte_len);
            let (key, byte_offset) = (kept.reader.key().clone(), record.data.start);
            outgoing.parts.push(Part::Stored { key, byte_offset, first: None });
        }
    }
    let report = outgoing.report.with_files([(target.key().to_string(), plan.byte_len())]);
    if options.dry_run {
        return Ok(report.planned(&*source.metadata().await?));
    }
    options.start(outgoing.byte_len);
    let data = Arc::new(CheckpointData::hashed(&source, outgoing.parts, options));
    let file = target.torch_save(plan, data).await?;
    file.publish(source).await?;
    Ok(report)
}

/// Writes the objects of the file `from`, and compares its storages with their checksums on the
/// way.
async fn write_again(
    source: CheckedSource,
    from: &Key,
    target: &Target,
    again: TorchSaveRewrite,
    mut report: ConversionReport,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    let metadata = source.metadata().await?;
    refuse_unsound(&metadata)?;
    let tied = ties(&metadata);
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        match (entry, tied.get(&index)) {
            (Entry::Tensor(_), None) => report.chunks += 1,
            (Entry::Tensor(_), Some(first)) => {
                report.tied.insert(Arc::clone(fqn), Arc::clone(first));
            }
            _ => {
                report.objects += 1;
                continue;
            }
        }
        report.tensors += 1;
    }
    let TorchSaveRewrite { plan, records, .. } = again;
    let report = report.with_files([(target.key().to_string(), plan.byte_len())]);
    if options.dry_run {
        return Ok(report.planned(&metadata));
    }
    options.start(records.iter().fold(0, |sum, record| sum.saturating_add(record.byte_len)));
    let parts = records.iter().map(|record| Part::Stored {
        key: from.clone(),
        byte_offset: record.data.start,
        first: None,
    });
    let data = Arc::new(CheckpointData::hashed(&source, parts.collect(), options));
    let file = target.torch_save(plan, data).await?;
    file.publish(source).await?;
    Ok(report)
}

/// Objects taken unchanged from a `torch.save` file.
struct Kept {
    objects: Arc<KeptObjects>,
    graphs: Arc<TorchSaveGraphs>,
}

impl Kept {
    async fn of(source: &Source) -> Result<Option<Self>, JobError> {
        let Some(objects) = source.kept().cloned() else { return Ok(None) };
        let wanted: HashSet<&str> = objects.names.values().map(|fqn| &**fqn).collect();
        let graphs = Arc::new(objects.reader.graphs(|fqn| wanted.contains(fqn)).await?);
        drop(wanted);
        Ok(Some(Self { objects, graphs }))
    }

    /// The content to write for an object or tensor of the view, and the Python callables in it.
    fn content(&self, fqn: &Arc<str>) -> Option<(TorchSaveContent, &[ForeignName])> {
        let fqn = Arc::clone(self.objects.names.get(fqn)?);
        let names = match self.graphs.has_tensor(&fqn) {
            true => &[],
            false => self.graphs.foreign_names(&fqn)?,
        };
        Some((TorchSaveContent::Kept { graphs: Arc::clone(&self.graphs), fqn }, names))
    }
}

/// The contents of the file.
struct Outgoing {
    items: Vec<TorchSaveItem>,
    /// The origins of their bytes; empty when the writer needs no bytes.
    parts: Vec<Part>,
    /// Bytes that the writer requests.
    byte_len: u64,
    report: ConversionReport,
}

impl Outgoing {
    async fn gather(source: &CheckedSource, options: &JobOptions) -> Result<Self, JobError> {
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let kept = Kept::of(source).await?;
        let kept = |fqn: &Arc<str>| kept.as_ref().and_then(|kept| kept.content(fqn));
        let mut entries = object_entries(&metadata);
        entries.retain(|at| metadata.at(*at).is_some_and(|(fqn, _)| kept(fqn).is_none()));
        let mut values = read_objects(source, &metadata, &entries).await;
        let tied = ties(&metadata);
        let mut positions: HashMap<&str, usize> = HashMap::new();
        let mut foreign = Vec::new();
        let (items, parts) = (Vec::new(), Vec::new());
        let mut outgoing = Self { items, parts, byte_len: 0, report: ConversionReport::default() };
        for (index, (fqn, entry)) in metadata.iter().enumerate() {
            let nothing = Part::Encoded(bytes::Bytes::new());
            let (content, part) = match entry {
                Entry::Tensor(tensor) => {
                    let first = tied.get(&index);
                    let in_file = kept(fqn);
                    let same_as = first.and_then(|first| positions.get(&**first).copied());
                    let part = match (same_as, first) {
                        (Some(_), Some(first)) => {
                            outgoing.report.tied.insert(Arc::clone(fqn), Arc::clone(first));
                            nothing
                        }
                        _ if in_file.is_some() => {
                            outgoing.report.chunks += 1;
                            nothing
                        }
                        _ => {
                            let bytes = tensor.byte_len().unwrap_or(u64::MAX);
                            outgoing.byte_len = outgoing.byte_len.saturating_add(bytes);
                            outgoing.report.chunks += 1;
                            Part::whole_tensor(source, &metadata, index, tensor)?
                        }
                    };
                    outgoing.report.tensors += 1;
                    let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                    let made = || TorchSaveContent::Tensor { dtype, shape, same_as };
                    (in_file.map_or_else(made, |(content, _)| content), part)
                }
                _ => {
                    outgoing.report.objects += 1;
                    let content = match kept(fqn) {
                        Some((content, names)) => {
                            foreign.extend(callables::of_names(fqn, names));
                            content
                        }
                        None => {
                            let value = values.remove(&index);
                            let value = value.unwrap_or_else(|| Err(unread(&metadata, index)))?;
                            foreign.extend(callables::foreign_callables(fqn, &value)?);
                            TorchSaveContent::Object(value)
                        }
                    };
                    (content, nothing)
                }
            };
            positions.insert(fqn, outgoing.items.len());
            let path = entry.path().cloned();
            outgoing.items.push(TorchSaveItem { name: Arc::clone(fqn), path, content });
            outgoing.parts.push(part);
        }
        outgoing.report.callables = callables::admit(foreign, options)?;
        Ok(outgoing)
    }
}
