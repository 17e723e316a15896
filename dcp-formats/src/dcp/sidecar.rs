//! What we know of a checkpoint and PyTorch has no place for: a small CBOR file beside the
//! `.metadata`, which PyTorch ignores.
//!
//! It is named after the CRC-32 of the metadata it belongs to, and repeats it inside: one that
//! was left by another save is never taken for this checkpoint's.

use bytes::Bytes;
use dcp_core::{FormatError, Key};
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

/// Facts about a save. Advisory: a checkpoint without it is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sidecar {
    /// The version of this form.
    pub version: u32,
    /// Who wrote it, such as `dcp-formats 0.1.0`.
    pub tool: String,
    /// Ranks that took part in the save.
    pub world_size: u32,
    /// How often this directory had been written before, as far as could be seen.
    pub generation: u64,
    /// CRC-32 of the bytes of the `.metadata`.
    pub metadata_crc32: u32,
    /// Every data file and its length in bytes, empty ones included.
    pub files: Vec<SidecarFile>,
    /// The file that comes after the `.metadata` and makes the checkpoint complete, where its format
    /// has one, such as the `metadata.json` of Megatron-Core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_by: Option<String>,
}

/// A data file, as it was when the checkpoint was committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SidecarFile {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub byte_len: u64,
}

impl Sidecar {
    pub(super) fn new(
        world_size: u32,
        generation: u64,
        metadata_crc32: u32,
        files: &[(Key, u64)],
    ) -> Self {
        let files = files
            .iter()
            .map(|(key, byte_len)| SidecarFile { name: key.to_string(), byte_len: *byte_len });
        Self {
            version: VERSION,
            tool: concat!("dcp-formats ", env!("CARGO_PKG_VERSION")).to_owned(),
            world_size,
            generation,
            metadata_crc32,
            files: files.collect(),
            completed_by: None,
        }
    }

    /// The same save, complete only with this file.
    pub(super) fn with_completed_by(mut self, file: Option<&Key>) -> Self {
        self.completed_by = file.map(ToString::to_string);
        self
    }

    /// The same save under other metadata.
    pub(super) fn for_metadata(mut self, metadata_crc32: u32) -> Self {
        self.metadata_crc32 = metadata_crc32;
        self
    }

    pub(super) fn encode(&self) -> Result<Bytes, FormatError> {
        let mut bytes = Vec::new();
        ciborium::into_writer(self, &mut bytes)
            .map_err(|error| FormatError::new("sidecar", error.to_string()))?;
        Ok(bytes.into())
    }

    /// Reads a sidecar that should belong to the metadata of this CRC-32.
    ///
    /// # Errors
    ///
    /// When the bytes are no sidecar of this version, or it belongs to other metadata.
    pub fn decode(bytes: &[u8], metadata_crc32: u32) -> Result<Self, FormatError> {
        let sidecar: Self = ciborium::de::from_reader_with_recursion_limit(bytes, 16)
            .map_err(|error| FormatError::new("sidecar", error.to_string()))?;
        if sidecar.version != VERSION {
            let problem = format!("version {} is not known here", sidecar.version);
            return Err(FormatError::new("sidecar", problem));
        }
        if sidecar.metadata_crc32 != metadata_crc32 {
            return Err(FormatError::new("sidecar", "it belongs to other metadata"));
        }
        Ok(sidecar)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_for_its_own_metadata_only() {
        let files =
            [(Key::new("__0_0.distcp").unwrap(), 7), (Key::new("__1_0.distcp").unwrap(), 0)];
        let sidecar = Sidecar::new(2, 3, 0xabcd, &files);
        let bytes = sidecar.encode().unwrap();
        assert_eq!(Sidecar::decode(&bytes, 0xabcd).unwrap(), sidecar);
        assert!(Sidecar::decode(&bytes, 0xabce).is_err());
        for len in 0..bytes.len() {
            assert!(Sidecar::decode(&bytes[..len], 0xabcd).is_err());
        }
        assert!(Sidecar::decode(&[0x9f; 100_000], 0).is_err());
    }
}
