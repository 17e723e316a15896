//! Tied tensors, which are stored once.

use std::sync::Arc;

use indexmap::IndexMap;

use super::header::Header;

/// The key of the header's `__metadata__` that names tied tensors: a JSON object, FQN → FQN of the
/// stored one.
///
/// The convention is dcp's. `safetensors.torch.save_model` writes an entry per tied tensor instead,
/// indistinguishable from other entries; loaders ignore both.
pub const TIED: &str = "dcp.tied";

/// The content of [`TIED`] in a header; empty if it is invalid.
#[must_use]
pub fn ties_of(header: &Header) -> IndexMap<Arc<str>, Arc<str>> {
    let text = header.metadata().get(TIED).map_or("{}", String::as_str);
    let ties: IndexMap<String, String> = serde_json::from_str(text).unwrap_or_default();
    ties.into_iter().map(|(fqn, first)| (fqn.into(), first.into())).collect()
}
