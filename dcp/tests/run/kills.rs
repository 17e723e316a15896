//! What is left when a deletion dies.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dcp_conformance::{Effect, Fault, FaultStorage};
use dcp_core::{Storage, StorageErrorKind};
use dcp_jobs::run::{KeepLast, RunStep};

use crate::support::{FRAMEWORKS, Framework, files, names, opener_of, run_in, steps};

/// How a deletion is stopped at its n-th operation.
type Stop = fn(FaultStorage, u64) -> FaultStorage;

const STOPS: [(&str, Stop); 6] = [
    ("killed", |storage, n| storage.dying_after(n - 1)),
    ("torn", |storage, n| storage.fault(n, Fault::Tear)),
    ("full", |storage, n| storage.full_after(n - 1)),
    ("read-only", |storage, n| storage.read_only_after(n - 1)),
    ("failed", |storage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Other))),
    ("failed afterwards", |storage, n| storage.fault(n, Fault::FailAfterwards)),
];

/// Stops the deletion of steps 1 and 2 at every operation, in every way.
async fn stop_everywhere(framework: Framework) -> u64 {
    let whole = framework.run(1..=4);
    let folder = |step| framework.naming().folder(step);
    let kept: Vec<_> = [3, 4].map(|step| files(&*whole, &folder(step))).into();
    let undisturbed = FaultStorage::new(framework.run(1..=4));
    let broken: Arc<dyn Storage> = Arc::new(undisturbed.clone());
    run_in(&broken).prune().policy(KeepLast(2)).run().await.unwrap();
    let effects = undisturbed.effects();
    let mut points = 0;
    let mut known = BTreeSet::new();
    for (how, stop) in STOPS {
        for n in 1.. {
            // Between two operations that change something, dying is the same.
            let effect = effects.get(n as usize - 1);
            if effect.is_some_and(|effect| *effect == Effect::None) && how != "failed" {
                continue;
            }
            let memory = framework.run(1..=4);
            let faulty = stop(FaultStorage::new(memory.clone()), n);
            let broken: Arc<dyn Storage> = Arc::new(faulty.clone());
            let outcome = run_in(&broken).prune().policy(KeepLast(2)).run().await;
            let is_past = faulty.operations() < n;
            let when = format!("{framework:?} {how} at operation {n}");
            points += 1;

            let storage: Arc<dyn Storage> = memory.clone();
            let run = run_in(&storage);
            let after: Vec<_> = [3, 4].map(|step| files(&*memory, &folder(step))).into();
            assert_eq!(after, kept, "{when}");
            // Without the times, which marks have.
            if !is_past && !known.insert(names(&*memory)) {
                continue;
            }
            let valid = run.latest_valid(true).await.unwrap();
            assert_eq!(valid.step.unwrap().step, 4, "{when}");
            // What is left is whole, or every command says that it is not.
            for step in [1, 2] {
                let left = files(&*memory, &folder(step));
                let original = files(&*whole, &folder(step));
                let url = run.step_url(framework.naming(), step);
                let verified = async {
                    let opened = opener_of(&storage).open(&url).await.ok()?;
                    Some(opened.verify().deep(true).run().await.ok()?.ok)
                };
                let is_valid = verified.await == Some(true);
                let has_all = original.iter().all(|(name, bytes)| left.get(name) == Some(bytes));
                // The model of OLMo-core opens until its own index is gone, and is whole until then.
                let is_commit = |name: &str| name.ends_with("/.metadata.json");
                let has_data = original
                    .iter()
                    .filter(|(name, _)| !is_commit(name))
                    .all(|(name, bytes)| left.get(name) == Some(bytes));
                assert!(is_valid || !has_all, "{when}: step {step}: {:?}", left.keys());
                assert!(has_data || !is_valid, "{when}: step {step}: {:?}", left.keys());
                let found = steps(&run).await.into_iter().find(|one| one.step == step);
                let listed = found.as_ref().is_some_and(RunStep::is_complete);
                assert_eq!(listed, has_all, "{when}: step {step}: {found:?}");
                // A rest is found by the next deletion: by its mark, or by its age.
                assert!(left.is_empty() || found.is_some(), "{when}: {:?}", left.keys());
            }
            // The next deletion finishes; without a mark, what is old counts as left by a save.
            let later = SystemTime::now() + Duration::from_secs(3600);
            let again =
                run.prune().policy(KeepLast(2)).incomplete(Duration::from_secs(1)).now(later);
            let report = again.run().await.unwrap();
            assert!(report.not_deleted.is_empty(), "{when}: {report:?}");
            for step in [1, 2] {
                assert_eq!(files(&*memory, &folder(step)).len(), 0, "{when}");
            }
            if is_past {
                let report = outcome.unwrap();
                assert_eq!(report.deleted.len(), 2, "{when}: {report:?}");
                let changes = faulty.effects().iter().filter(|e| **e != Effect::None).count();
                assert!(changes > 6, "{when}: {changes}");
                break;
            }
        }
    }
    points
}

#[tokio::test]
async fn a_deletion_that_dies_at_any_operation_leaves_whole_checkpoints_and_remains_of_others() {
    for framework in FRAMEWORKS {
        let points = stop_everywhere(framework).await;
        assert!(points > 60, "{framework:?}: {points}");
    }
}
