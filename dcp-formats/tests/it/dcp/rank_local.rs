//! Saves without collectives by real PyTorch, whose ranks differ, or of which an earlier one left
//! files.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{Storage, StorageReader as _};
use dcp_formats::dcp::DcpReader;

use crate::dcp::damage::format_error;
use crate::harness::{Loaded, block_on, delete, fixture, get, load_with, put};

fn rank_local(name: &str) -> Arc<MemoryStorage> {
    fixture(&format!("../rank_local/{name}"))
}

/// The names that differ, each with the ranks that have the same.
fn differing(storage: Arc<dyn Storage>) -> Vec<(String, Vec<Vec<u32>>)> {
    let found = block_on(DcpReader::new(storage).differing()).unwrap();
    found.iter().map(|one| (one.fqn.to_string(), one.groups.to_vec())).collect()
}

fn of_rank(storage: &Arc<MemoryStorage>, rank: u32) -> DcpReader {
    DcpReader::builder(Arc::clone(storage) as _).rank(rank).build()
}

#[test]
fn what_differs_between_ranks_is_named_and_each_rank_can_be_chosen() {
    let storage = rank_local("differ");
    let tolerant = DcpReader::builder(Arc::clone(&storage) as _).tolerant(true).build();
    let mut names: Vec<_> =
        block_on(tolerant.differing()).unwrap().iter().map(|one| one.fqn.to_string()).collect();
    names.sort();
    assert_eq!(names, ["buffer", "cursor", "state"]);
    // Tensors of different shapes are not read without a choice.
    let error = format_error(Arc::clone(&storage) as _);
    assert_eq!(error.file(), Some("__1.metadata"));
    assert!(error.problem().contains("\"cursor\" is not the same tensor"), "{error}");
    for rank in 0..2_u8 {
        let loaded = load_with(&of_rank(&storage, rank.into())).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let bytes = loaded.tensors[name].to_vec().unwrap();
            bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
        };
        assert_eq!(floats("same"), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(floats("buffer")[0], f32::from(rank));
        assert_eq!(loaded.tensors["cursor"].shape()[0], 3 + u64::from(rank));
        assert_eq!(loaded.warnings.len(), 1, "{:?}", loaded.warnings);
        assert!(loaded.warnings[0].contains(&format!("what rank {rank} has is used")));
        let other = load_with(&of_rank(&storage, 1 - u32::from(rank))).unwrap();
        let state = |loaded: &Loaded| loaded.objects["state"].clone();
        assert!(!state(&loaded).same(&state(&other)));
    }
}

#[test]
fn one_byte_of_a_replica_makes_a_difference() {
    let storage = fixture("no_collectives_2r");
    let found = vec![("per_rank".to_owned(), vec![vec![0], vec![1]])];
    assert_eq!(differing(Arc::clone(&storage) as _), found);
    let metadata = block_on(DcpReader::new(Arc::clone(&storage) as _).metadata()).unwrap();
    let tensor = metadata.get("rep").unwrap().as_tensor().unwrap();
    let placement = tensor.chunks.get(0).unwrap().placement.unwrap();
    // The checksums of the archive decide, not its elements.
    let mut bytes = get(&*storage, "__0_0.distcp").to_vec();
    let start = usize::try_from(placement.byte_offset).unwrap();
    let end = start + usize::try_from(placement.byte_len).unwrap();
    let name = b"archive/data/0";
    let entry = bytes[start..end].windows(name.len()).rposition(|window| window == name).unwrap();
    let crc32 = start + entry - 46 + 16;
    bytes[crc32] ^= 1;
    put(&*storage, "__0_0.distcp", bytes);
    let names: Vec<_> = differing(storage).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["rep", "per_rank"]);
}

#[test]
fn what_an_earlier_save_of_more_ranks_left_is_named() {
    let storage = rank_local("stale_sharded");
    let stale = "__2.metadata, __3.metadata are left from an earlier save of more ranks";
    let error = format_error(Arc::clone(&storage) as _);
    assert!(error.problem().contains(stale), "{error}");
    for rank in [0, 3] {
        let reader = of_rank(&storage, rank);
        assert!(block_on(reader.metadata()).is_err());
    }
    let tolerant = DcpReader::builder(Arc::clone(&storage) as _).tolerant(true).build();
    let warnings = block_on(tolerant.rank_warnings()).unwrap();
    assert!(warnings.iter().any(|warning| warning.contains(stale)), "{warnings:?}");
    delete(&*storage, "__3.metadata");
    assert!(format_error(Arc::clone(&storage) as _).problem().contains("__2.metadata is left"));
    delete(&*storage, "__2.metadata");
    // Data of a rank without an index is that of a rank whose index is lost.
    let lost = load_with(&DcpReader::new(storage.clone())).unwrap().warnings;
    assert_eq!(lost, ["the metadata of rank 2 is missing: what only it had is lost"]);
    ["__2_0.distcp", "__3_0.distcp"].iter().for_each(|file| delete(&*storage, file));
    assert_eq!(load_with(&DcpReader::new(storage)).unwrap().warnings, [""; 0]);

    // Replicas alone do not show which of them are older.
    let storage = rank_local("stale_replicated");
    let groups = vec![vec![0, 1], vec![2, 3]];
    let found = vec![("w".to_owned(), groups.clone()), ("step".to_owned(), groups)];
    assert_eq!(differing(Arc::clone(&storage) as _), found);
    let warnings = block_on(DcpReader::new(storage).rank_warnings()).unwrap();
    assert!(warnings[0].contains("ranks below 2 agree"), "{warnings:?}");
}
