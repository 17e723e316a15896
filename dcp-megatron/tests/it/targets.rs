//! What is fuzzed: what another rank says about its shards, and the small files of a checkpoint.

#![allow(dead_code, reason = "each fuzz target uses one of them")]

use std::sync::Arc;

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::storage::PutMode;
use dcp_core::wire::MessageWriter;
use dcp_core::{Key, Storage};
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_megatron::disk::{CheckpointingConfig, Manifest};
use dcp_megatron::parallel::CachedDistribution;
use dcp_megatron::sharded::{ObjectKey, RankShards, validate_sharding_integrity};
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, Tracked};
use futures_util::FutureExt as _;

/// Reads a description, checks it with itself, and writes it again.
pub(crate) fn shards(bytes: &[u8]) {
    let Ok(description) = RankShards::from_wire(bytes) else { return };
    drop(validate_sharding_integrity(&[description.clone(), description.clone()]));
    let again = RankShards::from_wire(&description.to_wire());
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
    let sealed = [&b"dcpdist1"[..], &dcp_core::digest::sha256(bytes)[..], bytes].concat();
    for file in [bytes, &sealed] {
        let Ok(known) = CachedDistribution::parse(file, &lens) else { continue };
        let found: Vec<usize> = known.owned.iter().map(Vec::len).collect();
        assert_eq!(found, lens);
        assert_eq!(CachedDistribution::parse(&known.to_bytes(), &lens).unwrap(), known);
    }
}

const INDEX: &[u8] = include_bytes!("../../../fixtures/megatron/tp2_basic/ckpt/.metadata");
const CONFIG: &[u8] = include_bytes!("../../../fixtures/megatron/tp2_basic/ckpt/metadata.json");

/// What a pickle is as the common state of a checkpoint: arguments, layout, content metadata.
pub(crate) fn common_state(bytes: &[u8]) {
    let pickle = Bytes::copy_from_slice(bytes);
    let Ok(common) = ArchiveEncoder::encode(RecordSet::default(), pickle, &[]) else { return };
    let Some(checkpoint) = opened([
        (".metadata", Bytes::from_static(INDEX)),
        ("metadata.json", Bytes::from_static(CONFIG)),
        ("common.pt", common),
    ]) else {
        return;
    };
    let _ = checkpoint.describe().now_or_never();
    let _ = checkpoint.args();
    let _ = checkpoint.content_metadata();
}

/// A `.dcp-commit`, and the files that one holds which belongs to the `.metadata`: their lengths
/// are the first two bytes.
pub(crate) fn commit_record(bytes: &[u8]) {
    let (lens, files) = bytes.split_at(bytes.len().min(2));
    let mut rest = files;
    let mut file = |at: usize| {
        let len = lens.get(at).map_or(0, |len| usize::from(*len)).min(rest.len());
        rest.split_off(..len).unwrap_or_default()
    };
    let (json, common) = (file(0), file(1));
    let mut sealed = MessageWriter::new(*b"dmc1");
    sealed.number(1);
    sealed.bytes(&dcp_core::digest::sha256(INDEX));
    sealed.bytes(json);
    for file in [common, rest] {
        sealed.number(u64::from(!file.is_empty()));
        sealed.bytes(file);
    }
    for record in [Bytes::copy_from_slice(bytes), sealed.finish()] {
        let files = [
            (".metadata", Bytes::from_static(INDEX)),
            ("metadata.json", Bytes::from_static(CONFIG)),
            (".dcp-commit", record),
        ];
        if let Some(checkpoint) = opened(files) {
            let _ = checkpoint.content_metadata();
        }
    }
}

/// The checkpoint of these files, if they are one.
fn opened<const N: usize>(files: [(&str, Bytes); N]) -> Option<MegatronCheckpoint> {
    let storage = MemoryStorage::new();
    for (name, bytes) in files {
        let key = Key::new(name).unwrap();
        storage.put(&key, bytes.into(), PutMode::Create).now_or_never().unwrap().unwrap();
    }
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let options = MegatronOpenOptions::default().with_tolerant(true);
    MegatronCheckpoint::open(&storage, &options).now_or_never().unwrap().ok()
}
