//! `model.safetensors.index.json`: the file of each tensor.

use std::sync::Arc;

use dcp_core::{FormatError, Key};
use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::json;

use super::other_program::DELTA_KEY;
use crate::unique::UniqueMap;

/// The name that Hugging Face's libraries search for.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// The maximum size of an index file in bytes.
pub(super) const INDEX_MAX: u64 = 256 << 20;

/// The contents of an index file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexFile {
    /// The total size of all tensors that the file claims; `None` if it claims none or no whole
    /// number.
    pub total_size: Option<u64>,
    /// The file of each tensor, relative to the folder of the index.
    pub weight_map: IndexMap<Arc<str>, Key>,
    /// Whether the tensors are changes to those of an earlier version, as slime publishes them.
    pub is_delta: bool,
}

#[derive(Deserialize)]
#[serde(expecting = "an index with a weight_map")]
struct Raw {
    #[serde(default)]
    metadata: UniqueMap<serde_json::Value>,
    weight_map: UniqueMap<String>,
}

/// The problem of an index without a tensor, as the predicate of a sentence. Every program writes an index
/// of the files that it has written, so nothing is what is left of a model.
pub(super) const NAMES_NOTHING: &str = "names no tensor";

impl IndexFile {
    /// An index of tensors and their files.
    #[must_use]
    pub fn new(total_size: u64, weight_map: IndexMap<Arc<str>, Key>) -> Self {
        Self { total_size: Some(total_size), weight_map, is_delta: false }
    }

    /// Parses the JSON text.
    ///
    /// # Errors
    ///
    /// When the text is not such an index, a tensor occurs twice, or a file name leaves the folder.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::new("safetensors index", problem);
        let raw: Raw = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        let total_size = raw.metadata.0.get("total_size").and_then(whole_number);
        // Thousands of tensors share a few names.
        let mut names: IndexMap<String, Key> = IndexMap::new();
        let mut weight_map = IndexMap::with_capacity(raw.weight_map.0.len());
        for (fqn, file) in raw.weight_map.0 {
            let key = match names.get(&file) {
                Some(key) => key.clone(),
                None => {
                    let key = Key::new(&file).map_err(|error| {
                        bad(format!("{fqn:?} is in {file:?}: {}", error.reason))
                    })?;
                    names.insert(file, key.clone());
                    key
                }
            };
            weight_map.insert(Arc::from(fqn), key);
        }
        let is_delta = raw.metadata.0.contains_key(DELTA_KEY);
        Ok(Self { total_size, weight_map, is_delta })
    }

    /// The JSON text, indented as transformers and PyTorch write it.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let map = self.weight_map.iter();
        let map = map.map(|(fqn, file)| (fqn.to_string(), json!(file.as_str())));
        let value = json!({
            "metadata": { "total_size": self.total_size.unwrap_or(0) },
            "weight_map": serde_json::Value::Object(map.collect()),
        });
        let mut text = format!("{value:#}").into_bytes();
        text.push(b'\n');
        text
    }

    /// The distinct files, in the order of their first tensors.
    pub fn files(&self) -> impl Iterator<Item = &Key> {
        let files: indexmap::IndexSet<&Key> = self.weight_map.values().collect();
        files.into_iter()
    }
}

/// Some programs write the size as a float.
fn whole_number(value: &serde_json::Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64().filter(|float| float.fract() == 0.0)?;
        // Exact below 2^53; larger floats were not exact anyway.
        (0.0..1.8e19).contains(&float).then_some(float as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_comes_back() {
        let file = |name: &str| Key::new(name).unwrap();
        let map = IndexMap::from([
            (Arc::from("a"), file("model-00001-of-00002.safetensors")),
            (Arc::from("b\"\u{e9}"), file("model-00002-of-00002.safetensors")),
            (Arc::from("c"), file("model-00001-of-00002.safetensors")),
        ]);
        let index = IndexFile::new(7, map);
        let text = index.to_json();
        assert!(text.starts_with(b"{\n  \"metadata\": {\n    \"total_size\": 7\n  },"));
        assert_eq!(IndexFile::parse(&text).unwrap(), index);
        assert_eq!(index.files().count(), 2);
    }

    #[test]
    fn sizes_are_taken_as_they_come() {
        let size = |text: &str| {
            let json = format!(r#"{{"metadata": {text}, "weight_map": {{}}}}"#);
            IndexFile::parse(json.as_bytes()).unwrap().total_size
        };
        assert_eq!(size(r#"{"total_size": 12}"#), Some(12));
        assert_eq!(size(r#"{"total_size": 26953670656.0, "x": [1]}"#), Some(26_953_670_656));
        assert_eq!(size(r#"{"total_size": "12"}"#), None);
        assert_eq!(size(r#"{"total_size": 1e300}"#), None);
        assert_eq!(size("{}"), None);
        assert_eq!(IndexFile::parse(br#"{"weight_map": {}}"#).unwrap().total_size, None);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let deep = format!(r#"{{"weight_map": {{}}, "metadata": {{"x": {}"#, "[".repeat(100_000));
        for (json, problem) in [
            ("", "EOF"),
            ("[]", "invalid"),
            ("{}", "missing field `weight_map`"),
            (r#"{"weight_map": {"a": "x", "a": "y"}}"#, "\"a\" occurs twice"),
            (r#"{"weight_map": {}, "weight_map": {}}"#, "duplicate field"),
            (r#"{"weight_map": {"a": "../x.safetensors"}}"#, "`..` segment"),
            (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "absolute"),
            (r#"{"weight_map": {"a": 1}}"#, "invalid type"),
            (&deep, "recursion"),
        ] {
            let error = IndexFile::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(problem), "{error} instead of {problem}");
        }
    }
}
