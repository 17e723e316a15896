//! Tensors that are the same memory as another one, and stored once.

use std::sync::Arc;

use indexmap::IndexMap;

use super::header::Header;

/// The entry of the header's `__metadata__` that names tensors which are stored under another
/// name: a JSON object, FQN → FQN of the one that is in the file.
///
/// The convention is ours. `safetensors.torch.save_model` has an entry for each such tensor
/// instead, which cannot be told from any other entry; loaders ignore both.
pub const TIED: &str = "dcp.tied";

/// What [`TIED`] says in a header; nothing where it does not make sense.
#[must_use]
pub fn ties_of(header: &Header) -> IndexMap<Arc<str>, Arc<str>> {
    let text = header.metadata().get(TIED).map_or("{}", String::as_str);
    let ties: IndexMap<String, String> = serde_json::from_str(text).unwrap_or_default();
    ties.into_iter().map(|(fqn, first)| (fqn.into(), first.into())).collect()
}
