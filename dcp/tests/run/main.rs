//! Runs: which checkpoints there are, which are kept, and what is left when a deletion dies.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod disk;
mod kills;
mod notes;
mod protected;
mod rivals;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_conformance::{FaultStorage, MemoryStorage};
use dcp_core::Storage;
use dcp_jobs::ErrorKind;
use dcp_jobs::run::{AnyOf, KeepBest, KeepEvery, KeepLast, PruneReport};
use dcp_testing::{fixture, key};

use support::{
    FRAMEWORKS, Framework, complete, files, get, names, numbers, put, put_folder, reason, run_in,
    steps,
};

#[tokio::test]
async fn steps_of_every_naming_are_found_and_nothing_else() {
    let memory = MemoryStorage::new();
    for (name, from) in [
        ("step-5", "pytorch/t21_plain"),
        ("step_6", "pytorch/t21_plain"),
        ("step7", "pytorch/t21_plain"),
        ("iter_0000008", "megatron/run_torch_dist_dp2/iter_0000010"),
        ("checkpoint-9", "hf/consolidated_index_4r/ckpt"),
        ("global_step10", "pytorch/t21_plain"),
        ("llama-3-8b", "hf/consolidated_index_4r/ckpt"),
        ("pretrained", "pytorch/t21_plain"),
    ] {
        put_folder(&memory, &fixture(from), name);
    }
    put(&memory, "step-11/notes.txt", b"no checkpoint".to_vec());
    put(&memory, "step-12", b"a file".to_vec());
    let storage: Arc<dyn Storage> = Arc::new(memory);
    let found = steps(&run_in(&storage)).await;
    assert_eq!(numbers(&found), [5, 6, 7, 8, 9, 10]);
    assert_eq!(complete(&found), [5, 6, 7, 8, 9, 10]);
    let formats: Vec<_> = found.iter().map(|one| one.format).collect();
    assert_eq!(formats, ["dcp", "dcp", "dcp", "megatron", "huggingface", "dcp"]);
}

#[tokio::test]
async fn the_latest_is_complete_and_the_latest_valid_one_verifies() {
    let memory = Framework::PyTorch.run([1, 2, 3, 4]);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    storage.delete(&[key("step-4/.metadata")]).await.unwrap();
    assert_eq!(run.latest().await.unwrap().unwrap().step, 3);
    // A byte of a tensor: only its checksum shows it.
    let data = names(&*storage).into_iter().find(|n| n.starts_with("step-3/__0_0")).unwrap();
    let mut bytes = get(&*storage, &data);
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    put(&*storage, &data, bytes);
    let valid = run.latest_valid(true).await.unwrap();
    assert_eq!(valid.step.unwrap().step, 2);
    let skipped: Vec<_> = valid.skipped.iter().map(|one| one.step).collect();
    assert_eq!(skipped, [4, 3]);
    assert!(valid.skipped[0].problem.contains(".metadata"), "{:?}", valid.skipped);

    let policy = || AnyOf::new().or(KeepLast(1));
    let plan = run.prune().policy(policy()).deep(true).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [1]);
    assert_eq!(reason(&plan, 2), "the newest valid one");
    assert_eq!(reason(&plan, 3), "the newest complete one");
    assert_eq!(reason(&plan, 4), "not complete");
    assert_eq!(plan.skipped, valid.skipped);
    let report = run.prune().policy(policy()).deep(true).run().await.unwrap();
    assert_eq!(report.deleted.len(), 1);
    assert_eq!(complete(&steps(&run).await), [2, 3]);
}

#[tokio::test]
async fn without_a_valid_checkpoint_nothing_is_deleted() {
    let memory = Framework::PyTorch.run([1, 2, 3]);
    let storage: Arc<dyn Storage> = memory.clone();
    for step in 1..=3 {
        let data = format!("step-{step}/__0_0.distcp");
        let mut bytes = get(&*storage, &data);
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        put(&*storage, &data, bytes);
    }
    let before = names(&*storage);
    let error = run_in(&storage).prune().policy(KeepLast(1)).deep(true).run().await.unwrap_err();
    assert_eq!((error.kind(), names(&*storage)), (ErrorKind::Damaged, before));
}

#[tokio::test]
async fn runs_of_every_framework_are_pruned_and_what_is_kept_keeps_its_bytes() {
    for framework in FRAMEWORKS {
        let memory = framework.run(1..=6);
        put(&*memory, "train.log", b"a log".to_vec());
        put_folder(&*memory, &fixture("pytorch/t21_plain"), "pretrained");
        let storage: Arc<dyn Storage> = memory.clone();
        let run = run_in(&storage);
        assert_eq!(complete(&steps(&run).await), [1, 2, 3, 4, 5, 6], "{framework:?}");
        run.pin(1).await.unwrap();
        let kept: Vec<_> = [1, 3, 6].map(|step| framework.naming().folder(step)).into();
        let kept: Vec<_> = kept.into_iter().chain(["pretrained".to_owned()]).collect();
        let before: Vec<_> = kept.iter().map(|folder| files(&*storage, folder)).collect();
        let policy = AnyOf::new().or(KeepLast(1)).or(KeepEvery(3));
        let report = run.prune().policy(policy).run().await.unwrap();
        assert!(report.not_deleted.is_empty(), "{framework:?}: {report:?}");
        let deleted: Vec<_> = report.deleted.iter().map(|one| one.step).collect();
        assert_eq!(deleted, [2, 4, 5], "{framework:?}");
        let after: Vec<_> = kept.iter().map(|folder| files(&*storage, folder)).collect();
        assert_eq!(after, before, "{framework:?}");
        let left = names(&*storage);
        let is_kept = |name: &String| {
            kept.iter().any(|folder| name.starts_with(&format!("{folder}/"))) || !name.contains('/')
        };
        assert!(left.iter().all(is_kept), "{framework:?}: {left:?}");
        assert!(left.contains(&"train.log".to_owned()));
        assert_eq!(run.latest_valid(true).await.unwrap().step.unwrap().step, 6, "{framework:?}");
    }
}

#[tokio::test]
async fn metrics_and_pins_survive_and_decide() {
    let memory = Framework::PyTorch.run(1..=5);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    for (step, loss) in [(1, 3.0), (2, 0.5), (3, f64::NAN), (4, 9.0)] {
        run.record_metrics(step, &BTreeMap::from([("loss".to_owned(), loss)])).await.unwrap();
    }
    put(&*storage, "step-5/.dcp-metrics.json", b"{\"metrics\": [[[".to_vec());
    run.pin(4).await.unwrap();
    let found = steps(&run).await;
    let losses: Vec<_> = found.iter().map(|one| one.metrics.get("loss").copied()).collect();
    assert_eq!(losses, [Some(3.0), Some(0.5), None, Some(9.0), None]);
    let policy = KeepBest::lowest(1, "loss");
    let plan = run.prune().policy(policy.clone()).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [1], "the loss of step 3 is unknown");
    assert!(reason(&plan, 3).ends_with("its \"loss\" is unknown"), "{plan:?}");
    assert_eq!(reason(&plan, 4), "pinned");
    run.unpin(4).await.unwrap();
    // The plan is older than the end of the pin: it deletes no more than it said.
    let report = run.prune().policy(policy).apply(&plan).await.unwrap();
    assert_eq!(report.deleted.len(), 1);
    assert_eq!(complete(&steps(&run).await), [2, 3, 4, 5]);
    let error = run.pin(1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_plan_is_compared_with_the_run_before_anything_is_deleted() {
    let memory = Framework::PyTorch.run(1..=4);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    let plan = run.prune().policy(KeepLast(2)).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [1, 2]);
    // Meanwhile one is pinned, and the newest ones are lost.
    run.pin(1).await.unwrap();
    storage.delete(&[key("step-3/.metadata"), key("step-4/.metadata")]).await.unwrap();
    let report = run.prune().policy(KeepLast(2)).apply(&plan).await.unwrap();
    assert_eq!(report, PruneReport::default());
    assert_eq!(complete(&steps(&run).await), [1, 2]);
}

#[tokio::test]
async fn what_killed_saves_left_is_removed_when_it_is_old() {
    let memory = Framework::Olmo.run(1..=3);
    Framework::Olmo.save(&*memory, 4);
    let storage: Arc<dyn Storage> = memory.clone();
    storage.delete(&[key("step4/model_and_optim/.metadata")]).await.unwrap();
    for name in files(&*storage, "step3").into_keys() {
        put(&*storage, &name.replace("step3", "step5-tmp"), get(&*storage, &name));
    }
    put(&*storage, "step6/notes.txt", b"no checkpoint".to_vec());
    let run = run_in(&storage);
    let day = Duration::from_secs(86_400);
    let plan = run.prune().incomplete(day).plan().await.unwrap();
    assert_eq!(plan.deleted().count(), 0);
    assert!(reason(&plan, 4).contains("younger than 1 d"), "{plan:?}");
    let tomorrow = SystemTime::now() + 2 * day;
    let report = run.prune().incomplete(day).now(tomorrow).run().await.unwrap();
    let deleted: Vec<_> = report.deleted.iter().map(|one| &*one.name).collect();
    assert_eq!(deleted, ["step4", "step5-tmp"], "{report:?}");
    assert_eq!(complete(&steps(&run).await), [1, 2, 3]);
    assert!(names(&*storage).contains(&"step6/notes.txt".to_owned()));
}

#[tokio::test]
async fn a_run_of_incomplete_checkpoints_alone_keeps_them() {
    let memory = Framework::PyTorch.run([1, 2]);
    let storage: Arc<dyn Storage> = memory.clone();
    storage.delete(&[key("step-1/.metadata"), key("step-2/.metadata")]).await.unwrap();
    let later = SystemTime::now() + Duration::from_secs(86_400);
    let run = run_in(&storage);
    let report = run.prune().incomplete(Duration::ZERO).now(later).run().await.unwrap();
    assert!(report.deleted.is_empty(), "{report:?}");
}

#[tokio::test]
async fn a_checkpoint_that_would_seem_whole_when_half_deleted_stays() {
    let memory = MemoryStorage::new();
    let from = fixture("megatron/run_legacy_torch_tp2");
    put_folder(&memory, &from, "");
    let iteration =
        |name: &str| name.starts_with("iter_").then(|| name.split('/').next().unwrap().to_owned());
    let first = names(&memory).iter().find_map(|name| iteration(name)).unwrap();
    for name in files(&memory, &first).into_keys() {
        put(&memory, &name.replace(&first, "iter_9999999"), get(&memory, &name));
    }
    put(&memory, "latest_checkpointed_iteration.txt", b"9999999".to_vec());
    let storage: Arc<dyn Storage> = Arc::new(memory);
    let before = names(&*storage);
    let report = run_in(&storage).prune().policy(KeepLast(1)).run().await.unwrap();
    assert_eq!(report.not_deleted.len(), 1, "{report:?}");
    assert!(report.not_deleted[0].reason.contains("no index"), "{report:?}");
    assert_eq!(names(&*storage), before);
}

/// A run whose files have times in whole seconds, as on many stores, and the clock: three steps of the
/// second 100, and the deletion of step 1, which died in the second 200 when its index was gone.
async fn half_deleted() -> (Arc<dyn Storage>, Arc<AtomicU64>) {
    for died_at in 0.. {
        let seconds = Arc::new(AtomicU64::new(100));
        let clock = Arc::clone(&seconds);
        let time = move || UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::Relaxed));
        let memory = Arc::new(MemoryStorage::new().clock(time));
        (1..=3).for_each(|step| Framework::PyTorch.save(&*memory, step));
        seconds.store(200, Ordering::Relaxed);
        let dying = FaultStorage::new(memory.clone()).dying_after(died_at);
        let broken: Arc<dyn Storage> = Arc::new(dying);
        drop(run_in(&broken).prune().policy(KeepLast(2)).run().await);
        let left = names(&*memory);
        if !left.contains(&"step-1/.metadata".to_owned()) {
            assert!(left.contains(&"step-1/.dcp-deleting".to_owned()), "{left:?}");
            return (memory, seconds);
        }
    }
    unreachable!("the deletion never reached the index");
}

#[tokio::test]
async fn a_deletion_is_finished_within_the_second_in_which_it_died() {
    let (storage, _) = half_deleted().await;
    let run = run_in(&storage);
    let found = steps(&run).await;
    assert!(found[0].deleting && found[0].complete == Some(false));
    let report = run.prune().run().await.unwrap();
    let deleted: Vec<_> = report.deleted.iter().map(|one| one.step).collect();
    assert_eq!(deleted, [1], "{report:?}");
}

#[tokio::test]
async fn a_save_that_begins_in_a_half_deleted_folder_is_not_deleted() {
    // A save writes there in the same second or later, is not complete yet, and must not lose its files.
    for (second, has_time) in [(200, true), (201, true), (200, false)] {
        let (storage, seconds) = half_deleted().await;
        let run = run_in(&storage);
        if !has_time {
            put(&*storage, "step-1/.dcp-deleting", b"{\"format\": \"dcp\"}".to_vec());
        }
        seconds.store(second, Ordering::Relaxed);
        put(&*storage, "step-1/__0_0.distcp", get(&*storage, "step-2/__0_0.distcp"));
        let before = names(&*storage);
        let found = steps(&run).await;
        assert!(!found[0].deleting && found[0].complete == Some(false), "{found:?}");
        assert_eq!(run.prune().run().await.unwrap(), PruneReport::default());
        assert_eq!(names(&*storage), before);
        // If it dies, the rest is found by its age.
        let prune = run.prune().incomplete(Duration::from_secs(60));
        let at = |seconds| prune.clone().now(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(second + 59).run().await.unwrap(), PruneReport::default());
        assert_eq!(at(second + 60).plan().await.unwrap().deleted().count(), 1);
        // When it is complete, the mark means nothing.
        put(&*storage, "step-1/.metadata", get(&*storage, "step-2/.metadata"));
        let found = steps(&run).await;
        assert!(found[0].is_complete() && !found[0].deleting);
        assert_eq!(run.prune().run().await.unwrap(), PruneReport::default());
    }
}
