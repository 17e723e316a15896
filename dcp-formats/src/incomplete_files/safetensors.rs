//! Compares a file of safetensors with its header and the index of its folder.

use std::collections::HashSet;

use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{Storage, StorageError};

use crate::header_claims::HeaderClaims;
use crate::indexed_tensors::IndexedTensors;
use crate::safetensors::{ENDING, PREFIX_LEN, header_len};

pub(super) fn is_named(name: &str) -> bool {
    name.ends_with(ENDING)
}

pub(super) async fn problem(
    storage: &dyn Storage,
    meta: &ObjectMeta,
    head: &[u8],
    tensors: &IndexedTensors,
) -> Result<Option<String>, StorageError> {
    let prefix = head.get(..PREFIX_LEN as usize).unwrap_or(head);
    let json_len = match header_len(prefix, meta.byte_len) {
        Ok(len) => len,
        Err(error) => return Ok(Some(format!("has no whole header: {}", error.problem()))),
    };
    let json = storage.read_range(&meta.key, PREFIX_LEN..PREFIX_LEN + json_len).await?;
    let mut placed = tensors.of_file(&meta.key);
    let claims = match HeaderClaims::read(&json, &mut |name| placed.see(name)) {
        Ok(claims) => claims,
        Err(error) => return Ok(Some(format!("has no whole header: {error}"))),
    };
    let needed = PREFIX_LEN.saturating_add(json_len).saturating_add(claims.end);
    let found = meta.byte_len;
    if needed != found {
        return Ok(Some(format!("has {found} bytes, its header needs {needed}")));
    }
    if claims.problem.is_some() || !placed.lacks_any() {
        return Ok(claims.problem);
    }
    let mut names = HashSet::new();
    // It was read before.
    let again = HeaderClaims::read(&json, &mut |name| _ = names.insert(name.to_owned()));
    Ok(again.ok().and_then(|_| placed.problem(&names)))
}
