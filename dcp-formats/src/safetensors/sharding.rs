//! The positions of a file's tensors in the whole ones: PyTorch's `DCP_SHARDING_INFO`.

use std::sync::Arc;

use dcp_core::{Dims, FormatError};
use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::json;

use crate::unique::UniqueMap;

/// The header's key for the offset of each tensor in the whole one.
pub const SHARDING: &str = "DCP_SHARDING_INFO";
/// The header's key for the version of [`SHARDING`].
pub const SHARDING_VERSION: &str = "DCP_VERSION";
/// The version that PyTorch writes (2.8 to 2.15).
pub const SHARDING_VERSION_WRITTEN: &str = "1.0";

/// For each tensor of a file, its offset in the whole one, in elements per axis.
///
/// PyTorch's Hugging Face storage and its `SerializationFormat.SAFETENSORS` (2.8 and later) write
/// it to the header of every file, even when all offsets are zero. The shape of the whole tensor is
/// not stored: it is the extent of all parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardingInfo {
    offsets: IndexMap<Arc<str>, Dims>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with saved_offsets")]
struct Saved {
    saved_offsets: Vec<u64>,
}

impl ShardingInfo {
    /// Parses the JSON text of the header's [`SHARDING`].
    ///
    /// # Errors
    ///
    /// When the text is invalid, a name occurs twice, or there are more than [`Dims::MAX_AXES`]
    /// offsets.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        let bad = |problem: String| {
            FormatError::new("safetensors header", format!("{SHARDING}: {problem}"))
        };
        let raw: UniqueMap<Saved> =
            serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        let mut offsets = IndexMap::with_capacity(raw.0.len());
        for (name, saved) in raw.0 {
            if saved.saved_offsets.len() > Dims::MAX_AXES {
                let axes = saved.saved_offsets.len();
                return Err(bad(format!("{name:?} has {axes} offsets")));
            }
            offsets.insert(Arc::from(name), Dims::from(saved.saved_offsets));
        }
        Ok(Self { offsets })
    }

    /// The offset of a tensor in the whole one; `None` if it is not stored.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Dims> {
        self.offsets.get(name)
    }

    /// Sets the offset of a tensor.
    pub fn insert(&mut self, name: impl Into<Arc<str>>, offsets: Dims) {
        self.offsets.insert(name.into(), offsets);
    }

    /// Whether no tensor has an offset.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// The JSON text for the header.
    #[must_use]
    pub fn to_json(&self) -> String {
        let entries = self.offsets.iter();
        let entries =
            entries.map(|(name, at)| (name.to_string(), json!({ "saved_offsets": &**at })));
        serde_json::Value::Object(entries.collect()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_come_back() {
        let mut info = ShardingInfo::default();
        info.insert("a\"b", Dims::from([3, 0]));
        info.insert("scalar", Dims::zeros(0));
        assert_eq!(ShardingInfo::parse(&info.to_json()).unwrap(), info);
        assert_eq!(info.get("scalar").unwrap().ndim(), 0);
        assert!(info.get("c").is_none());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, problem) in [
            (r#"{"a": {"saved_offsets": [0]}, "a": {"saved_offsets": [1]}}"#, "occurs twice"),
            (r#"{"a": {"saved_offsets": [-1]}}"#, "invalid value"),
            (r#"{"a": {}}"#, "missing field"),
            (r#"{"a": [1]}"#, "invalid type"),
            ("[]", "invalid type"),
            ("{", "EOF"),
        ] {
            let error = ShardingInfo::parse(text).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(SHARDING), "{text}: {error}");
        }
        let many = format!(r#"{{"a": {{"saved_offsets": {:?}}}}}"#, vec![0; 65]);
        assert!(ShardingInfo::parse(&many).is_err());
        let deep = format!(r#"{{"a": {{"saved_offsets": [0], "x": {}"#, "[".repeat(100_000));
        assert!(ShardingInfo::parse(&deep).is_err());
    }
}
