//! Notes of trainers about the best checkpoint: those that dcp does not understand keep.

use std::sync::Arc;
use std::time::Duration;

use dcp_conformance::MemoryStorage;
use dcp_core::error::error_chain;
use dcp_core::value::{Dict, Global, Object};
use dcp_core::{Storage, Value};
use dcp_formats::torch_object::encode_object;
use dcp_jobs::run::{KeepBest, KeepLast, PrunePlan, StepOrder};
use dcp_testing::fixture;

use crate::protected::run_with;
use crate::support::{numbers, put, put_folder, reason, run_in};

pub(crate) fn dict<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let mut dict = Dict::new();
    for (name, value) in entries {
        dict.insert(name, value);
    }
    Value::Dict(dict)
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

/// The state of Lightning at a step, with this `best_model_path` and these `best_k_models`.
fn lightning_with(step: i64, best: Value, models: Value) -> Vec<u8> {
    let callback =
        dict([("monitor", text("loss")), ("best_model_path", best), ("best_k_models", models)]);
    let callbacks =
        dict([("EarlyStopping", dict([("wait_count", Value::Int(1))])), ("k", callback)]);
    let state = dict([("global_step", Value::Int(step)), ("callbacks", callbacks)]);
    encode_object(&state).unwrap().to_vec()
}

pub(crate) fn lightning(step: u64, best: &str) -> Vec<u8> {
    lightning_with(i64::try_from(step).unwrap(), text(best), dict([]))
}

fn transformers(step: u64, best: &str) -> Vec<u8> {
    format!("{{\"global_step\": {step}, \"best_model_checkpoint\": {best}, \"log_history\": []}}")
        .into_bytes()
}

/// Notes that do not say which checkpoint of the run is the best one, with what is said of each.
fn unclear() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    const META: &str = "meta.pt";
    const STATE: &str = "trainer_state.json";
    let whole = lightning(40, "run/step-10");
    let path = |best| lightning_with(40, best, dict([]));
    let parts = ["run", "step-10"].map(text).to_vec();
    let pathlib = Value::Object(Box::new(Object::new(Global::new("pathlib", "PosixPath"), parts)));
    let state = |value: &Value| encode_object(value).unwrap().to_vec();
    let mut damaged = whole.clone();
    let at = damaged.windows(9).position(|bytes| bytes == b"callbacks").unwrap();
    damaged[at - 20..at].fill(0xff);
    let long = vec![b' '; (16 << 20) + 1];
    vec![
        (META, whole[..whole.len() / 2].to_vec(), "cannot be parsed"),
        (META, Vec::new(), "cannot be parsed"),
        (META, damaged, "cannot be parsed"),
        // The beginning of a stream of `torch.save` before 1.6.
        (META, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), "cannot be parsed"),
        (META, long.clone(), "16777217 bytes long, and dcp reads at most 16 MiB"),
        (META, path(pathlib), "is no string"),
        (META, path(Value::Bytes(b"run/step-10".to_vec().into())), "is no string"),
        (META, path(Value::List(vec![text("run/step-10")])), "is no string"),
        (META, lightning_with(40, text("step-10"), Value::List(Vec::new())), "another shape"),
        (META, state(&dict([("callbacks", Value::List(Vec::new()))])), "no dict"),
        (META, state(&dict([("callbacks", dict([("ModelCheckpoint", dict([]))]))])), "shape"),
        (META, state(&Value::List(Vec::new())), "holds no dict"),
        (META, lightning(40, "/elsewhere/best"), "\"/elsewhere/best\" as the best"),
        (META, lightning(40, "run/step-15"), "no whole checkpoint"),
        (META, lightning(40, "run/step-5/weights"), "no whole checkpoint"),
        (STATE, b"{\"best_model_checkpoint\": \"run/st".to_vec(), "cannot be parsed"),
        (STATE, transformers(40, "[\"run/step-10\"]"), "is no string"),
        (STATE, transformers(40, "\"/elsewhere\""), "\"/elsewhere\" as the best"),
        (STATE, long, "16777217 bytes long, and dcp reads at most 16 MiB"),
    ]
}

/// A run of four steps whose states name the second one as soon as it is there; the last has this note.
fn run_of(file: &'static str, note: &[u8]) -> Arc<MemoryStorage> {
    let steps = [(10, 10), (20, 20), (30, 30), (40, 40)];
    let memory = run_with(&steps, |step| {
        let best = format!("run/step-{}", step.min(20));
        let state = match (step, file) {
            (40, _) => note.to_vec(),
            (_, "meta.pt") => lightning(step, &best),
            _ => transformers(step, &format!("{best:?}")),
        };
        vec![(file, state)]
    });
    // A folder without weights.
    put(&*memory, "step-5/README", b"text".to_vec());
    memory
}

async fn plan(storage: &Arc<dyn Storage>, by: Option<StepOrder>) -> PrunePlan {
    let mut prune = run_in(storage).prune().policy(KeepLast(1));
    if let Some(by) = by {
        prune = prune.by(by);
    }
    prune.plan().await.unwrap()
}

#[tokio::test]
async fn a_note_that_is_not_understood_keeps_all_complete_checkpoints_until_a_newer_one_decides() {
    for (file, note, said) in unclear() {
        let memory = run_of(file, &note);
        let storage: Arc<dyn Storage> = memory.clone();
        for by in [None, Some(StepOrder::Step), Some(StepOrder::Time)] {
            let plan = plan(&storage, by).await;
            assert_eq!(numbers(plan.deleted()), [0_u64; 0], "{said}: {plan:#?}");
            let [problem] = &*plan.unclear_notes else { panic!("{said}: {plan:#?}") };
            assert!(problem.starts_with(&format!("\"step-40/{file}\" ")), "{problem}");
            assert!(problem.contains(said), "{problem} does not say {said:?}");
            assert!(reason(&plan, 10).contains("may be the best one"), "{plan:#?}");
        }
        // What its weights are is unknown where its own note is.
        let incomplete = run_in(&storage).prune().incomplete(Duration::ZERO).plan().await.unwrap();
        assert_eq!(numbers(incomplete.deleted()), [0_u64; 0], "{said}: {incomplete:#?}");
        // An older note does not decide.
        match file {
            "meta.pt" => put(&*memory, "last.ckpt/meta.pt", lightning(30, "run/step-20")),
            _ => put(&*memory, file, transformers(30, "\"run/step-20\"")),
        }
        let older = plan(&storage, Some(StepOrder::Step)).await;
        assert_eq!(numbers(older.deleted()), [0_u64; 0], "{said}: {older:#?}");
        match file {
            "meta.pt" => put(&*memory, "last.ckpt/meta.pt", lightning(40, "run/step-20")),
            _ => put(&*memory, file, transformers(40, "\"run/step-20\"")),
        }
        for by in [None, Some(StepOrder::Step), Some(StepOrder::Time)] {
            let plan = plan(&storage, by).await;
            let deleted = numbers(plan.deleted());
            assert!(deleted.contains(&10), "{said}: {plan:#?}");
            assert!(!deleted.contains(&20) && !deleted.contains(&40), "{said}: {plan:#?}");
            assert!(plan.unclear_notes.is_empty(), "{plan:#?}");
        }
    }
}

#[tokio::test]
async fn a_metric_that_cannot_be_read_is_not_the_worst() {
    for own in [b"{\"metrics\": {\"loss\": ".to_vec(), vec![b' '; (16 << 20) + 1]] {
        let memory = run_with(&[(10, 10), (20, 20), (30, 30)], |step| {
            let state = format!("{{\"log_history\": [{{\"step\": {step}, \"loss\": {step}}}]}}");
            vec![("trainer_state.json", state.into_bytes())]
        });
        put(&*memory, "step-20/.dcp-metrics.json", own);
        let storage: Arc<dyn Storage> = memory;
        let policy = KeepBest::lowest(1, "loss");
        let plan = run_in(&storage).prune().policy(policy).plan().await.unwrap();
        assert_eq!(numbers(plan.deleted()), [0_u64; 0], "{plan:#?}");
        assert!(reason(&plan, 20).ends_with("its \"loss\" is unknown"), "{plan:#?}");
    }
}

#[tokio::test]
async fn which_note_decides_follows_the_order_and_the_best_of_both_stays() {
    // Steps 100 and 200 were written last, in a run that was started again.
    let all = [(600, 10), (700, 20), (800, 30), (100, 80), (200, 90)];
    let run = |unclear: u64| -> Arc<dyn Storage> {
        run_with(&all, |step| {
            let best = match step {
                _ if step == unclear => "/elsewhere",
                600.. => "run/step-600",
                _ => "run/step-100",
            };
            vec![("meta.pt", lightning(step, best))]
        })
    };
    let storage = run(0);
    let by_time = plan(&storage, Some(StepOrder::Time)).await;
    assert_eq!(numbers(by_time.deleted()), [700], "{by_time:#?}");
    assert_eq!(reason(&by_time, 600), "\"step-800\" names it as the best");
    let by_step = plan(&storage, Some(StepOrder::Step)).await;
    assert_eq!(numbers(by_step.deleted()), [700]);
    assert_eq!(reason(&by_step, 100), "\"step-200\" names it as the best");
    for (unclear, holds, decides, deleted) in [
        (200, StepOrder::Time, StepOrder::Step, [100, 700]),
        (800, StepOrder::Step, StepOrder::Time, [700, 800]),
    ] {
        let storage = run(unclear);
        let held = plan(&storage, Some(holds)).await;
        assert_eq!(numbers(held.deleted()), [0_u64; 0], "{held:#?}");
        let released = plan(&storage, Some(decides)).await;
        assert!(numbers(released.deleted()).contains(&700), "{released:#?} {deleted:?}");
    }
}

#[tokio::test]
async fn a_state_above_the_limit_is_an_error_that_names_the_limit() {
    let long = vec![b' '; (16 << 20) + 1];
    let memory = run_with(&[(10, 10), (20, 20)], |_| vec![("trainer_state.json", long.clone())]);
    let storage: Arc<dyn Storage> = memory;
    let prune = || run_in(&storage).prune().policy(KeepLast(1));
    let error = error_chain(&prune().plan().await.unwrap_err());
    assert!(error.contains("dcp reads at most 16 MiB"), "{error}");
    let plan = run_in(&storage).prune().plan().await.unwrap();
    assert!(reason(&plan, 20).contains("dcp reads at most 16 MiB"), "{plan:#?}");
}

/// The best checkpoint may be one of the run that is no step, or a file.
#[tokio::test]
async fn a_best_checkpoint_that_is_no_step_is_found() {
    for best in ["best", "epoch=3-step=15.ckpt"] {
        let memory = run_of("meta.pt", &lightning(40, &format!("/old/run/{best}")));
        match best {
            "best" => put_folder(&*memory, &fixture("pytorch/t21_plain"), best),
            file => put(&*memory, file, lightning(15, "")),
        }
        let storage: Arc<dyn Storage> = memory;
        let plan = plan(&storage, None).await;
        assert_eq!(numbers(plan.deleted()), [10, 20, 30], "{best}: {plan:#?}");
    }
}
