//! The files beside the weights of a Hugging Face model.

use std::io;
use std::path::Path;

use dcp::convert::ConvertError;
use dcp::core::{Key, StorageError};
use dcp::formats::hf::config_without_quantization;

use crate::failure::{Exit, Failure};

/// Lets the configuration say that weights are plain numbers: what has no scales is not quantized.
pub(crate) fn say_plain(files: &mut [(Key, Vec<u8>)]) -> Result<(), Failure> {
    let Some((_, config)) = files.iter_mut().find(|(key, _)| key.as_str() == "config.json") else {
        return Ok(());
    };
    if let Some(plain) = config_without_quantization(config).map_err(ConvertError::from)? {
        *config = plain;
    }
    Ok(())
}

/// The files beside the weights that transformers looks for. Code is not among them.
pub(crate) fn files(folder: &Path) -> Result<Vec<(Key, Vec<u8>)>, Failure> {
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
    let mut files = Vec::new();
    for name in NAMES {
        let path = folder.join(name);
        match std::fs::read(&path) {
            Ok(bytes) => files.push((Key::new(*name).map_err(StorageError::from)?, bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(Failure::from(error)
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
