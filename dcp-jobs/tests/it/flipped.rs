//! Every bit of an archive is looked at by a deep verification, or carries nothing.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_jobs::verify::{VerifyReport, verify};
use dcp_jobs::{JobOptions, Source};
use dcp_testing::key;

use crate::support::{block_on, fixture};

fn u16_at(bytes: &[u8], at: usize) -> usize {
    u16::from_le_bytes([bytes[at], bytes[at + 1]]).into()
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// The bits of an archive at `start` that carry nothing: which program wrote a record, which it
/// needs, and attributes of a record but the one that makes it a folder. PyTorch (2.15) and miniz
/// look at none of them.
fn meaningless(bytes: &[u8], start: usize, end: usize) -> HashSet<usize> {
    let mut bits = HashSet::new();
    let mut bytes_at = |range: std::ops::Range<usize>| bits.extend(range.start * 8..range.end * 8);
    let end_record = end - 22;
    let (entries, directory) = (u16_at(bytes, end_record + 10), u32_at(bytes, end_record + 16));
    let mut at = start + directory;
    for _ in 0..entries {
        let header = start + u32_at(bytes, at + 42);
        bytes_at(at + 4..at + 8);
        bytes_at(at + 36..at + 42);
        bytes_at(header + 4..header + 6);
        at += 46 + u16_at(bytes, at + 28) + u16_at(bytes, at + 30);
    }
    // The zip64 end record.
    bytes_at(at + 12..at + 16);
    let mut at = start + directory;
    for _ in 0..entries {
        bits.remove(&((at + 38) * 8 + 4));
        at += 46 + u16_at(bytes, at + 28) + u16_at(bytes, at + 30);
    }
    bits
}

async fn deep(source: &Source) -> Option<VerifyReport> {
    verify(source, true, &JobOptions::default()).await.ok()
}

/// Flips these bits of `file` and expects that those are reported that mean something.
fn flip_bits(
    storage: Arc<dyn Storage>,
    file: &str,
    meaningless: impl Fn(&[u8]) -> HashSet<usize>,
    flips: impl Fn(usize, &HashSet<usize>) -> bool,
    open: impl Fn(Arc<dyn Storage>) -> Source,
) {
    block_on(async {
        let bytes = storage.read_all(&key(file)).await.unwrap();
        let report = deep(&open(Arc::clone(&storage))).await.unwrap();
        assert!(report.ok, "{report:?}");
        let meaningless = meaningless(&bytes);
        let mut missed = Vec::new();
        for bit in (0..bytes.len() * 8).filter(|bit| flips(*bit, &meaningless)) {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            storage.put(&key(file), flipped.into(), PutMode::Overwrite).await.unwrap();
            let passes = deep(&open(Arc::clone(&storage))).await.is_some_and(|report| report.ok);
            if passes != meaningless.contains(&bit) {
                missed.push((bit / 8, bit % 8, passes));
            }
        }
        assert!(
            missed.is_empty(),
            "{file}: {} bits: {:?}",
            missed.len(),
            &missed[..missed.len().min(40)]
        );
    });
}

#[test]
fn every_bit_of_a_torch_save_file() {
    let path = dcp_testing::fixture("torch_save");
    let bytes = std::fs::read(path.join("kinds/root_list.pt")).unwrap();
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    block_on(storage.put(&key("x.pt"), bytes.into(), PutMode::Create)).unwrap();
    flip_bits(
        storage,
        "x.pt",
        |bytes| meaningless(bytes, 0, bytes.len()),
        |_, _| true,
        |storage| Source::torch_save(storage, key("x.pt")),
    );
}

/// The archives are as in a file of `torch.save`, so two bits of a byte are enough, and all of those
/// in which some carry nothing.
#[test]
fn every_byte_of_a_data_file_of_dcp() {
    const FILE: &str = "__0_0.distcp";
    let storage = fixture("flatten_off_2r");
    let metadata = block_on(Source::dcp(Arc::clone(&storage), false).metadata()).unwrap();
    let items: Vec<_> = metadata
        .iter()
        .flat_map(|(_, entry)| match entry.as_tensor() {
            Some(tensor) => tensor.chunks.iter().map(|chunk| chunk.placement).collect(),
            None => vec![entry.as_object().unwrap().placement],
        })
        .flatten()
        .filter(|place| metadata.file(place.file).is_some_and(|file| file.as_str() == FILE))
        .map(|placement| {
            let start = usize::try_from(placement.byte_offset).unwrap();
            (start, start + usize::try_from(placement.byte_len).unwrap())
        })
        .collect();
    let in_all = |bytes: &[u8]| {
        items.iter().flat_map(|(start, end)| meaningless(bytes, *start, *end)).collect()
    };
    let flips = |bit: usize, meaningless: &HashSet<usize>| {
        let (byte, bit) = (bit / 8, bit % 8);
        (byte * 8..byte * 8 + 8).any(|bit| meaningless.contains(&bit))
            || [byte % 8, (byte + 5) % 8].contains(&bit)
    };
    flip_bits(storage, FILE, in_all, flips, |storage| Source::dcp(storage, true));
}

/// PyTorch (2.15) opens an archive with up to 64 KiB behind it.
#[test]
fn what_follows_an_archive_is_named() {
    let path = dcp_testing::fixture("torch_save");
    let mut bytes = std::fs::read(path.join("kinds/root_list.pt")).unwrap();
    bytes.extend([0; 100]);
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let report = block_on(async {
        storage.put(&key("x.pt"), bytes.into(), PutMode::Create).await.unwrap();
        deep(&Source::torch_save(storage, key("x.pt"))).await.unwrap()
    });
    assert!(report.ok, "{report:?}");
    assert_eq!(report.notes, ["100 bytes follow the end of the archive; PyTorch reads over them"]);
}
