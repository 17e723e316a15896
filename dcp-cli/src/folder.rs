//! Folders by the names in them: what each would be taken for.

use dcp::core::{Key, Storage, StorageError, StorageExt};
use dcp::formats::hf::INDEX_ENDING;
use dcp::megatron::{COMMON_FILE, METADATA_JSON};
use futures_util::StreamExt;

use crate::failure::Failure;

/// The folder that a URI lies in, and its name there.
pub(crate) fn split(uri: &str) -> Option<(String, String)> {
    let (scheme, path) = match uri.split_once("://") {
        Some((scheme, path)) => (format!("{scheme}://"), path),
        None => (String::new(), uri),
    };
    let path = path.trim_end_matches('/');
    let (parent, name) = match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((parent, name)) => (parent, name),
        None => (".", path),
    };
    (!name.is_empty()).then(|| (format!("{scheme}{parent}"), name.to_owned()))
}

/// Whether a directory is a checkpoint of PyTorch's format.
pub(crate) async fn is_dcp(storage: &dyn Storage) -> Result<bool, StorageError> {
    for name in [".metadata", "__0.metadata"] {
        if storage.contains(&Key::new(name)?).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A file that makes a directory a Hugging Face model, whatever else is there: an index, or one
/// under a name that loaders look for. Other safetensors files may lie beside anything.
pub(crate) async fn model_file(storage: &dyn Storage) -> Result<Option<Key>, StorageError> {
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let key = meta?.key;
        let name = key.as_str();
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        if !name.contains('/') && (is_weights || name.ends_with(INDEX_ENDING)) {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Whether a folder is meant as a checkpoint of Megatron-Core: it has the folder of a rank, or a
/// `metadata.json` that speaks of backends, or none that speaks of anything.
pub(crate) async fn is_megatron(storage: &dyn Storage) -> Result<bool, Failure> {
    /// More than any `metadata.json` of Megatron-Core has, in bytes.
    const BYTES_MAX: u64 = 1 << 16;
    let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
    for rank in ["mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"] {
        if contains(&format!("{rank}/model_optim_rng.pt")).await? {
            return Ok(true);
        }
    }
    let key = Key::new(METADATA_JSON).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Ok(false);
    }
    let len = storage.stat(&key).await?.byte_len;
    if len > BYTES_MAX {
        return Ok(false);
    }
    let json = storage.read_range(&key, 0..len).await?;
    // Other programs have files of this name, too, but no common state beside it.
    let others = serde_json::from_slice::<serde_json::Value>(&json)
        .is_ok_and(|json| json.get("sharded_backend").is_none());
    Ok(!others || contains(COMMON_FILE).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_split_into_folder_and_name() {
        let split = |uri| split(uri).unwrap();
        assert_eq!(split("a/b.npy"), ("a".into(), "b.npy".into()));
        assert_eq!(split("b.npy"), (".".into(), "b.npy".into()));
        assert_eq!(split("/b"), ("/".into(), "b".into()));
        assert_eq!(split("file:///x/y/"), ("file:///x".into(), "y".into()));
        assert!(super::split("/").is_none());
    }
}
