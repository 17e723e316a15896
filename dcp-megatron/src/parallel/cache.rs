//! Distributions cached on disk: a restarted job needs no exchange of inventories.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::digest::sha256;
use dcp_core::error::error_chain;
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{FormatError, Key, Payload, Rank, Storage, StorageError, StorageErrorKind};

use super::inventory::{Fingerprint, pack, unpack};

/// The first bytes of a file; the number changes with the form.
const MAGIC: &[u8; 8] = b"dcpdist1";
/// 4096 ranks with 100 000 shards each have 50 MiB of bits.
const BYTES_MAX: u64 = 1 << 30;

/// A file for each group: what begins it, a checksum of the rest, the fingerprint of what the group
/// held, and for each rank, how many shards it has and which of them it owns, a bit each.
///
/// A file that cannot be read, is damaged, or is of another structure counts for nothing: a warning
/// says so, and the next distribution replaces it.
#[derive(Clone, Debug)]
pub(super) struct DiskCache {
    storage: Arc<dyn Storage>,
}

impl DiskCache {
    pub(super) fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// Reads the shards that each rank owns, if the file is of exactly this group: by the
    /// fingerprint of all that they depend on, and the number of shards of each rank.
    pub(super) async fn read(
        &self,
        first_rank: Rank,
        group: &Fingerprint,
        lens: &[usize],
    ) -> Option<Vec<Vec<bool>>> {
        let key = file(first_rank).ok()?;
        let ignored = |why: &str| {
            tracing::warn!(file = %key, "cached distribution is not used: {why}");
        };
        let bytes = match self.bytes(&key).await {
            Ok(bytes) => bytes?,
            Err(error) => {
                ignored(&error_chain(&error));
                return None;
            }
        };
        match CachedDistribution::parse(&bytes, lens) {
            Err(error) => ignored(error.problem()),
            Ok(known) if known.group != *group => ignored("the ranks hold other shards by now"),
            Ok(known) => return Some(known.owned),
        }
        None
    }

    async fn bytes(&self, key: &Key) -> Result<Option<Bytes>, StorageError> {
        let meta = match self.storage.stat(key).await {
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        // A file of that length is none of ours; its few first bytes say so.
        let len = if meta.byte_len > BYTES_MAX { 0 } else { meta.byte_len };
        self.storage.read_range(key, 0..len).await.map(Some)
    }

    /// Replaces the file of the group, atomically. When that fails, there is none to speak of.
    pub(super) async fn write(&self, first_rank: Rank, group: &Fingerprint, owned: &[Vec<bool>]) {
        let written = match file(first_rank) {
            Ok(key) => {
                let known = CachedDistribution { group: *group, owned: owned.to_vec() };
                let bytes = Payload::from(known.to_bytes());
                self.storage.put(&key, bytes, PutMode::Overwrite).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            tracing::warn!(error = error_chain(&error), "distribution was not cached");
        }
    }
}

fn file(first_rank: Rank) -> Result<Key, StorageError> {
    Ok(Key::new(format!("distribution_{first_rank:05}.dcp"))?)
}

/// The content of a group's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedDistribution {
    /// The fingerprint of all that the distribution depends on.
    pub group: [u8; 16],
    /// By rank and shard, whether the rank writes the shard.
    pub owned: Vec<Vec<bool>>,
}

impl CachedDistribution {
    /// Reads a file, of a group whose ranks have so many shards each.
    ///
    /// # Errors
    ///
    /// When the file is of another version, is damaged, or is of other ranks.
    pub fn parse(bytes: &[u8], lens: &[usize]) -> Result<Self, FormatError> {
        let bad = |problem: &str| FormatError::new("cached distribution", problem);
        let damaged = || bad("it is damaged");
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| bad("it is of another version"))?;
        let (sum, body) = rest.split_first_chunk::<32>().ok_or_else(damaged)?;
        if sha256(body) != *sum {
            return Err(damaged());
        }
        let (group, columns) = body.split_first_chunk().ok_or_else(damaged)?;
        let owned = ranks(columns, lens).ok_or_else(|| bad("it is not of these ranks"))?;
        Ok(Self { group: *group, owned })
    }

    /// The file.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        let mut body = self.group.to_vec();
        for owned in &self.owned {
            body.extend_from_slice(&(owned.len() as u64).to_le_bytes());
            body.extend(pack(owned));
        }
        [&MAGIC[..], &sha256(&body), &body].concat().into()
    }
}

fn ranks(mut columns: &[u8], lens: &[usize]) -> Option<Vec<Vec<bool>>> {
    let mut owned = Vec::with_capacity(lens.len());
    for &expected in lens {
        let (len, rest) = columns.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        if len != expected {
            return None;
        }
        let (bits, rest) = rest.split_at_checked(len.div_ceil(8))?;
        columns = rest;
        owned.push(unpack(bits, len)?);
    }
    columns.is_empty().then_some(owned)
}

#[cfg(test)]
mod tests {
    use dcp_conformance::MemoryStorage;

    use super::*;

    fn cache() -> DiskCache {
        DiskCache::new(Arc::new(MemoryStorage::new()))
    }

    #[tokio::test]
    async fn what_was_written_is_found_by_the_same_group_only() {
        let (cache, group) = (cache(), [7; 16]);
        let owned = vec![vec![true, false, true], vec![], vec![false; 9]];
        assert_eq!(cache.read(4, &group, &[3, 0, 9]).await, None, "there is none yet");
        cache.write(4, &group, &owned).await;
        assert_eq!(cache.read(4, &group, &[3, 0, 9]).await, Some(owned.clone()));
        assert_eq!(cache.read(5, &group, &[3, 0, 9]).await, None, "another group's file");
        assert_eq!(cache.read(4, &[8; 16], &[3, 0, 9]).await, None, "another structure");
        for lens in [&[3, 0][..], &[3, 0, 8], &[3, 0, 9, 0]] {
            assert_eq!(cache.read(4, &group, lens).await, None, "{lens:?}");
        }
        let turned: Vec<_> = owned.into_iter().rev().collect();
        cache.write(4, &group, &turned).await;
        assert_eq!(cache.read(4, &group, &[9, 0, 3]).await, Some(turned));
    }

    #[tokio::test]
    async fn damage_of_any_byte_is_noticed() {
        let (cache, group) = (cache(), [7; 16]);
        cache.write(0, &group, &[vec![true, false], vec![false, true]]).await;
        let key = file(0).unwrap();
        let whole = cache.storage.read_all(&key).await.unwrap();
        let put = async |bytes: Vec<u8>| {
            cache.storage.put(&key, bytes.into(), PutMode::Overwrite).await.unwrap();
        };
        for at in 0..whole.len() {
            let mut bytes = whole.to_vec();
            bytes[at] ^= 4;
            put(bytes).await;
            assert_eq!(cache.read(0, &group, &[2, 2]).await, None, "byte {at}");
            put(whole[..at].to_vec()).await;
            assert_eq!(cache.read(0, &group, &[2, 2]).await, None, "{at} bytes");
        }
        put(whole.to_vec()).await;
        assert!(cache.read(0, &group, &[2, 2]).await.is_some());
    }
}
