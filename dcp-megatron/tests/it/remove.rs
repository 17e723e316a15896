//! Tensors go, and whatever happens the rest stays.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
use dcp_core::{Storage, StorageErrorKind};
use dcp_jobs::JobOptions;
use dcp_megatron::disk::{TRACKER, verify_integrity, write_integrity};
use dcp_megatron::jobs::remove_sharded_tensors;
use dcp_megatron::{MegatronCheckpoint, MegatronError, MegatronOpenOptions, MegatronRun, Tracked};

use crate::support::{block_on, expected_tensors, get, names, put, remove, stored};

#[test]
fn the_optimizer_of_a_hinted_checkpoint_takes_its_files_with_it() {
    let storage = stored("gpt_separation_hint");
    let removed = block_on(remove_sharded_tensors(&storage, "optimizer.")).unwrap();
    let files: Vec<_> = removed.files.iter().map(ToString::to_string).collect();
    assert_eq!(files, ["optimizer.__0_2.distcp", "optimizer.__0_3.distcp"]);
    assert!(!names(&*storage).iter().any(|name| name.starts_with("optimizer.")));
    let left =
        block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
    let metadata = block_on(left.source().metadata()).unwrap();
    for (key, (_, bytes)) in expected_tensors("gpt_separation_hint") {
        assert_eq!(metadata.get(&key).is_none(), key.starts_with("optimizer."), "{key}");
        if !key.starts_with("optimizer.") {
            let found = block_on(dcp_jobs::get::find(left.source(), &key, None)).unwrap();
            let dcp_jobs::get::Found::Tensor(found) = found else { panic!() };
            assert_eq!(block_on(found.read()).unwrap(), bytes, "{key}");
        }
    }
    assert!(!left.common().is_empty());
}

#[test]
fn files_that_others_need_stay_and_the_manifest_is_written_again() {
    let storage = stored("head020_basic_integrity");
    let before = names(&*storage);
    let removed = block_on(remove_sharded_tensors(&storage, "col.")).unwrap();
    assert!(!removed.entries.is_empty());
    assert_eq!(removed.files, []);
    assert_eq!(names(&*storage), before);
    let problems = block_on(verify_integrity(&storage, &JobOptions::default())).unwrap();
    assert_eq!(problems, Some(Vec::new()));
    // The common state is no tensor, whatever it is called.
    let removed = block_on(remove_sharded_tensors(&storage, "")).unwrap();
    assert!(!removed.entries.is_empty());
    let left =
        block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default())).unwrap();
    assert!(!left.common().is_empty());
}

#[test]
fn nothing_to_remove_changes_nothing() {
    let storage = stored("tp2_basic");
    let before = get(&*storage, ".metadata");
    let removed = block_on(remove_sharded_tensors(&storage, "nothing.")).unwrap();
    assert_eq!((removed.entries, removed.files), (Vec::new(), Vec::new()));
    assert_eq!(get(&*storage, ".metadata"), before);
}

#[test]
fn flattened_tensors_and_arrays_are_not_taken_apart() {
    let flattened = stored("v015_flattened");
    let before = get(&*flattened, ".metadata");
    let error = block_on(remove_sharded_tensors(&flattened, "w.")).unwrap_err().to_string();
    assert!(error.contains("saved flattened"), "{error}");
    assert_eq!(get(&*flattened, ".metadata"), before);
    let error = block_on(remove_sharded_tensors(&stored("v06_zarr"), "col.")).unwrap_err();
    assert!(error.to_string().contains("torch_dist only"), "{error}");
}

/// Nothing is removed of a checkpoint that was not named: neither of the one that the tracker of a
/// run names, nor of another that is there instead.
#[test]
fn of_a_run_no_checkpoint_is_chosen_to_remove_from() {
    let hinted = stored("gpt_separation_hint");
    let run: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    for name in names(&*hinted) {
        put(&*run, &format!("iter_0000010/{name}"), get(&*hinted, &name).unwrap());
    }
    let before = names(&*run);
    for (tracker, folder) in [("", "iter_0000010"), ("10", "iter_0000010"), ("20", "iter_0000020")]
    {
        if !tracker.is_empty() {
            put(&*run, TRACKER, tracker.into());
        }
        let error = block_on(remove_sharded_tensors(&run, "optimizer.")).unwrap_err();
        assert!(error.to_string().contains(folder), "{tracker}: {error}");
        assert!(matches!(error, MegatronError::FolderOfRun { .. }), "{error}");
    }
    remove(&*run, TRACKER);
    assert_eq!(names(&*run), before);
    let folder = MegatronRun::new(run).checkpoint(Tracked::Iteration(10)).unwrap();
    let removed = block_on(remove_sharded_tensors(&folder, "optimizer.")).unwrap();
    assert!(!removed.entries.is_empty());
}

/// An operation fails at every one of them in turn: what is left has a manifest, and a removal that
/// was done is no error.
#[test]
fn a_removal_that_fails_leaves_the_manifest_it_found() {
    let before = stored("head020_basic_integrity");
    let (index, manifest) = (get(&*before, ".metadata"), get(&*before, "integrity.json"));
    for n in 1.. {
        let storage = stored("head020_basic_integrity");
        let fault = Fault::Fail(StorageErrorKind::Full);
        let failing = Arc::new(FaultStorage::new(Arc::clone(&storage)).fault(n, fault));
        let as_storage: Arc<dyn Storage> = Arc::clone(&failing) as _;
        let outcome = block_on(remove_sharded_tensors(&as_storage, "col."));
        let (now, kept) = (get(&*storage, ".metadata"), get(&*storage, "integrity.json"));
        match outcome {
            Err(_) => assert!(now == index && kept == manifest, "failed at operation {n}"),
            Ok(removed) => {
                assert!(now != index, "failed at operation {n}");
                assert_eq!(removed.warnings.is_empty(), kept.is_some(), "operation {n}");
            }
        }
        if failing.operations() < n {
            break;
        }
    }
}

/// A process dies at every one of its operations in turn: what is left opens, and is the old
/// checkpoint or the new one; a manifest that is there is right.
#[test]
fn a_removal_that_dies_leaves_the_old_checkpoint_or_the_new_one() {
    let entries = |storage: &Arc<dyn Storage>| {
        let opened = block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default()));
        let opened = opened.unwrap();
        block_on(dcp_jobs::verify::verify(opened.raw().unwrap(), true, &JobOptions::default()))
            .map(|report| assert_eq!(report.problems, []))
            .unwrap();
        block_on(opened.source().metadata()).unwrap().len()
    };
    let mut seen = BTreeSet::new();
    for operations in 0.. {
        let storage = stored("gpt_separation_hint");
        block_on(write_integrity(&storage)).unwrap();
        let dying = Arc::new(FaultStorage::new(Arc::clone(&storage)).dying_after(operations));
        let as_storage: Arc<dyn Storage> = Arc::clone(&dying) as _;
        let outcome = block_on(remove_sharded_tensors(&as_storage, "optimizer."));
        seen.insert(entries(&storage));
        let manifest = block_on(verify_integrity(&storage, &JobOptions::default())).unwrap();
        assert!(manifest.is_none_or(|problems| problems.is_empty()), "after {operations}");
        if outcome.is_ok() && !dying.is_dead() {
            break;
        }
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn a_manifest_tells_what_changed() {
    let storage: Arc<dyn Storage> = stored("tp2_basic");
    let check = || block_on(verify_integrity(&storage, &JobOptions::default())).unwrap();
    assert_eq!(check(), None);
    block_on(write_integrity(&storage)).unwrap();
    assert_eq!(check(), Some(Vec::new()));
    let mut bytes = get(&*storage, "__0_0.distcp").unwrap();
    bytes[100] ^= 1;
    put(&*storage, "__0_0.distcp", bytes);
    remove(&*storage, "__0_1.distcp");
    put(&*storage, "extra", b"not reported".to_vec());
    let problems = check().unwrap();
    let said: Vec<_> = problems.iter().map(|p| (p.file.as_deref().unwrap(), &*p.message)).collect();
    assert!(
        matches!(&*said, [("__0_0.distcp", a), ("__0_1.distcp", b)]
        if a.contains("SHA-256 begins with") && b.contains("does not exist")),
        "{said:?}"
    );
}
