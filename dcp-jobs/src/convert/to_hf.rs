//! A checkpoint as a folder of safetensors files, as Hugging Face models have them.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{CheckpointError, Key, Storage, StorageErrorKind};
use dcp_formats::hf::{HfLayout, HfPart, HfWriteOptions, file_byte_lens, refuse_existing};

use crate::convert::safetensors_items::Outgoing;
use crate::error::JobError;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::source::Source;
use crate::write::stored_data_source::CheckpointData;
use crate::write::target::HfTarget;
use crate::write::written::ConversionReport;

/// Memory for one file that is being written, in bytes.
const FILE_MEMORY: u64 = 96 << 20;

/// Writes every tensor of a checkpoint, under its FQN, into files that `layout` divides them
/// into, and an index that names them all. The index appears last, when everything was written
/// and every stored chunk was found to be what its checksum says. The processes of a
/// [group](JobOptions::group) divide the files among them, and rank 0 writes the index.
///
/// # Errors
///
/// When there is a model in the folder and it is not to be overwritten, the checkpoint is unsound
/// or damaged, or a storage fails; then what was there before is untouched.
pub async fn to_hf(
    source: &Source,
    folder: &Arc<dyn Storage>,
    layout: &HfLayout,
    overwrite: bool,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    to_hf_with(source, folder, layout, Vec::new(), overwrite, options).await
}

/// Writes a model with files beside the weights, such as `config.json`. Where a model is replaced, they
/// change with its weights: [`HfWriteOptions::beside`] says how.
///
/// # Errors
///
/// As [`to_hf`], and when one of the files is there and not to be overwritten.
pub async fn to_hf_with(
    source: &Source,
    folder: &Arc<dyn Storage>,
    layout: &HfLayout,
    beside: Vec<(Key, Bytes)>,
    overwrite: bool,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    let source = CheckedSource::new(source, options);
    let outgoing = Outgoing::gather(&source).await?;
    let parts = outgoing.tensors.iter();
    let parts = parts.map(|t| HfPart::whole(Arc::clone(&t.fqn), t.dtype, t.shape.clone()));
    let plan = layout.plan(parts.collect())?;
    let mut how = HfWriteOptions::default();
    how.overwrite = overwrite;
    how.beside = beside;
    how.metadata = outgoing.header();
    let at_once = usize::try_from(options.max_memory / FILE_MEMORY).unwrap_or(usize::MAX);
    how.parallelism = at_once.clamp(1, options.parallelism.max(1));
    how.segments = options.parallelism.max(1);
    let report = outgoing.report;
    if options.dry_run {
        refuse_existing(folder, &plan, &how).await.map_err(existing)?;
        let files = file_byte_lens(&plan, &how)?;
        let files = files.into_iter().map(|(key, len)| (key.to_string(), len));
        return Ok(report.with_files(files).planned(&*source.metadata().await?));
    }
    options.start(outgoing.byte_len);
    let data = Arc::new(CheckpointData::new(&source, outgoing.parts, options));
    let folder = HfTarget(folder)
        .write(&plan, data, &how, options.group.as_ref())
        .await
        .map_err(existing)?;
    let written = folder.publish(source).await.map_err(existing)?;
    for file in &written.left {
        tracing::warn!(%file, "a file of the replaced model could not be removed");
    }
    let files = written.files.into_iter().map(|(key, len)| (key.to_string(), len));
    Ok(report.with_files(files))
}

/// The refusal to replace what is there, as other targets say it.
fn existing(error: CheckpointError) -> JobError {
    match error {
        CheckpointError::Storage(error) if error.kind() == StorageErrorKind::AlreadyExists => {
            let target = error.key().map_or_else(String::new, ToString::to_string);
            JobError::TargetExists { target }
        }
        other => other.into(),
    }
}
