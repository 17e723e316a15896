//! A small CBOR file with facts for which `.metadata` has no place. PyTorch ignores it.
//!
//! Its name contains the CRC-32 of its `.metadata`, and so does its content. A sidecar of another
//! save therefore never applies to this checkpoint.

use bytes::Bytes;
use dcp_core::{FormatError, Key};
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

/// Facts about a save. Advisory: a checkpoint without a sidecar is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sidecar {
    /// The version of the sidecar's format.
    pub version: u32,
    /// The program that wrote it, such as `dcp-formats 0.1.0`.
    pub tool: String,
    /// The number of ranks of the save.
    pub world_size: u32,
    /// The number of earlier saves into this directory, as far as known.
    pub generation: u64,
    /// The CRC-32 of the bytes of `.metadata`.
    pub metadata_crc32: u32,
    /// All data files, with their lengths in bytes; includes empty ones.
    pub files: Vec<SidecarFile>,
    /// The file written after `.metadata` that completes the checkpoint, if the format has one,
    /// such as Megatron-Core's `metadata.json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_by: Option<String>,
}

/// A data file at the time of the commit.
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

    /// Sets the file that completes the checkpoint.
    pub(super) fn with_completed_by(mut self, file: Option<&Key>) -> Self {
        self.completed_by = file.map(ToString::to_string);
        self
    }

    /// Sets the checksum of the metadata.
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

    /// Decodes the sidecar of the metadata with this CRC-32.
    ///
    /// # Errors
    ///
    /// When the bytes are not a sidecar of this version, or belong to other metadata.
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
