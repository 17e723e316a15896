//! Rewriting the index alone: contents stay, the sidecar stays valid, failures change nothing.

use std::sync::Arc;

use dcp_conformance::{Fault, FaultStorage};
use dcp_core::storage::{PutMode, StorageExt};
use dcp_core::{Storage, StorageErrorKind};
use dcp_formats::dcp::DcpReader;
use dcp_formats::metadata::{Profile, ProfileChoice};
use dcp_jobs::inspect::inspect;
use dcp_jobs::verify::verify;
use dcp_jobs::write::rewrite_metadata;
use dcp_jobs::{JobOptions, Source};
use dcp_testing::key;
use futures_util::StreamExt;

use crate::support::{block_on, fixture};

const OLMO: [&str; 5] = [
    "../olmo/any-4rank/ckpt",
    "../olmo/ddp-2rank-nested/ckpt",
    "../olmo/fsdp2-2rank-bf16-modelonly/ckpt",
    "../olmo/fsdp2-2rank-flat/ckpt",
    "../olmo/fsdp2-2rank-nested/ckpt",
];

fn metadata_of(storage: &Arc<dyn Storage>) -> Vec<u8> {
    block_on(storage.read_all(&key(".metadata"))).unwrap().to_vec()
}

fn profile_of(storage: &Arc<dyn Storage>) -> Profile {
    Profile::of(&metadata_of(storage)).unwrap()
}

fn names(storage: &Arc<dyn Storage>) -> Vec<String> {
    let all = block_on(storage.list(None).collect::<Vec<_>>());
    let mut names: Vec<_> = all.into_iter().map(|meta| meta.unwrap().key.to_string()).collect();
    names.sort();
    names
}

/// Everything that the index says and every object, as JSON.
fn contents(storage: &Arc<dyn Storage>) -> serde_json::Value {
    let source = Source::dcp(Arc::clone(storage), false);
    let summary = block_on(inspect(&source, &JobOptions::default(), |_| true)).unwrap();
    serde_json::json!({ "keys": summary.keys, "files": summary.files, "paths": summary.paths })
}

fn rewrite(storage: &Arc<dyn Storage>, choice: ProfileChoice) -> dcp_jobs::write::MetadataRewrite {
    block_on(rewrite_metadata(storage, choice, false)).unwrap()
}

#[test]
fn olmo_to_torch_and_back_changes_the_form_and_nothing_else() {
    for name in OLMO {
        let storage = fixture(name);
        let (before, files) = (contents(&storage), names(&storage));
        let report = rewrite(&storage, ProfileChoice::Torch);
        assert!(report.changed && !report.sidecar, "{name}: {report:?}");
        assert_eq!((report.from, report.to), ("olmo-torch2.15", "compat"));
        // Strides of a rank's memory, and the ids of the save.
        assert_eq!(report.dropped.len(), 3, "{name}: {:?}", report.dropped);
        assert_eq!(profile_of(&storage), Profile::Compat, "{name}");
        assert_eq!((contents(&storage), names(&storage)), (before.clone(), files.clone()));
        let source = Source::dcp(Arc::clone(&storage), false);
        let verified = block_on(verify(&source, true, &JobOptions::default())).unwrap();
        assert!(verified.ok, "{name}: {verified:?}");

        let report = rewrite(&storage, ProfileChoice::Olmo);
        assert_eq!((report.from, report.to), ("compat", "olmo"));
        assert_eq!(report.dropped, Vec::<String>::new());
        assert_eq!((contents(&storage), names(&storage)), (before, files), "{name}");
    }
}

#[test]
fn every_profile_from_every_other_one() {
    for from in Profile::ALL {
        for to in Profile::ALL {
            let storage = fixture(OLMO[0]);
            let before = contents(&storage);
            rewrite(&storage, ProfileChoice::Exactly(from));
            let report = rewrite(&storage, ProfileChoice::Exactly(to));
            assert_eq!((report.from, report.to), (from.name(), to.name()));
            assert_eq!(report.changed, from != to);
            assert_eq!((profile_of(&storage), contents(&storage)), (to, before.clone()));
        }
    }
}

#[test]
fn what_serves_already_is_left_alone() {
    for (name, choice) in [
        (OLMO[0], ProfileChoice::Olmo),
        ("t24_plain", ProfileChoice::Torch),
        ("fsdp2_adam_2r", ProfileChoice::Torch),
        ("t21_plain", ProfileChoice::Exactly(Profile::Compat)),
    ] {
        let storage = fixture(name);
        let before = metadata_of(&storage);
        let report = rewrite(&storage, choice);
        assert!(!report.changed && report.from == report.to, "{name}: {report:?}");
        assert_eq!(metadata_of(&storage), before, "{name}");
    }
}

#[test]
fn a_dry_run_tells_and_writes_nothing() {
    let storage = fixture(OLMO[4]);
    let before = metadata_of(&storage);
    let planned = block_on(rewrite_metadata(&storage, ProfileChoice::Torch, true)).unwrap();
    assert_eq!(metadata_of(&storage), before);
    let done = rewrite(&storage, ProfileChoice::Torch);
    assert!(planned.dry_run && !done.dry_run);
    assert_eq!((planned.bytes_after, planned.dropped), (done.bytes_after, done.dropped));
    assert_eq!(metadata_of(&storage).len() as u64, done.bytes_after);
}

/// A checkpoint that has a sidecar.
fn with_sidecar() -> Arc<dyn Storage> {
    let source = Source::dcp(fixture("fsdp2_adam_2r"), false);
    let storage: Arc<dyn Storage> = Arc::new(dcp_conformance::MemoryStorage::new());
    let writer = dcp_formats::dcp::DcpWriter::new(Arc::clone(&storage));
    block_on(dcp_jobs::reshard::reshard(&source, &writer, 2, &JobOptions::default())).unwrap();
    storage
}

#[test]
fn the_sidecar_goes_on_to_belong_to_the_checkpoint() {
    let storage = with_sidecar();
    let sidecar = |storage: &Arc<dyn Storage>| {
        block_on(DcpReader::new(Arc::clone(storage)).sidecar()).unwrap()
    };
    let (before, files) = (sidecar(&storage).unwrap(), names(&storage));
    let report = rewrite(&storage, ProfileChoice::Olmo);
    assert!(report.sidecar);
    let after = sidecar(&storage).unwrap();
    assert_ne!(before.metadata_crc32, after.metadata_crc32);
    assert_eq!((before.files, before.world_size), (after.files, after.world_size));
    assert_eq!(names(&storage).len(), files.len(), "the old sidecar is gone");
}

#[test]
fn a_damaged_sidecar_is_not_carried_over() {
    let storage = with_sidecar();
    let name = names(&storage).into_iter().find(|name| name.ends_with(".cbor")).unwrap();
    let name = key(&name);
    block_on(storage.put(&name, b"?".to_vec().into(), PutMode::Overwrite)).unwrap();
    assert!(!rewrite(&storage, ProfileChoice::Olmo).sidecar);
    assert!(names(&storage).iter().all(|name| !name.ends_with(".cbor")));
}

#[test]
fn what_cannot_be_expressed_is_refused_by_name() {
    let storage = fixture("zstd_2r");
    let before = metadata_of(&storage);
    let error = block_on(rewrite_metadata(&storage, ProfileChoice::Olmo, false)).unwrap_err();
    assert!(error.to_string().contains("stream.zstd"), "{error}");
    assert_eq!(metadata_of(&storage), before);
    let empty: Arc<dyn Storage> = Arc::new(dcp_conformance::MemoryStorage::new());
    let error = block_on(rewrite_metadata(&empty, ProfileChoice::Olmo, false)).unwrap_err();
    assert!(error.to_string().contains("is empty"), "{error}");
    let rank_local = fixture("no_collectives_2r");
    let error = block_on(rewrite_metadata(&rank_local, ProfileChoice::Olmo, false)).unwrap_err();
    assert!(error.to_string().contains("without collectives"), "{error}");
}

/// Whatever fails, there is a whole checkpoint, and nothing but its files.
#[test]
fn a_failure_at_any_step_leaves_the_old_one_or_the_new_one() {
    let mut failed = 0;
    let kinds = [StorageErrorKind::Other, StorageErrorKind::Transient];
    let faults = kinds.map(Fault::Fail).into_iter().chain([Fault::LoseReply]);
    for fault in faults {
        for operation in 1.. {
            let storage = with_sidecar();
            let before = metadata_of(&storage);
            let faulty = FaultStorage::new(Arc::clone(&storage)).fault(operation, fault);
            let place: Arc<dyn Storage> = Arc::new(faulty.clone());
            let result = block_on(rewrite_metadata(&place, ProfileChoice::Olmo, false));
            if faulty.operations() < operation {
                assert!(result.unwrap().sidecar);
                assert!(operation > 6);
                break;
            }
            let replaced = metadata_of(&storage) != before;
            assert!(result.is_err() || replaced, "{fault:?} at {operation}");
            failed += usize::from(result.is_err());
            assert_eq!(profile_of(&storage).is_olmo(), replaced);
            let reader = DcpReader::new(Arc::clone(&storage));
            let sidecar = block_on(reader.sidecar()).unwrap();
            assert!(sidecar.is_some(), "{fault:?} at {operation}: {:?}", names(&storage));
        }
    }
    assert!(failed >= 10, "{failed}");
}
