//! Models of Hugging Face whose weights `torch.save` wrote: one file, or several with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_convert::view::{Duplicates, Merged};
use dcp_convert::{JobOptions, Source};
use dcp_core::{Key, Storage, StorageError, StorageExt};
use serde::Deserialize;

use crate::error::{Error, ErrorKind};

const NAME: &str = "pytorch_model";
/// Bytes of an index that are read at most.
const INDEX_MAX: u64 = 64 << 20;
/// The most files that an index may name.
const FILES_MAX: usize = 1 << 14;

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The model in a folder, or its `variant`; `None` where there is none.
pub(crate) async fn open(
    storage: &Arc<dyn Storage>,
    variant: Option<&str>,
    tolerant: bool,
) -> Result<Option<Source>, Error> {
    let infix = variant.map(|variant| format!(".{variant}")).unwrap_or_default();
    let key = |name: String| Key::new(name).map_err(StorageError::from);
    let file = key(format!("{NAME}{infix}.bin"))?;
    if storage.contains(&file).await? {
        return Ok(Some(Source::open_file(storage, file, tolerant).await?));
    }
    let index_file = key(format!("{NAME}.bin.index{infix}.json"))?;
    if !storage.contains(&index_file).await? {
        return Ok(None);
    }
    let bad = |problem: String| Error::new(ErrorKind::Damaged, format!("{index_file}: {problem}"));
    let len = storage.stat(&index_file).await?.byte_len;
    if len > INDEX_MAX {
        return Err(bad(format!("it has {len} bytes, more than an index has")));
    }
    let json = storage.read_range(&index_file, 0..len).await?;
    let index: Index = serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    if files.len() > FILES_MAX {
        return Err(bad(format!("it names {} files, too many", files.len())));
    }
    let mut parts = Vec::with_capacity(files.len());
    for file in files {
        let named = Key::new(file.as_str()).map_err(|error| bad(error.to_string()))?;
        if !storage.contains(&named).await? {
            return Err(bad(format!("{file:?}, which it names, is not there")));
        }
        parts.push(Source::open_file(storage, named, tolerant).await?);
    }
    let whole = Merged::apply(&parts, Duplicates::Identical, &JobOptions::default()).await?;
    let metadata = whole.metadata().await?;
    if let Some((name, file)) = index.weight_map.iter().find(|(n, _)| metadata.get(n).is_none()) {
        return Err(bad(format!("{name:?}, which it has in {file:?}, is not there")));
    }
    Ok(Some(whole))
}
