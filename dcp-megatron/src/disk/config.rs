//! `metadata.json`: it marks a folder as a checkpoint of Megatron-Core and names its backends.

use std::sync::Arc;

use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, FormatError, Key, Storage, StorageError, StorageErrorKind};
use serde_json::Value as Json;

/// The file's name. It is written last, so its presence commits the checkpoint.
pub const METADATA_JSON: &str = "metadata.json";
/// A longer one than any version writes, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The backends that wrote a checkpoint (`CheckpointingConfig` of Megatron-Core, 0.4 and later).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointingConfig {
    /// The backend of tensors and objects: `torch_dist` or `zarr`.
    pub sharded: Backend,
    /// The backend of the common state, `torch`; `None` since Megatron-Core 0.19, which keeps it
    /// among the objects. A reader takes `None` for `torch` of version 1 where there is a
    /// `common.pt`.
    pub common: Option<Backend>,
}

/// A backend and the version of its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// The name.
    pub name: Arc<str>,
    /// The version; 1 is the only one there ever was.
    pub version: u64,
}

impl Backend {
    /// Version 1 of a backend.
    #[must_use]
    pub fn first(name: &str) -> Self {
        Self { name: name.into(), version: 1 }
    }

    pub(crate) fn is(&self, name: &str) -> bool {
        *self.name == *name && self.version == 1
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} version {}", self.name, self.version)
    }
}

impl CheckpointingConfig {
    /// Returns the configuration of a plug-in's checkpoint, the common state in the same backend.
    #[must_use]
    pub fn new(sharded: Backend) -> Self {
        Self { sharded, common: None }
    }

    /// Sets the backend of the common state.
    #[must_use]
    pub fn with_common(mut self, common: Backend) -> Self {
        self.common = Some(common);
        self
    }

    /// Returns the configuration of Megatron-Core 0.6 to 0.18 for `torch_dist`, which every later
    /// version reads.
    #[must_use]
    pub fn torch_dist() -> Self {
        Self { sharded: Backend::first("torch_dist"), common: Some(Backend::first("torch")) }
    }

    /// Returns the configuration of Megatron-Core 0.19 and later for `torch_dist`, with the common
    /// state inside.
    #[must_use]
    pub fn torch_dist_with_common_inside() -> Self {
        Self { sharded: Backend::first("torch_dist"), common: None }
    }

    /// Takes the file apart. Members of other names are left alone, as Megatron-Core since 0.19
    /// does, and absent ones are what Megatron-Core takes them for.
    ///
    /// # Errors
    ///
    /// When it is no JSON object, has no `sharded_backend`, or members of other types.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::new("description of the checkpoint", problem);
        if json.iter().all(u8::is_ascii_whitespace) {
            return Err(bad("it is empty: the save that wrote it died, save again".to_owned()));
        }
        let members: Json = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        let Json::Object(members) = members else {
            return Err(bad("it is no JSON object".to_owned()));
        };
        let name = |member: &str| match members.get(member) {
            None => Ok(None),
            Some(Json::String(name)) => Ok(Some(Arc::from(&**name))),
            Some(other) => Err(bad(format!("{member:?} is {other}, not a name"))),
        };
        let version = |member: &str| match members.get(member) {
            None => Ok(None),
            Some(version) => match version.as_u64() {
                Some(version) => Ok(Some(version)),
                None => Err(bad(format!("{member:?} is {version}, not a version"))),
            },
        };
        let sharded = name("sharded_backend")?;
        let sharded = Backend {
            name: sharded.ok_or_else(|| bad("it has no \"sharded_backend\"".to_owned()))?,
            version: version("sharded_backend_version")?.unwrap_or(1),
        };
        let common = match (name("common_backend")?, version("common_backend_version")?) {
            (None, None) => None,
            (name, version) => Some(Backend {
                name: name.unwrap_or_else(|| "torch".into()),
                version: version.unwrap_or(1),
            }),
        };
        Ok(Self { sharded, common })
    }

    /// The file, byte for byte as Python's `json.dump` writes it.
    #[must_use]
    pub fn to_json(&self) -> String {
        let quoted = |text: &str| Json::from(text).to_string();
        let mut members = vec![
            ("sharded_backend", quoted(&self.sharded.name)),
            ("sharded_backend_version", self.sharded.version.to_string()),
        ];
        if let Some(common) = &self.common {
            members.push(("common_backend", quoted(&common.name)));
            members.push(("common_backend_version", common.version.to_string()));
        }
        let members: Vec<_> =
            members.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
        format!("{{{}}}", members.join(", "))
    }

    /// The one in a folder; `None` where there is none.
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse), and when the storage fails.
    pub async fn read(storage: &dyn Storage) -> Result<Option<Self>, CheckpointError> {
        let key = Key::new(METADATA_JSON).map_err(StorageError::from)?;
        let meta = match storage.stat(&key).await {
            Ok(meta) => meta,
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if meta.byte_len > BYTES_MAX {
            let problem = format!("it has {} bytes, more than it can have", meta.byte_len);
            let error = FormatError::new("description of the checkpoint", problem);
            return Err(error.in_file(METADATA_JSON, 0).into());
        }
        let json = storage.read_range(&key, 0..meta.byte_len).await?;
        Ok(Some(Self::parse(&json).map_err(|error| error.in_file(METADATA_JSON, 0))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: &str = r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}"#;
    const TWO: &str = r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1}"#;

    #[test]
    fn both_shapes_come_and_go_byte_for_byte() {
        for (config, json, len) in [
            (CheckpointingConfig::torch_dist(), FOUR, 119),
            (CheckpointingConfig::torch_dist_with_common_inside(), TWO, 63),
        ] {
            assert_eq!(config.to_json(), json);
            assert_eq!(json.len(), len);
            assert_eq!(CheckpointingConfig::parse(json.as_bytes()).unwrap(), config);
        }
    }

    #[test]
    fn what_is_absent_or_unknown_is_taken_as_megatron_takes_it() {
        let config = CheckpointingConfig::parse(br#"{"sharded_backend": "zarr", "later": [1]}"#);
        let config = config.unwrap();
        assert_eq!(config.sharded, Backend::first("zarr"));
        assert_eq!(config.common, None);
        let half = br#"{"sharded_backend": "zarr", "common_backend": "torch"}"#;
        assert_eq!(CheckpointingConfig::parse(half).unwrap().common, Some(Backend::first("torch")));
    }

    #[test]
    fn bad_ones_are_refused_in_words() {
        for (json, said) in [
            ("", "empty"),
            (" \n", "empty"),
            ("{", "EOF"),
            (r#"["torch_dist", 1]"#, "no JSON object"),
            ("{}", "no \"sharded_backend\""),
            (r#"{"sharded_backend": 3}"#, "3, not a name"),
            (r#"{"sharded_backend": "zarr", "sharded_backend_version": -1}"#, "-1, not a version"),
        ] {
            let error = CheckpointingConfig::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(said), "{json:?}: {error}");
        }
    }
}
