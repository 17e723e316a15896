//! Checkpoints that no policy deletes, and deletions that are refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_jobs::ErrorKind;
use dcp_jobs::run::{AnyOf, KeepBest, KeepEvery, KeepLast, Prune, Run, StepOrder};
use dcp_testing::{fixture, key};

use crate::support::{Framework, get, names, numbers, put, put_folder, reason, run_in, steps};

/// A run in memory whose steps were written at these seconds.
fn run_of(steps: &[(u64, u64)]) -> Arc<MemoryStorage> {
    run_with(steps, |_| Vec::new())
}

/// The same, with these files in the folder of each step.
pub(crate) fn run_with(
    steps: &[(u64, u64)],
    files: impl Fn(u64) -> Vec<(&'static str, Vec<u8>)>,
) -> Arc<MemoryStorage> {
    let seconds = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&seconds);
    let time = move || UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::Relaxed));
    let memory = MemoryStorage::new().clock(time);
    for (step, written) in steps {
        seconds.store(*written, Ordering::Relaxed);
        Framework::PyTorch.save(&memory, *step);
        for (name, bytes) in files(*step) {
            put(&memory, &format!("step-{step}/{name}"), bytes);
        }
    }
    Arc::new(memory)
}

#[tokio::test]
async fn a_metric_that_no_checkpoint_has_is_refused_with_those_that_exist() {
    let memory = Framework::PyTorch.run(1..=3);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    let before = names(&*storage);
    let error = run.prune().policy(KeepBest::highest(1, "acc")).run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.hint().unwrap().contains("no metrics are recorded"), "{error:?}");
    run.record_metrics(1, &BTreeMap::from([("loss".to_owned(), 1.0)])).await.unwrap();
    let policy = AnyOf::new().or(KeepLast(1)).or(KeepBest::highest(1, "acc"));
    let error = run.prune().policy(policy).plan().await.unwrap_err();
    assert_eq!(error.to_string(), "no checkpoint of the run has the metric \"acc\"");
    assert!(error.hint().unwrap().contains("\"loss\""), "{error:?}");
    assert_eq!(names(&*storage).len(), before.len() + 1);
}

#[tokio::test]
async fn metrics_of_transformers_decide_and_the_best_checkpoint_stays() {
    let memory = Framework::HuggingFace.run([100, 200, 300, 400]);
    let state = |step: u64, loss: &str, best: u64| {
        let text = format!(
            "{{\"best_metric\": 0.5, \"best_model_checkpoint\": \"/old/out/checkpoint-{best}\", \
             \"log_history\": [{{\"eval_loss\": 0.0, \"step\": 1}}, \
             {{\"eval_loss\": {loss}, \"step\": {step}}}]}}"
        );
        put(&*memory, &format!("checkpoint-{step}/trainer_state.json"), text.into_bytes());
    };
    state(100, "0.9", 100);
    state(200, "0.5", 200);
    state(300, "NaN", 200);
    state(400, "0.7", 200);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    let found = steps(&run).await;
    let losses: Vec<_> = found.iter().map(|one| one.metrics.get("eval_loss").copied()).collect();
    assert_eq!(losses, [Some(0.9), Some(0.5), None, Some(0.7)]);
    assert_eq!(found[1].metrics.get("best_metric"), Some(&0.5));
    let plan = run.prune().policy(KeepBest::lowest(1, "eval_loss")).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [100]);
    let plan = run.prune().policy(KeepLast(1)).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [100, 300]);
    assert_eq!(reason(&plan, 200), "\"checkpoint-400\" names it as the best");
}

#[tokio::test]
async fn where_numbers_and_times_disagree_the_caller_chooses() {
    let run = [(700, 10), (100, 90), (800, 20)];
    let deleted = |by: Option<StepOrder>| async move {
        let storage: Arc<dyn Storage> = run_of(&run);
        let mut prune = run_in(&storage).prune().policy(KeepLast(1)).verify(true);
        if let Some(by) = by {
            prune = prune.by(by);
        }
        let report = prune.run().await;
        report.map(|report| report.deleted.iter().map(|one| one.step).collect::<Vec<_>>())
    };
    let error = deleted(None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided);
    assert!(error.to_string().contains("\"step-700\" is older than \"step-100\""), "{error}");
    assert_eq!(deleted(Some(StepOrder::Time)).await.unwrap(), [700, 800]);
    assert_eq!(deleted(Some(StepOrder::Step)).await.unwrap(), [100, 700]);
    // A pin or metrics of later do not make a checkpoint newer.
    let memory = Framework::PyTorch.run(1..=3);
    let storage: Arc<dyn Storage> = memory;
    let run = run_in(&storage);
    run.pin(1).await.unwrap();
    run.record_metrics(2, &BTreeMap::from([("loss".to_owned(), 1.0)])).await.unwrap();
    let plan = run.prune().policy(KeepLast(1)).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [2]);
}

#[tokio::test]
async fn a_checkpoint_whose_files_only_have_the_right_lengths_is_not_kept_for_a_whole_one() {
    let memory = Framework::PyTorch.run([1, 2, 3]);
    let storage: Arc<dyn Storage> = memory.clone();
    let run = run_in(&storage);
    let zeros = vec![0; get(&*storage, "step-1/.metadata").len()];
    let whole = get(&*storage, "step-1/.metadata");
    put(&*storage, "step-2/.metadata", zeros.clone());
    put(&*storage, "step-3/.metadata", whole);
    let plan = run.prune().policy(KeepLast(2)).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [0_u64; 0], "{plan:?}");
    assert_eq!(reason(&plan, 2), "not complete");
    // With none that is whole, nothing is deleted, and that is an error.
    put(&*storage, "step-1/.metadata", zeros.clone());
    put(&*storage, "step-3/.metadata", zeros);
    let before = names(&*storage);
    let error = run.prune().policy(KeepLast(1)).run().await.unwrap_err();
    assert_eq!((error.kind(), names(&*storage)), (ErrorKind::Damaged, before));
}

#[tokio::test]
async fn what_files_of_the_run_name_stays() {
    for (file, text, kept) in [
        ("latest", "global_step10", "\"latest\" names it"),
        ("latest_universal", "global_step10", "\"latest_universal\" names it"),
        ("latest_checkpointed_iteration.txt", "10", "names it"),
        ("latest_checkpointed_iteration.txt", "global_step10\n", "names it"),
        ("best.txt", "runs/llama/global_step10/model", "\"best.txt\" names it"),
        (
            "trainer_state.json",
            "{\"best_model_checkpoint\": \"out/global_step10\"}",
            "trainer_state.json of the run names it as the best",
        ),
    ] {
        let memory = MemoryStorage::new();
        for step in [10, 20, 30] {
            let from = fixture("pytorch/t21_plain");
            put_folder(&memory, &from, &format!("global_step{step}"));
        }
        put(&memory, file, text.as_bytes().to_vec());
        let storage: Arc<dyn Storage> = Arc::new(memory);
        let plan = run_in(&storage).prune().policy(KeepLast(1)).plan().await.unwrap();
        assert_eq!(numbers(plan.deleted()), [20], "{file} {text}");
        assert!(reason(&plan, 10).contains(kept), "{file} {text}: {plan:?}");
        assert!(!plan.others.contains(&file.to_owned()) || file == "trainer_state.json");
    }
}

#[tokio::test]
async fn a_pin_in_a_run_within_a_step_keeps_the_step() {
    let memory = Framework::PyTorch.run([10, 20, 30]);
    for step in [1, 2] {
        put_folder(&*memory, &fixture("pytorch/t21_plain"), &format!("step-10/step-{step}"));
    }
    put(&*memory, "step-10/step-2/.dcp-pin", Vec::new());
    let storage: Arc<dyn Storage> = memory;
    let run = run_in(&storage);
    // Without a policy it is pinned, too.
    let plan = run.prune().incomplete(Duration::ZERO).plan().await.unwrap();
    assert_eq!(reason(&plan, 10), "pinned");
    let report = run.prune().policy(KeepLast(1)).by(StepOrder::Step).run().await.unwrap();
    let deleted: Vec<_> = report.deleted.iter().map(|one| one.step).collect();
    assert_eq!(deleted, [20]);
    assert!(names(&*storage).contains(&"step-10/step-2/.dcp-pin".to_owned()));
}

/// A small generator of numbers, so that every failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A random run, and the steps that are whole with the second in which each was written, in ascending
/// order of steps.
async fn random_run(random: &mut Random) -> (Arc<dyn Storage>, Vec<(u64, u64)>) {
    let count = random.below(6);
    let mut all: Vec<_> = (1..=count).map(|step| (step * 10, step * 10)).collect();
    if random.below(3) == 0 {
        for (_, written) in &mut all {
            *written = random.below(50);
        }
    }
    let storage: Arc<dyn Storage> = run_of(&all);
    let mut whole = Vec::new();
    for (step, written) in all {
        let file = |name: &str| format!("step-{step}/{name}");
        let is_whole = random.below(3) != 0;
        if is_whole {
            whole.push((step, written));
        } else {
            match random.below(3) {
                0 => storage.delete(&[key(&file(".metadata"))]).await.unwrap(),
                1 => storage.delete(&[key(&file("__0_0.distcp"))]).await.unwrap(),
                _ => {
                    let len = get(&*storage, &file(".metadata")).len();
                    put(&*storage, &file(".metadata"), vec![0; len]);
                }
            }
        }
        match random.below(4) {
            0 => {}
            1 => {
                let text = b"{\"metrics\": {\"loss\": NaN, \"acc\": 1}}".to_vec();
                put(&*storage, &file(".dcp-metrics.json"), text);
            }
            _ => {
                let text = format!("{{\"metrics\": {{\"loss\": {}}}}}", random.below(3));
                put(&*storage, &file(".dcp-metrics.json"), text.into_bytes());
            }
        }
        if random.below(6) == 0 {
            put(&*storage, &file(".dcp-pin"), Vec::new());
        }
    }
    (storage, whole)
}

/// The folders of a run that have files.
async fn folders(storage: &dyn Storage) -> BTreeSet<String> {
    let all = names(storage).into_iter();
    all.filter_map(|name| Some(name.split_once('/')?.0.to_owned())).collect()
}

fn random_prune(run: &Run, random: &mut Random) -> (Prune, bool, Option<StepOrder>) {
    let mut policy = AnyOf::new().or(KeepLast(random.below(3) as usize));
    let by_metric = random.below(2) == 0;
    if by_metric {
        policy = policy.or(KeepBest::lowest(random.below(2) as usize, "loss"));
    }
    if random.below(3) == 0 {
        policy = policy.or(KeepEvery(20));
    }
    let mut prune = run.prune().policy(policy).now(SystemTime::now());
    if random.below(2) == 0 {
        prune = prune.incomplete(Duration::from_secs(60));
    }
    let by = [None, Some(StepOrder::Step), Some(StepOrder::Time)][random.below(3) as usize];
    if let Some(by) = by {
        prune = prune.by(by);
    }
    (prune, by_metric, by)
}

#[tokio::test]
async fn a_plan_is_what_is_deleted_and_the_newest_whole_checkpoint_never_is() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut deletions, mut refusals) = (0, BTreeSet::new());
    for round in 0..300 {
        let (storage, whole) = random_run(&mut random).await;
        let run = run_in(&storage);
        let (prune, by_metric, by) = random_prune(&run, &mut random);
        let before = folders(&*storage).await;
        let facts = steps(&run).await;
        let plan = prune.plan().await;
        assert_eq!(folders(&*storage).await, before, "a plan deletes nothing");
        let done = prune.run().await;
        let after = folders(&*storage).await;
        let gone: BTreeSet<_> = before.difference(&after).cloned().collect();
        let (plan, done) = match (plan, done) {
            (Ok(plan), Ok(done)) => (plan, done),
            (Err(plan), Err(done)) => {
                assert_eq!(plan.to_string(), done.to_string(), "round {round}");
                assert!(gone.is_empty(), "round {round}");
                refusals.insert(format!("{:?}", done.kind()));
                continue;
            }
            other => panic!("round {round}: {other:?}"),
        };
        let planned: BTreeSet<_> = plan.deleted().map(|one| one.name.clone()).collect();
        assert_eq!(planned, gone, "round {round}: {plan:?}");
        assert_eq!(plan.not_deleted, done.not_deleted, "round {round}");
        deletions += gone.len();
        let newest = match by {
            Some(StepOrder::Time) => whole.iter().max_by_key(|(step, written)| (*written, *step)),
            _ => whole.last(),
        };
        if let Some((step, _)) = newest {
            assert!(!gone.contains(&format!("step-{step}")), "round {round}: {plan:?}");
        }
        for one in facts.iter().filter(|one| gone.contains(&one.name)) {
            assert!(!one.pinned, "round {round}: {one:?}");
            let is_whole = whole.iter().any(|(step, _)| *step == one.step);
            let is_known = one.metrics.contains_key("loss");
            assert!(is_known || !by_metric || !is_whole, "round {round}: {one:?}");
            assert!(!whole.is_empty(), "round {round}: {one:?}");
        }
    }
    assert!(deletions > 100, "{deletions}");
    assert_eq!(refusals.len(), 3, "{refusals:?}");
}

#[tokio::test]
async fn a_newest_checkpoint_that_is_cut_short_keeps_the_whole_one_before_it() {
    let memory = Framework::HuggingFace.run([1, 2, 3]);
    let storage: Arc<dyn Storage> = memory;
    let is_data =
        |name: &String| name.starts_with("checkpoint-3/") && name.ends_with(".safetensors");
    let data = names(&*storage).into_iter().find(is_data).unwrap();
    let bytes = get(&*storage, &data);
    put(&*storage, &data, bytes[..bytes.len() / 2].to_vec());
    let plan = run_in(&storage).prune().policy(KeepLast(1)).plan().await.unwrap();
    assert_eq!(numbers(plan.deleted()), [1], "{plan:?}");
    assert_eq!((reason(&plan, 2), reason(&plan, 3)), ("the newest complete one", "not complete"));
}
