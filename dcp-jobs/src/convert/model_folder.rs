//! A model as a folder of Hugging Face: its weights, its configuration and the files beside them.

use std::sync::Arc;

use dcp_core::Storage;
use dcp_core::storage::StorageExt;
use dcp_formats::hf::{HfLayout, config_without_quantization, names_scales};

use crate::checkpoint::model_files::Files;
use crate::convert::to_hf_with;
use crate::error::{Error, JobError};
use crate::options::JobOptions;
use crate::source::Source;
use crate::write::ConversionReport;

/// Makes the configuration say that weights are plain numbers: what has no scales is not quantized.
fn say_plain(files: &mut Files) -> Result<(), Error> {
    let Some((_, config)) = files.iter_mut().find(|(key, _)| key.as_str() == "config.json") else {
        return Ok(());
    };
    if let Some(plain) = config_without_quantization(config).map_err(JobError::from)? {
        *config = plain;
    }
    Ok(())
}

/// Writes weights and these files to a folder; `target` is its URL.
pub(crate) async fn write_model_folder(
    source: &Source,
    (folder, target): (&Arc<dyn Storage>, &str),
    mut files: Files,
    max_shard_bytes: u64,
    overwrite: bool,
    job: &JobOptions,
) -> Result<ConversionReport, Error> {
    if !source.metadata().await?.iter().any(|(fqn, _)| names_scales(fqn)) {
        say_plain(&mut files)?;
    }
    for (key, _) in &files {
        if !overwrite && folder.contains(key).await? {
            let target = format!("{target}/{key}");
            return Err(JobError::TargetExists { target }.into());
        }
    }
    let layout = HfLayout::MaxFileBytes(max_shard_bytes);
    let files = files.into_iter().map(|(key, bytes)| (key, bytes.into())).collect();
    let written = to_hf_with(source, folder, &layout, files, overwrite, job).await;
    Ok(written?)
}
