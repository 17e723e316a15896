//! Compares what a job has read in parts, when it has read everything, by one process or several.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use async_trait::async_trait;
use bytes::Bytes;
use crc32fast::Hasher;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, PlanError};
use dcp_formats::CrcParts;

use crate::integrity::incremental_crc::{Checked, Chunk, Wanted};
use crate::integrity::refuse_damaged::refuse_damaged;
use crate::options::JobOptions;
use crate::source::Comparison;

const MAGIC: [u8; 4] = *b"dcs1";

/// Chunks by entry and position.
type Chunks = BTreeMap<(u32, u32), Chunk>;

#[async_trait]
impl Comparison for Checked {
    /// Reads again and compares the chunks that were read in full, but in parts that are not
    /// contiguous, and those of which the job has no use for a small rest, such as padding. In a group, the parts that all ranks have read count together, and each rank
    /// compares a share of the chunks.
    async fn settle(&self, options: &JobOptions) -> Result<(), CheckpointError> {
        let metadata = self.source.metadata().await?;
        let mut chunks: Chunks = {
            let chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
            chunks.iter().map(|(at, chunk)| (*at, chunk.clone())).collect()
        };
        if let Some(group) = &options.group {
            let mut all = Chunks::new();
            for message in group.all_gather(encode(&chunks)).await? {
                decode(&message, &mut all)?;
            }
            chunks = all;
        }
        let (mut whole, mut items, mut compared) = (Vec::new(), Vec::new(), Vec::new());
        for ((entry, chunk), state) in &chunks {
            let Some(wanted) = Wanted::new(&metadata, *entry, *chunk) else { continue };
            let (bytes, crc32) = match state {
                Chunk::Right => continue,
                Chunk::Parts(parts) => (parts.byte_len(), parts.whole(wanted.byte_len)),
                Chunk::Scattered(bytes) => (*bytes, None),
            };
            match crc32 {
                Some(crc32) => whole.push((wanted, crc32)),
                // All but padding, which no tensor has.
                None if bytes > 0 && bytes >= wanted.byte_len - wanted.byte_len / 8 => {
                    items.push(wanted.placed);
                }
                // The job reads only a part of it.
                None => continue,
            }
            compared.push((*entry, *chunk));
        }
        items.sort_by_key(|item| (item.placement.file, item.placement.byte_offset));
        if let Some(group) = &options.group {
            let chunks = vec![1; whole.len()];
            whole = take(whole, group.share(&chunks));
            let byte_lens: Vec<_> = items.iter().map(|item| item.placement.byte_len).collect();
            items = take(items, group.share(&byte_lens));
        }
        for (wanted, crc32) in whole {
            if !self.compare_whole(&metadata, &wanted, crc32).await? {
                items.push(wanted.placed);
            }
        }
        refuse_damaged(&self.source, &metadata, &items, options).await?;
        let mut known = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(compared.into_iter().map(|at| (at, Chunk::Right)));
        Ok(())
    }
}

fn take<T>(items: Vec<T>, share: std::ops::Range<usize>) -> Vec<T> {
    items.into_iter().take(share.end).skip(share.start).collect()
}

/// Encodes the reads of this rank of chunks that it has not compared.
fn encode(chunks: &Chunks) -> Bytes {
    let mut out = MessageWriter::new(MAGIC);
    for ((entry, chunk), state) in chunks {
        match state {
            Chunk::Right => continue,
            // A count of 0 is that of scattered bytes.
            Chunk::Parts(parts) if parts.is_empty() => continue,
            _ => {}
        }
        out.number((*entry).into());
        out.number((*chunk).into());
        match state {
            Chunk::Right => {}
            Chunk::Scattered(bytes) => {
                out.number(0);
                out.number(*bytes);
            }
            Chunk::Parts(parts) => {
                out.number(parts.len() as u64);
                for (start, end, crc32) in parts.iter() {
                    out.number(start);
                    out.number(end);
                    out.number(crc32.into());
                }
            }
        }
    }
    out.finish()
}

/// Adds what a rank has read.
fn decode(message: &[u8], all: &mut Chunks) -> Result<(), PlanError> {
    let mut input = MessageReader::new(message, MAGIC)?;
    let bad = || PlanError::message("the checksums of a rank", "a number is too large");
    while input.remaining() > 0 {
        let mut number = || u32::try_from(input.number()?).map_err(|_| bad());
        let at = (number()?, number()?);
        let state = all.entry(at).or_insert_with(|| Chunk::Parts(CrcParts::new()));
        match input.number()? {
            0 => scatter(state, input.number()?),
            count => {
                for _ in 0..count {
                    let (start, end) = (input.number()?, input.number()?);
                    let crc32 = u32::try_from(input.number()?).map_err(|_| bad())?;
                    add(state, start, end, crc32);
                }
            }
        }
    }
    input.finish()
}

fn add(state: &mut Chunk, start: u64, end: u64, crc32: u32) {
    let byte_len = end.saturating_sub(start);
    let hasher = Hasher::new_with_initial_len(crc32, byte_len);
    let added = match state {
        Chunk::Parts(parts) => byte_len > 0 && parts.add(start, end, hasher),
        _ => false,
    };
    if !added {
        scatter(state, byte_len);
    }
}

/// Counts bytes that cannot be combined with others.
fn scatter(state: &mut Chunk, bytes: u64) {
    let before = match state {
        Chunk::Parts(parts) => parts.byte_len(),
        Chunk::Scattered(bytes) => *bytes,
        Chunk::Right => 0,
    };
    *state = Chunk::Scattered(before.saturating_add(bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(bytes: &[u8], ranges: &[(usize, usize)]) -> Chunk {
        let mut parts = CrcParts::new();
        for (start, end) in ranges {
            let mut hasher = Hasher::new();
            hasher.update(&bytes[*start..*end]);
            assert!(parts.add(*start as u64, *end as u64, hasher));
        }
        Chunk::Parts(parts)
    }

    #[test]
    fn parts_of_several_ranks_make_the_checksum_of_a_chunk() {
        let bytes: Vec<u8> = (0..200).collect();
        let ranks = [
            Chunks::from([((0, 0), parts(&bytes, &[(0, 50), (120, 130)])), ((3, 1), Chunk::Right)]),
            Chunks::from([((0, 0), parts(&bytes, &[(50, 120)])), ((1, 7), Chunk::Scattered(9))]),
            Chunks::from([
                ((0, 0), parts(&bytes, &[(130, 200)])),
                ((1, 7), parts(&bytes, &[(0, 3)])),
            ]),
        ];
        let mut all = Chunks::new();
        for rank in &ranks {
            decode(&encode(rank), &mut all).unwrap();
        }
        let Chunk::Parts(whole) = &all[&(0, 0)] else { panic!("{all:?}") };
        assert_eq!(whole.whole(200), Some(crc32fast::hash(&bytes)));
        assert!(matches!(all[&(1, 7)], Chunk::Scattered(12)), "{all:?}");
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn a_chunk_without_parts_does_not_change_what_follows() {
        let rank = Chunks::from([
            ((0, 0), Chunk::Parts(CrcParts::new())),
            ((1, 7), Chunk::Scattered(9)),
            ((2, 0), parts(&[7; 8], &[(0, 8)])),
        ]);
        let mut all = Chunks::new();
        decode(&encode(&rank), &mut all).unwrap();
        assert!(matches!(all[&(1, 7)], Chunk::Scattered(9)), "{all:?}");
        assert!(matches!(&all[&(2, 0)], Chunk::Parts(parts) if parts.len() == 1), "{all:?}");
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn what_two_ranks_have_read_is_compared_by_reading_it_again() {
        let bytes = [7; 64];
        let rank = Chunks::from([((0, 0), parts(&bytes, &[(0, 40)]))]);
        let mut all = Chunks::new();
        decode(&encode(&rank), &mut all).unwrap();
        decode(&encode(&rank), &mut all).unwrap();
        assert!(matches!(all[&(0, 0)], Chunk::Scattered(80)), "{all:?}");
    }
}
