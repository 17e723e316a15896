//! A small CBOR file with facts for which `.metadata` has no place. PyTorch ignores it.
//!
//! Its name contains the CRC-32 of its `.metadata`, and so does its content. A sidecar of another
//! save therefore never applies to this checkpoint.

use bytes::Bytes;
use dcp_core::digest::hex;
use dcp_core::{FormatError, Key};
use serde::{Deserialize, Serialize};

use crate::chunk_crcs::ChunkCrcs;

/// Optional fields are added without a new number: earlier readers skip them.
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
    /// The step of the training run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The step of the checkpoint before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_step: Option<u64>,
    /// The names and sizes of the dimensions of the device mesh, the outermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mesh: Vec<(String, u64)>,
}

/// A data file at the time of the commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SidecarFile {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub byte_len: u64,
    /// The rank that wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Its SHA-256 in hexadecimal digits, if the save computed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The CRC-32s of the elements of its chunks, and of its encoded objects.
    #[serde(default, skip_serializing_if = "ChunkCrcs::is_empty")]
    pub chunks: ChunkCrcs,
}

/// The facts that a caller states about its save.
#[derive(Clone, Debug, Default)]
pub(super) struct Origin {
    pub(super) step: Option<u64>,
    pub(super) parent_step: Option<u64>,
    pub(super) mesh: Vec<(String, u64)>,
}

impl SidecarFile {
    pub(super) fn new(key: &Key, byte_len: u64) -> Self {
        let chunks = ChunkCrcs::default();
        Self { name: key.to_string(), byte_len, rank: None, sha256: None, chunks }
    }

    pub(super) fn with_rank(mut self, rank: Option<u32>) -> Self {
        self.rank = rank;
        self
    }

    pub(super) fn with_sha256(mut self, sha256: Option<&[u8; 32]>) -> Self {
        self.sha256 = sha256.map(|digest| hex(digest));
        self
    }

    pub(super) fn with_chunks(mut self, chunks: Vec<(u64, u32)>) -> Self {
        self.chunks = ChunkCrcs::new(chunks);
        self
    }
}

impl Sidecar {
    pub(super) fn new(
        world_size: u32,
        generation: u64,
        metadata_crc32: u32,
        files: Vec<SidecarFile>,
    ) -> Self {
        Self {
            version: VERSION,
            tool: concat!("dcp-formats ", env!("CARGO_PKG_VERSION")).to_owned(),
            world_size,
            generation,
            metadata_crc32,
            files,
            completed_by: None,
            step: None,
            parent_step: None,
            mesh: Vec::new(),
        }
    }

    /// Sets what the caller says about the save.
    pub(super) fn with_origin(mut self, origin: &Origin) -> Self {
        let Origin { step, parent_step, mesh } = origin.clone();
        (self.step, self.parent_step, self.mesh) = (step, parent_step, mesh);
        self
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

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    #[test]
    fn it_comes_back_for_its_own_metadata_only() {
        let files = vec![
            SidecarFile::new(&key("__0_0.distcp"), 7)
                .with_rank(Some(0))
                .with_sha256(Some(&[0xab; 32]))
                .with_chunks(vec![(900, 5), (0, u32::MAX)]),
            SidecarFile::new(&key("__1_0.distcp"), 0),
        ];
        let origin = Origin {
            step: Some(20),
            parent_step: Some(10),
            mesh: vec![("dp".to_owned(), 2), ("tp".to_owned(), 4)],
        };
        let sidecar = Sidecar::new(2, 3, 0xabcd, files).with_origin(&origin);
        let bytes = sidecar.encode().unwrap();
        let decoded = Sidecar::decode(&bytes, 0xabcd).unwrap();
        assert_eq!(decoded, sidecar);
        assert_eq!(decoded.files[0].chunks.at(900), Some(5));
        assert_eq!(decoded.files[0].chunks.at(0), Some(u32::MAX));
        assert_eq!(decoded.files[0].chunks.at(1), None);
        assert!(Sidecar::decode(&bytes, 0xabce).is_err());
        for len in 0..bytes.len() {
            assert!(Sidecar::decode(&bytes[..len], 0xabcd).is_err());
        }
        assert!(Sidecar::decode(&[0x9f; 100_000], 0).is_err());
    }

    /// Sidecars of versions before checksums, and fields of versions to come.
    #[test]
    fn fields_may_be_absent_and_unknown() {
        #[derive(Serialize)]
        struct Other {
            version: u32,
            tool: String,
            world_size: u32,
            generation: u64,
            metadata_crc32: u32,
            files: Vec<OtherFile>,
            later: Vec<u8>,
        }
        #[derive(Serialize)]
        struct OtherFile {
            name: String,
            byte_len: u64,
            later: bool,
        }
        let file = OtherFile { name: "__0_0.distcp".to_owned(), byte_len: 7, later: true };
        let other = Other {
            version: 1,
            tool: "x".to_owned(),
            world_size: 1,
            generation: 0,
            metadata_crc32: 5,
            files: vec![file],
            later: vec![1],
        };
        let mut bytes = Vec::new();
        ciborium::into_writer(&other, &mut bytes).unwrap();
        let sidecar = Sidecar::decode(&bytes, 5).unwrap();
        assert!(sidecar.files[0].chunks.is_empty() && sidecar.step.is_none());
    }
}
