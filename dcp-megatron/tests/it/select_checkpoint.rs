//! Which checkpoint a load reads, and that all ranks read the same.

use std::sync::Arc;

use dcp_conformance::CountingStorage;
use dcp_core::{Key, Storage, Value};
use dcp_megatron::disk::TRACKER;
use dcp_megatron::sharded::{ShardedStateDict, ShardedTensor, ShardedValue};
use dcp_megatron::{
    MegatronError, MegatronLoadOptions, MegatronRun, MegatronSaveOptions, Tracked, load, save,
};

use crate::small_model::{memory, on_ranks, tensors, view};
use crate::support::{block_on, copy, get, put, remove, stored};

fn state(iteration: i64) -> ShardedStateDict {
    let bytes = vec![u8::try_from(iteration).unwrap(); 4];
    let weight = ShardedTensor::from_rank_offsets("w", view(&[1], bytes)).build().unwrap();
    [("w", ShardedValue::from(weight)), ("iteration", Value::Int(iteration).into())]
        .into_iter()
        .collect()
}

fn request() -> ShardedStateDict {
    ShardedStateDict::from([(
        "w",
        ShardedTensor::from_rank_offsets("w", view(&[1], vec![0; 4])).build().unwrap(),
    )])
}

/// Iterations 10 and 20, and a tracker that names the second.
fn run() -> Arc<dyn Storage> {
    let storage = memory();
    let run = MegatronRun::new(Arc::clone(&storage));
    for iteration in [10, 20] {
        let folder = run.checkpoint(Tracked::Iteration(iteration)).unwrap();
        let state = state(iteration.try_into().unwrap());
        block_on(save(&state, &folder, &MegatronSaveOptions::new().integrity(true))).unwrap();
    }
    put(&*storage, TRACKER, b"20".to_vec());
    storage
}

#[test]
fn a_tracker_that_moves_between_ranks_does_not_mix_iterations() {
    let first = run();
    let later: Arc<dyn Storage> = copy(&*first);
    put(&*later, TRACKER, b"10".to_vec());
    let seen = on_ranks(2, |rank, group| {
        let storage = if rank == 0 { &first } else { &later };
        let options = MegatronLoadOptions::new().group(group).validate_access_integrity(false);
        let loaded = block_on(load(&request(), storage, &options)).unwrap();
        assert_eq!(loaded.which, Some(Tracked::Iteration(20)));
        (loaded.state.get("iteration").unwrap().as_int(), tensors(&loaded.state)[0].1.clone())
    });
    assert_eq!(seen, [(Some(20), vec![20; 4]), (Some(20), vec![20; 4])]);
}

#[test]
fn ranks_that_see_other_contents_in_one_place_are_refused() {
    let places = [10, 20].map(|iteration| {
        let storage = memory();
        // Versions are those of a place. Times alone may be the same in both.
        (0..iteration).for_each(|_| put(&*storage, "earlier", Vec::new()));
        remove(&*storage, "earlier");
        block_on(save(&state(iteration), &storage, &MegatronSaveOptions::new())).unwrap();
        storage
    });
    let errors = on_ranks(2, |rank, group| {
        let storage = &places[usize::try_from(rank).unwrap()];
        let error = block_on(load(&request(), storage, &MegatronLoadOptions::new().group(group)));
        error.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1 sees another checkpoint than rank 0"), "{error}");
    }
}

#[test]
fn another_checkpoint_than_the_tracker_names_is_only_loaded_when_asked_for() {
    let storage = run();
    put(&*storage, TRACKER, b"30".to_vec());
    let error = block_on(load(&request(), &storage, &MegatronLoadOptions::new())).unwrap_err();
    let MegatronError::TrackedAbsent { tracked, folder } = &error else { panic!("{error}") };
    assert_eq!((*tracked, &**folder), (Tracked::Iteration(30), "iter_0000030"));
    // One that was begun is none, either.
    let begun = get(&*storage, "iter_0000020/.metadata").unwrap();
    put(&*storage, "iter_0000030/.metadata", begun);
    assert!(block_on(load(&request(), &storage, &MegatronLoadOptions::new())).is_err());
    let options = MegatronLoadOptions::new().fall_back(true);
    let loaded = block_on(load(&request(), &storage, &options)).unwrap();
    assert_eq!(loaded.which, Some(Tracked::Iteration(20)));
    let [warning] = &*loaded.warnings else { panic!("{:?}", loaded.warnings) };
    assert!(warning.contains("says 30") && warning.contains("iter_0000020 is loaded"), "{warning}");
    assert_eq!(loaded.state.get("iteration").unwrap().as_int(), Some(20));
}

#[test]
fn files_are_compared_with_the_manifest_on_all_ranks_when_asked_for() {
    let storage = run();
    let options = MegatronLoadOptions::new().verify_integrity(true);
    block_on(load(&request(), &storage, &options)).unwrap();
    let name = "iter_0000020/__0_0.distcp";
    let mut bytes = get(&*storage, name).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    put(&*storage, name, bytes);
    let error = block_on(load(&request(), &storage, &options)).unwrap_err();
    let MegatronError::Damaged { problems } = &error else { panic!("{error}") };
    assert!(problems[0].starts_with("__0_0.distcp: its SHA-256"), "{problems:?}");
    let errors = on_ranks(2, |_, group| {
        let options = options.clone().group(group).validate_access_integrity(false);
        block_on(load(&request(), &storage, &options)).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("__0_0.distcp")), "{errors:?}");
    // Each file is read by one rank.
    let ranks = on_ranks(2, |_, group| {
        let counted = CountingStorage::new(Arc::clone(&storage));
        let options = options.clone().group(group).validate_access_integrity(false);
        let place: Arc<dyn Storage> = Arc::new(counted.clone());
        assert!(block_on(load(&request(), &place, &options)).is_err());
        counted
    });
    let mut shares = [0, 0];
    for name in [".metadata", "__0_0.distcp", "common.pt"] {
        let key = Key::new(format!("iter_0000020/{name}")).unwrap();
        let read = ranks.iter().map(|rank| rank.requests(&key) > 0);
        let [first, second] = read.collect::<Vec<_>>()[..] else { panic!("{name}") };
        assert_ne!(first, second, "{name}");
        shares[usize::from(second)] += 1;
    }
    assert!(shares.iter().all(|files| *files > 0), "{shares:?}");
    remove(&*storage, "iter_0000020/integrity.json");
    let error = block_on(load(&request(), &storage, &options)).unwrap_err().to_string();
    assert!(error.contains("no integrity.json"), "{error}");
}

#[test]
fn a_run_with_a_tracker_is_not_listed() {
    let storage = run();
    let lists = |storage: Arc<dyn Storage>| {
        let counted = Arc::new(CountingStorage::new(storage));
        let dynamic: Arc<dyn Storage> = Arc::clone(&counted) as _;
        block_on(load(&request(), &dynamic, &MegatronLoadOptions::new())).unwrap();
        counted.counts().lists
    };
    let folder = MegatronRun::new(Arc::clone(&storage)).checkpoint(Tracked::Iteration(20)).unwrap();
    assert_eq!(lists(Arc::clone(&storage)), lists(folder));
}

#[test]
fn folders_of_ranks_are_a_checkpoint_whatever_a_tracker_beside_them_says() {
    let storage = stored("run_legacy_torch_tp2");
    let run = MegatronRun::new(Arc::clone(&storage));
    let folder = copy(&*run.checkpoint(Tracked::Iteration(10)).unwrap());
    for says in ["30", "nothing"] {
        put(&*folder, TRACKER, says.into());
        let dynamic: Arc<dyn Storage> = Arc::clone(&folder) as _;
        let loaded =
            block_on(load(&ShardedStateDict::new(), &dynamic, &MegatronLoadOptions::new()));
        assert_eq!(loaded.unwrap().which, None);
    }
}
