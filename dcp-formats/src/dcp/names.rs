//! The names of the files in a DCP directory.

use dcp_core::Key;
use dcp_core::key::InvalidKey;

/// The index; its presence makes a directory a checkpoint.
pub(crate) const METADATA: &str = ".metadata";
/// The file that PyTorch renames to [`METADATA`].
const METADATA_TMP: &str = ".metadata.tmp";

/// The meaning of a file name at the top of a DCP directory. Other names are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Metadata,
    MetadataTmp,
    /// `__{rank}.metadata`, of a save without collectives.
    RankMetadata {
        rank: u32,
    },
    /// The metadata file of a rank before PyTorch renames it.
    RankMetadataTmp,
    /// `__{rank}_{n}.distcp`, or `__{rank}_{n}.g{generation}.distcp`.
    Data {
        rank: u32,
        generation: u64,
    },
    /// `.dcp-{crc32}.cbor`.
    Sidecar,
}

impl Named {
    /// Parses the name of a file, or its path in the directory.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name {
            METADATA => return Some(Self::Metadata),
            METADATA_TMP => return Some(Self::MetadataTmp),
            _ => {}
        }
        if let Some(digits) = name.strip_prefix(".dcp-").and_then(|n| n.strip_suffix(".cbor")) {
            let hex = digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            return (hex && digits.len() == 8).then_some(Self::Sidecar);
        }
        let rest = name.strip_prefix("__")?;
        if let Some(rank) = rest.strip_suffix(".metadata") {
            return Some(Self::RankMetadata { rank: number(rank)? });
        }
        if let Some(rank) = rest.strip_suffix(".metadata.tmp") {
            return number::<u32>(rank).map(|_| Self::RankMetadataTmp);
        }
        let (rank, rest) = rest.strip_suffix(".distcp")?.split_once('_')?;
        let (n, generation) = match rest.split_once(".g") {
            Some((n, generation)) => (n, number(generation).filter(|g| *g > 0)?),
            None => (rest, 0),
        };
        let (rank, _) = number::<u32>(rank).zip(number::<u64>(n))?;
        Some(Self::Data { rank, generation })
    }
}

/// A decimal number as PyTorch prints it: no sign, no leading zero.
fn number<T: std::str::FromStr>(digits: &str) -> Option<T> {
    let plain = digits.bytes().all(|b| b.is_ascii_digit())
        && (digits.len() == 1 || !digits.starts_with('0'));
    digits.parse().ok().filter(|_| plain)
}

/// The name of data file `n` of a rank, in the save of this `generation` over earlier ones.
///
/// # Errors
///
/// Never; every such name is a key.
pub fn data_file(rank: usize, n: usize, generation: u64) -> Result<Key, InvalidKey> {
    match generation {
        0 => Key::new(format!("__{rank}_{n}.distcp")),
        _ => Key::new(format!("__{rank}_{n}.g{generation}.distcp")),
    }
}

/// The generation of a data file; `None` for another file.
pub(crate) fn generation_of(file: &Key) -> Option<u64> {
    match Named::parse(file.as_str())? {
        Named::Data { generation, .. } => Some(generation),
        _ => None,
    }
}

/// The name of the same data file in another generation.
pub(crate) fn renamed(file: &Key, generation: u64) -> Option<Key> {
    let Named::Data { .. } = Named::parse(file.as_str())? else { return None };
    let (rank, rest) =
        file.as_str().strip_prefix("__")?.strip_suffix(".distcp")?.split_once('_')?;
    let n = rest.split_once(".g").map_or(rest, |(n, _)| n);
    data_file(rank.parse().ok()?, n.parse().ok()?, generation).ok()
}

/// The name of the sidecar of metadata with this CRC-32.
pub(crate) fn sidecar(crc32: u32) -> Result<Key, InvalidKey> {
    Key::new(format!(".dcp-{crc32:08x}.cbor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<Named> {
        Named::parse(name)
    }

    #[test]
    fn own_names_come_back() {
        let data = |rank, n, generation| parse(data_file(rank, n, generation).unwrap().as_str());
        assert_eq!(data(0, 0, 0), Some(Named::Data { rank: 0, generation: 0 }));
        assert_eq!(data(12, 345, 6), Some(Named::Data { rank: 12, generation: 6 }));
        assert_eq!(parse(sidecar(0xab).unwrap().as_str()), Some(Named::Sidecar));
        assert_eq!(parse("__7.metadata"), Some(Named::RankMetadata { rank: 7 }));
        assert_eq!(parse("__7.metadata.tmp"), Some(Named::RankMetadataTmp));
    }

    #[test]
    fn foreign_names_are_left_alone() {
        let foreign = [
            "data.bin",
            "model.distcp",
            "__0.distcp",
            "__a_0.distcp",
            "__00_0.distcp",
            "__0_+1.distcp",
            "__0_1.g0.distcp",
            "__0_1.gx.distcp",
            "__0_0.distcp.bak",
            "sub/__0_0.distcp",
            "sub/.metadata",
            ".dcp-1.cbor",
            ".metadata.json",
        ];
        for name in foreign {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
