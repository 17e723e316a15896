//! A whole checkpoint as one file of `torch.save`.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{Entry, Key, PlanError};
use dcp_formats::torch_save::{
    TorchSaveAgain, TorchSaveContent, TorchSaveForm, TorchSaveItem, TorchSaveOptions, TorchSavePlan,
};

use crate::callables;
use crate::check::refuse_unsound;
use crate::data::{CheckpointData, Part};
use crate::error::ConvertError;
use crate::job::JobOptions;
use crate::objects::{object_entries, read_objects};
use crate::outgoing::ties;
use crate::source::Source;
use crate::target::Target;
use crate::view::with_quantizers;
use crate::written::WriteReport;

/// Writes everything that is in a checkpoint, tensors and objects, to one file of `torch.save`,
/// piece by piece: nested dicts and lists where the checkpoint knows how its keys nest, as
/// PyTorch's `dcp_to_torch_save` makes them, and a flat dict where it does not. Tied tensors are
/// stored once. Objects of classes that mean nothing here are taken over as they are.
///
/// A file of `torch.save` that is the source as it is, not a view of it, is written again with
/// its very objects: keys that are no strings, empty containers, views of one storage.
///
/// The file appears under its name when it is complete and every stored chunk was found to be
/// what its checksum says.
///
/// # Errors
///
/// When the target exists, the checkpoint is unsound or damaged, holds a quantized
/// tensor whose scale is not known, or a storage fails; then there is no
/// new file.
#[doc(alias = "dcp_to_torch_save")]
pub async fn to_torch_save(
    source: &Source,
    target: &Target,
    form: TorchSaveForm,
    options: &JobOptions,
) -> Result<WriteReport, ConvertError> {
    target.check().await?;
    let source = source.for_job(options.parallelism);
    let how = TorchSaveOptions::default().with_form(form);
    if let Some(reader) = source.save_reader()
        && let Some(again) =
            reader.again(&target.key, &how).await.map_err(ConvertError::unwritable)?
    {
        let callables = callables::admit(callables::in_index(&source).await?, options)?;
        let report = WriteReport { callables, ..WriteReport::default() };
        return write_again(&source, reader.key(), target, again, report, options).await;
    }
    let source = with_quantizers(source, |_| true).await?;
    let outgoing = Outgoing::gather(&source, options).await?;
    let plan =
        TorchSavePlan::new(&target.key, &outgoing.items, &how).map_err(ConvertError::unwritable)?;
    let report = outgoing.report.with_files([(target.key.to_string(), plan.byte_len())]);
    if options.dry_run {
        return Ok(report.planned(&*source.metadata().await?));
    }
    options.start(outgoing.byte_len);
    let data = CheckpointData::new(&source, outgoing.parts, options).settling(outgoing.byte_len);
    plan.write(&*target.creator(), Arc::new(data), None).await?;
    Ok(report)
}

/// Writes the objects of the file `from`, whose storages are compared with their checksums on the
/// way.
async fn write_again(
    source: &Source,
    from: &Key,
    target: &Target,
    again: TorchSaveAgain,
    mut report: WriteReport,
    options: &JobOptions,
) -> Result<WriteReport, ConvertError> {
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
    let TorchSaveAgain { plan, records, .. } = again;
    let report = report.with_files([(target.key.to_string(), plan.byte_len())]);
    if options.dry_run {
        return Ok(report.planned(&metadata));
    }
    options.start(records.iter().fold(0, |sum, record| sum.saturating_add(record.byte_len)));
    let parts = records.iter().map(|record| Part::Stored {
        key: from.clone(),
        byte_offset: record.data.start,
        first: None,
    });
    let data = CheckpointData::new(source, parts.collect(), options);
    plan.write(&*target.creator(), Arc::new(data), None).await?;
    Ok(report)
}

/// What goes into the file.
struct Outgoing {
    items: Vec<TorchSaveItem>,
    /// What each of them is made from; nothing, where the writer asks for nothing.
    parts: Vec<Part>,
    /// Bytes that the writer asks for.
    byte_len: u64,
    report: WriteReport,
}

impl Outgoing {
    async fn gather(source: &Source, options: &JobOptions) -> Result<Self, ConvertError> {
        let metadata = source.metadata().await?;
        refuse_unsound(&metadata)?;
        let mut values = read_objects(source, &metadata, &object_entries(&metadata)).await;
        let tied = ties(&metadata);
        let mut positions: HashMap<&str, usize> = HashMap::new();
        let mut foreign = Vec::new();
        let (items, parts) = (Vec::new(), Vec::new());
        let mut outgoing = Self { items, parts, byte_len: 0, report: WriteReport::default() };
        for (index, (fqn, entry)) in metadata.iter().enumerate() {
            let nothing = Part::Encoded(bytes::Bytes::new());
            let (content, part) = match entry {
                Entry::Tensor(tensor) => {
                    let first = tied.get(&index);
                    let same_as = first.and_then(|first| positions.get(&**first).copied());
                    let part = match (same_as, first) {
                        (Some(_), Some(first)) => {
                            outgoing.report.tied.insert(Arc::clone(fqn), Arc::clone(first));
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
                    (TorchSaveContent::Tensor { dtype, shape, same_as }, part)
                }
                _ => {
                    let value = values.remove(&index).unwrap_or_else(|| {
                        let problem = "it could not be read".to_owned();
                        Err(PlanError::Unsupported { fqn: fqn.to_string(), problem }.into())
                    })?;
                    foreign.extend(callables::foreign_callables(fqn, &value)?);
                    outgoing.report.objects += 1;
                    (TorchSaveContent::Object(value), nothing)
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
