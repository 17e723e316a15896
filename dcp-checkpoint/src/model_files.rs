//! The configuration and tokenizer files of a Hugging Face model.

use std::io;
use std::path::Path;
use std::sync::Arc;

use dcp_convert::{ConversionReport, ConvertError, JobOptions, Source};
use dcp_core::storage::StorageExt;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::hf::{HfLayout, config_without_quantization, names_scales};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::small_file::read_at_most;

/// Bytes of such a file that are read at most; the largest are tokenizers.
const FILE_MAX: u64 = 256 << 20;

/// Files and their content.
pub(crate) type Files = Vec<(Key, Vec<u8>)>;

/// The files that transformers looks for in the folder of the weights. Code is not among them.
const NAMES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
];

/// Those of [`NAMES`] that are in `folder`; a `config.json` must be.
pub(crate) fn files_in(folder: &Path) -> Result<Files, Error> {
    let mut files = Vec::new();
    for name in NAMES {
        let path = folder.join(name);
        match read_at_most(&path, FILE_MAX) {
            Ok(bytes) => files.push((Key::new(*name).map_err(StorageError::from)?, bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let message = format!("cannot read {:?}", path.display().to_string());
                return Err(Error::new(ErrorKind::Io, message).because(error));
            }
        }
    }
    if files.first().is_none_or(|(key, _)| key.as_str() != "config.json") {
        let folder = folder.display().to_string();
        let message = format!("there is no config.json in {folder:?}");
        return Err(Error::new(ErrorKind::InvalidOption, message));
    }
    Ok(files)
}

/// Those of [`NAMES`] that the folder of a Hugging Face model has; none where it has no
/// `config.json` or where the checkpoint is of another format.
pub(crate) async fn files_of(checkpoint: &Checkpoint) -> Result<Files, Error> {
    let mut files = Vec::new();
    if !checkpoint.is_model_folder() {
        return Ok(files);
    }
    let storage = &checkpoint.storage;
    for name in NAMES {
        let key = Key::new(*name).map_err(StorageError::from)?;
        let len = match storage.stat(&key).await {
            Ok(meta) => meta.byte_len,
            Err(error) if error.kind() == StorageErrorKind::NotFound && !files.is_empty() => {
                continue;
            }
            Err(error) if error.kind() == StorageErrorKind::NotFound => break,
            Err(error) => return Err(error.into()),
        };
        if len > FILE_MAX {
            let message = format!("{}/{name} has more than {FILE_MAX} bytes", checkpoint.place);
            return Err(Error::new(ErrorKind::Damaged, message).with_hint(
                "--config DIR takes the configuration and tokenizer from another folder",
            ));
        }
        files.push((key.clone(), storage.read_range(&key, 0..len).await?.to_vec()));
    }
    Ok(files)
}

/// Adds the files that were found or made for the weights and that are not there yet.
pub(crate) fn complete(files: &mut Files, others: Files) {
    for (key, bytes) in others {
        if files.iter().all(|(there, _)| *there != key) {
            files.push((key, bytes));
        }
    }
}

/// Makes the configuration say that weights are plain numbers: what has no scales is not quantized.
fn say_plain(files: &mut Files) -> Result<(), Error> {
    let Some((_, config)) = files.iter_mut().find(|(key, _)| key.as_str() == "config.json") else {
        return Ok(());
    };
    if let Some(plain) = config_without_quantization(config).map_err(ConvertError::from)? {
        *config = plain;
    }
    Ok(())
}

/// Writes weights and these files to a folder; `target` is its URL.
pub(crate) async fn write(
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
            return Err(ConvertError::TargetExists { target }.into());
        }
    }
    let layout = HfLayout::MaxFileBytes(max_shard_bytes);
    let files = files.into_iter().map(|(key, bytes)| (key, bytes.into())).collect();
    let written = dcp_convert::to_hf_with(source, folder, &layout, files, overwrite, job).await;
    Ok(written?)
}
