//! Writing a Hugging Face model: its weights, and the files beside them.

use std::io;
use std::path::Path;

use dcp::convert::{ConvertError, JobOptions, Source, WriteReport};
use dcp::core::{Key, StorageError, StorageErrorKind, StorageExt};
use dcp::formats::hf::{HfLayout, config_without_quantization, names_scales};

use crate::failure::{Exit, Failure};
use crate::open::Opened;
use crate::small_file::read_at_most;
use crate::target;

/// Bytes of a file beside the weights that are read at most; the largest are tokenizers.
const FILE_MAX: u64 = 256 << 20;

/// Lets the configuration say that weights are plain numbers: what has no scales is not quantized.
fn say_plain(files: &mut [(Key, Vec<u8>)]) -> Result<(), Failure> {
    let Some((_, config)) = files.iter_mut().find(|(key, _)| key.as_str() == "config.json") else {
        return Ok(());
    };
    if let Some(plain) = config_without_quantization(config).map_err(ConvertError::from)? {
        *config = plain;
    }
    Ok(())
}

/// The files beside the weights that transformers looks for. Code is not among them.
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
pub(crate) fn files(folder: &Path) -> Result<Vec<(Key, Vec<u8>)>, Failure> {
    let mut files = Vec::new();
    for name in NAMES {
        let path = folder.join(name);
        match read_at_most(&path, FILE_MAX) {
            Ok(bytes) => files.push((Key::new(*name).map_err(StorageError::from)?, bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(Failure::new(Exit::Io, error.to_string())
                    .context(format!("cannot read {:?}", path.display().to_string())));
            }
        }
    }
    if files.first().is_none_or(|(key, _)| key.as_str() != "config.json") {
        let folder = folder.display().to_string();
        return Err(Failure::new(Exit::Usage, format!("there is no config.json in {folder:?}")));
    }
    Ok(files)
}

/// Those of [`NAMES`] that the folder of a Hugging Face model has; none where it has no
/// `config.json` or where something else was opened.
pub(crate) async fn files_beside(opened: &Opened) -> Result<Vec<(Key, Vec<u8>)>, Failure> {
    let mut files = Vec::new();
    let is_other = opened.megatron.is_some() || opened.source.dcp_reader().is_some();
    if is_other || !opened.is_folder {
        return Ok(files);
    }
    for name in NAMES {
        let key = Key::new(*name).map_err(StorageError::from)?;
        let len = match opened.folder.stat(&key).await {
            Ok(meta) => meta.byte_len,
            Err(error) if error.kind() == StorageErrorKind::NotFound && !files.is_empty() => {
                continue;
            }
            Err(error) if error.kind() == StorageErrorKind::NotFound => break,
            Err(error) => return Err(error.into()),
        };
        if len > FILE_MAX {
            let message = format!("{}/{name} has more than {FILE_MAX} bytes", opened.place);
            return Err(Failure::new(Exit::Bad, message)
                .hint("--config DIR takes the files beside the weights from another folder"));
        }
        files.push((key.clone(), opened.folder.read_range(&key, 0..len).await?.to_vec()));
    }
    Ok(files)
}

/// Adds the files that were found or made for the weights and that are not there yet.
pub(crate) fn complete(files: &mut Vec<(Key, Vec<u8>)>, others: Vec<(Key, Vec<u8>)>) {
    for (key, bytes) in others {
        if files.iter().all(|(there, _)| *there != key) {
            files.push((key, bytes));
        }
    }
}

/// Writes weights and these files to the folder `target`.
pub(crate) async fn write(
    source: &Source,
    target: &str,
    mut files: Vec<(Key, Vec<u8>)>,
    max_shard_bytes: u64,
    overwrite: bool,
    options: &JobOptions,
) -> Result<WriteReport, Failure> {
    let folder = target::folder(target, true, options.dry_run).await?;
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
    let beside = files.into_iter().map(|(key, bytes)| (key, bytes.into())).collect();
    let written =
        dcp::convert::to_hf_with(source, &folder, &layout, beside, overwrite, options).await;
    Ok(written?)
}
