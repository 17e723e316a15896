//! What is fuzzed: what another rank says about its shards, and the small files of a checkpoint.

#![allow(dead_code, reason = "each fuzz target uses one of them")]

use std::sync::Arc;

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::{Key, PutMode, Storage};
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_megatron::parallel::CachedDistribution;
use dcp_megatron::sharded::{Description, ObjectKey, validate_sharding_integrity};
use dcp_megatron::{CheckpointingConfig, Manifest, MegatronCheckpoint, OpenOptions, Tracked};
use futures_util::FutureExt as _;
use sha2::{Digest as _, Sha256};

/// Reads a description, checks it with itself, and writes it again.
pub(crate) fn shards(bytes: &[u8]) {
    let Ok(description) = Description::from_wire(bytes) else { return };
    drop(validate_sharding_integrity(&[description.clone(), description.clone()]));
    let again = Description::from_wire(&description.to_wire());
    assert_eq!(again.as_ref(), Ok(&description), "what is written comes back");
}

/// What the small files of a checkpoint and a run say, and the names of objects.
pub(crate) fn small_files(bytes: &[u8]) {
    if let Ok(config) = CheckpointingConfig::parse(bytes) {
        let again = CheckpointingConfig::parse(config.to_json().as_bytes()).unwrap();
        assert_eq!(again, config);
    }
    if let Ok(tracked) = Tracked::parse(bytes) {
        assert_eq!(Tracked::parse(tracked.to_string().as_bytes()).unwrap(), tracked);
        assert_eq!(Tracked::of_folder(tracked.folder().unwrap().as_str()), Some(tracked));
    }
    let _ = Manifest::parse(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Some(at) = ObjectKey::parse(&text) {
        assert_eq!(ObjectKey::parse(&at.to_string()), Some(at));
    }
}

/// What a file of a cached distribution says, as it is, and as what its checksum is of. The first
/// bytes are how many shards the ranks have.
pub(crate) fn cached_distribution(bytes: &[u8]) {
    let (lens, bytes) = bytes.split_at(bytes.len().min(3));
    let lens: Vec<usize> = lens.iter().map(|len| usize::from(*len)).collect();
    let sealed = [b"dcpdist1", &*Sha256::digest(bytes), bytes].concat();
    for file in [bytes, &sealed] {
        let Ok(known) = CachedDistribution::parse(file, &lens) else { continue };
        let found: Vec<usize> = known.owned.iter().map(Vec::len).collect();
        assert_eq!(found, lens);
        assert_eq!(CachedDistribution::parse(&known.to_bytes(), &lens).unwrap(), known);
    }
}

/// What a pickle is as the common state of a checkpoint: arguments, layout, content metadata.
pub(crate) fn common_state(bytes: &[u8]) {
    const INDEX: &[u8] = include_bytes!("../../../fixtures/megatron/tp2_basic/ckpt/.metadata");
    const CONFIG: &[u8] = include_bytes!("../../../fixtures/megatron/tp2_basic/ckpt/metadata.json");
    let pickle = Bytes::copy_from_slice(bytes);
    let Ok(common) = ArchiveEncoder::encode(RecordSet::default(), pickle, &[]) else { return };
    let storage = MemoryStorage::new();
    for (name, bytes) in [
        (".metadata", Bytes::from_static(INDEX)),
        ("metadata.json", Bytes::from_static(CONFIG)),
        ("common.pt", common),
    ] {
        let key = Key::new(name).unwrap();
        storage.put(&key, bytes.into(), PutMode::Create).now_or_never().unwrap().unwrap();
    }
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let options = OpenOptions::default().with_tolerant(true);
    let opened = MegatronCheckpoint::open(&storage, &options).now_or_never().unwrap();
    if let Ok(checkpoint) = opened {
        let _ = checkpoint.describe().now_or_never();
        let _ = checkpoint.args();
        let _ = checkpoint.content_metadata();
    }
}
