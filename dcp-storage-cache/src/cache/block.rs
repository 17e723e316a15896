//! The file of a block: its bytes, then their length and checksum.

use std::fs::{File, OpenOptions};
use std::io;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use dcp_core::Key;
use dcp_core::digest::{Sha256, hex};
use dcp_core::storage::Version;

/// The end of every block file: format and version of this module.
const MAGIC: [u8; 8] = *b"dcpblk\0\x01";

const TRAILER: usize = 8 + 4 + MAGIC.len();

/// Identifies a block of one version of one object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockName(String);

impl BlockName {
    /// Block `number` of an object; `block_bytes` is the length of each block but the last.
    pub(crate) fn new(
        storage: &str,
        key: &Key,
        version: &Version,
        block_bytes: u64,
        number: u64,
    ) -> Self {
        let mut hash = Sha256::new();
        for text in [storage, key.as_str(), version.as_str()] {
            hash.update_with_length(text);
        }
        hash.update(block_bytes.to_le_bytes());
        hash.update(number.to_le_bytes());
        let [name @ .., _, _, _, _, _, _, _, _, _, _, _, _] = hash.finish();
        Self(hex(&name))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// A number below `count`, evenly spread over names.
    pub(crate) fn slot(&self, count: u32) -> u32 {
        let prefix = self.0.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        prefix.unwrap_or_default() % count.max(1)
    }
}

/// Writes a new block file, which is not visible under its final name yet.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = file.write_all(bytes).and_then(|()| file.write_all(&trailer(bytes)));
    if written.is_err() {
        drop(std::fs::remove_file(path));
    }
    written
}

/// The bytes of a block file of `len` bytes; an error of kind `InvalidData` when it is damaged.
pub(crate) fn read(file: &mut File, len: usize) -> io::Result<Bytes> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the cached block is damaged");
    if file.metadata()?.len() != (len + TRAILER) as u64 {
        return Err(damaged());
    }
    let mut bytes = vec![0; len + TRAILER];
    file.read_exact(&mut bytes)?;
    let end = bytes.split_off(len);
    if end != trailer(&bytes) { Err(damaged()) } else { Ok(bytes.into()) }
}

fn trailer(bytes: &[u8]) -> [u8; TRAILER] {
    let mut trailer = [0; TRAILER];
    let fields = (bytes.len() as u64)
        .to_le_bytes()
        .into_iter()
        .chain(crc32fast::hash(bytes).to_le_bytes())
        .chain(MAGIC);
    trailer.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    trailer
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail loudly")]

    use super::*;

    #[test]
    fn every_damaged_byte_of_a_block_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("block");
        write(&path, b"some bytes").unwrap();
        assert_eq!(read(&mut File::open(&path).unwrap(), 10).unwrap(), &b"some bytes"[..]);
        assert!(read(&mut File::open(&path).unwrap(), 9).is_err());
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            assert!(read(&mut File::open(&path).unwrap(), 10).is_err(), "byte {at}");
        }
    }

    #[test]
    fn blocks_of_other_versions_keys_storages_and_numbers_have_other_names() {
        let name = |storage, key, version, number| {
            BlockName::new(storage, &Key::new(key).unwrap(), &Version::new(version), 8, number)
        };
        let names = [
            name("s3://a", "b", "1", 0),
            name("s3://a", "b", "1", 1),
            name("s3://a", "b", "2", 0),
            name("s3://a", "c", "1", 0),
            name("s3://", "ab", "1", 0),
        ];
        for (at, one) in names.iter().enumerate() {
            assert!(names.iter().skip(at + 1).all(|other| other != one));
        }
    }
}
