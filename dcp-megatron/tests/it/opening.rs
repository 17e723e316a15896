//! What opens, what does not, and what is said then.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::error::error_chain;
use dcp_core::value::Dict;
use dcp_core::{Storage, Value};
use dcp_formats::torch_save::encode_value;
use dcp_megatron::disk::{COMMON_FILE, COMMON_OBJECT, COMMON_STATE, TRACKER};
use dcp_megatron::{MegatronCheckpoint, MegatronError, MegatronOpenOptions, MegatronRun, Tracked};

use crate::support::{block_on, fixture, get, in_memory, names, put, remove, stored};

fn open(storage: &Arc<dyn Storage>) -> Result<MegatronCheckpoint, MegatronError> {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default()))
}

fn tolerantly(storage: &Arc<dyn Storage>) -> Result<MegatronCheckpoint, MegatronError> {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default().with_tolerant(true)))
}

/// Why it does not open, causes and all.
fn refusal(storage: &Arc<dyn Storage>) -> String {
    error_chain(&open(storage).unwrap_err())
}

#[test]
fn metadata_json_that_is_missing_empty_or_lying_is_told_apart() {
    let storage = stored("tp2_basic");
    for (json, said) in [
        ("", "it is empty"),
        ("{\"sharded_backend\": \"torch_", "EOF"),
        ("[1]", "no JSON object"),
        (r#"{"sharded_backend": "tensorstore"}"#, "\"tensorstore\" version 1"),
        (r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 2}"#, "version 2"),
        (r#"{"sharded_backend": "torch_dist", "common_backend": "msgpack"}"#, "msgpack"),
    ] {
        put(&*storage, "metadata.json", json.into());
        let error = refusal(&storage);
        assert!(error.contains(said) && error.contains("metadata.json"), "{json}: {error}");
    }
    put(&*storage, "metadata.json", vec![b' '; 2 << 20]);
    assert!(refusal(&storage).contains("more than it can have"));

    remove(&*storage, "metadata.json");
    let error = refusal(&storage);
    assert!(error.contains("no metadata.json") && error.contains("torch_dcp"), "{error}");

    put(&*storage, "metadata.json", br#"{"sharded_backend": "torch_dist"}"#.to_vec());
    remove(&*storage, ".metadata");
    let error = refusal(&storage);
    assert!(error.contains("says that this is") && error.contains("no .metadata"), "{error}");
}

#[test]
fn an_empty_folder_and_a_foreign_one_are_no_checkpoints() {
    let empty: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    assert!(matches!(open(&empty), Err(MegatronError::NotACheckpoint { .. })));
    assert!(refusal(&empty).contains("is empty"));
    put(&*empty, "model.safetensors", b"x".to_vec());
    assert!(refusal(&empty).contains("safetensors"));
    put(&*empty, "metadata.json", br#"{"format": "pt"}"#.to_vec());
    assert!(refusal(&empty).contains("no \"sharded_backend\""));
}

#[test]
fn a_common_state_that_cannot_be_read_costs_only_itself_of_a_tolerant_reader() {
    let whole = get(&*stored("tp2_basic"), COMMON_FILE).unwrap();
    let half = whole[..whole.len() / 2].to_vec();
    let list = encode_value(&Value::List(vec![1.into()]), "common").unwrap().to_vec();
    for (bytes, said) in [
        (Some(half), "common.pt"),
        (Some(b"PK\x03\x04".to_vec()), "common.pt"),
        (Some(Vec::new()), "common.pt"),
        (Some(list), "not a dict but list"),
        (None, "is gone"),
    ] {
        let storage = stored("tp2_basic");
        remove(&*storage, COMMON_FILE);
        if let Some(bytes) = bytes {
            put(&*storage, COMMON_FILE, bytes);
        }
        let error = refusal(&storage);
        assert!(error.contains(said), "{error}");
        let opened = tolerantly(&storage).unwrap();
        assert_eq!(opened.damage().len(), 1, "{:?}", opened.damage());
        assert!(opened.damage()[0].contains(said), "{:?}", opened.damage());
        assert!(opened.common().is_empty() && opened.args().is_none());
        assert!(block_on(opened.source().metadata()).unwrap().get("col.weight").is_some());
    }
}

/// Every byte of the pickle in turn; nothing may panic, and nothing is ever executed.
#[test]
fn a_damaged_common_state_never_does_more_than_fail() {
    let storage = stored("objects_grid");
    let whole = get(&*storage, COMMON_FILE).unwrap();
    for at in (0..whole.len()).step_by(3) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        put(&*storage, COMMON_FILE, damaged);
        let _ = tolerantly(&storage).unwrap();
        let _ = open(&storage);
    }
}

#[test]
fn a_damaged_index_never_does_more_than_fail() {
    let storage = stored("v015_flattened");
    let whole = get(&*storage, ".metadata").unwrap();
    for at in (0..whole.len()).step_by(41) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        put(&*storage, ".metadata", damaged);
        let _ = open(&storage);
        let _ = tolerantly(&storage);
        put(&*storage, ".metadata", whole[..at].to_vec());
        assert!(open(&storage).is_err());
    }
}

#[test]
fn an_object_of_an_unknown_class_in_the_common_state_is_shown_and_kept() {
    let storage = stored("run_torch_dist_dp2");
    let opened = open(&storage).unwrap();
    let backend = opened.args().unwrap().get("attention_backend").unwrap().clone();
    assert_eq!(backend.kind(), "AttnBackend");
    assert!(matches!(opened.common_value(), Value::Opaque(_)));
    let args = opened.args().unwrap();
    assert_eq!((args.num_layers(), args.world_size()), (Some(1), Some(2)));
    assert_eq!(args.params_dtype(), Some(dcp_core::DType::BFloat16));
}

#[test]
fn where_both_places_have_a_common_state_the_file_counts() {
    let storage = stored("head020_basic_integrity");
    let dict = Value::Dict(Dict::from([("iteration", 77)]));
    put(&*storage, COMMON_FILE, encode_value(&dict, "common").unwrap().to_vec());
    let opened = open(&storage).unwrap();
    assert_eq!(opened.common().get("iteration").and_then(Value::as_int), Some(77));
    assert!(opened.warnings()[0].contains("both a common.pt"), "{:?}", opened.warnings());
    let metadata = block_on(opened.source().metadata()).unwrap();
    assert!(metadata.get(COMMON_OBJECT).is_none() && metadata.get(COMMON_STATE).is_some());
}

/// Megatron-Core notes the logical shape of what it stored in another one; a note that does not go
/// with the tensor is damage.
#[test]
fn a_flattened_tensor_that_does_not_fit_is_named() {
    let storage = stored("v015_flattened");
    let mut bytes = get(&*storage, ".metadata").unwrap();
    // BININT1 6, BININT1 8, TUPLE2: the shape of w.row in mcore_data.
    let shape = [b'K', 6, b'K', 8, 0x86];
    let found = bytes.windows(5).position(|window| window == shape).unwrap();
    bytes[found + 3] = 9;
    put(&*storage, ".metadata", bytes);
    let error = refusal(&storage);
    assert!(error.contains("was saved flattened") && error.contains("[6, 9]"), "{error}");
    let opened = tolerantly(&storage).unwrap();
    assert!(opened.damage().iter().any(|damage| damage.contains("[6, 9]")));
}

fn run() -> Arc<dyn Storage> {
    let storage = stored("run_torch_dist_dp2");
    for name in names(&*storage) {
        if let Some(file) = name.strip_prefix("iter_0000010/") {
            let bytes = get(&*storage, &name).unwrap();
            put(&*storage, &format!("iter_0000020/{file}"), bytes.clone());
            put(&*storage, &format!("release/{file}"), bytes);
        }
    }
    storage
}

#[test]
fn a_run_opens_as_its_tracker_says() {
    let storage = run();
    for (tracker, which) in [
        ("10", Tracked::Iteration(10)),
        (" 20\n", Tracked::Iteration(20)),
        ("release", Tracked::Release),
    ] {
        put(&*storage, TRACKER, tracker.into());
        let opened = open(&storage).unwrap();
        assert_eq!(opened.which(), Some(which));
        assert_eq!(opened.warnings(), [""; 0]);
        let folder = which.folder().unwrap();
        let inner = MegatronRun::new(Arc::clone(&storage)).checkpoint(which).unwrap();
        assert_eq!(open(&inner).unwrap().which(), None, "{folder}");
    }
}

#[test]
fn where_the_tracked_one_is_not_complete_the_last_complete_one_is_opened_and_said() {
    let storage = run();
    remove(&*storage, "iter_0000020/metadata.json");
    put(&*storage, TRACKER, b"20".to_vec());
    let opened = open(&storage).unwrap();
    assert_eq!(opened.which(), Some(Tracked::Iteration(10)));
    let warning = &opened.warnings()[0];
    assert!(warning.contains("says 20") && warning.contains("iter_0000010 is opened"), "{warning}");
    put(&*storage, TRACKER, b"30".to_vec());
    assert_eq!(open(&storage).unwrap().which(), Some(Tracked::Iteration(10)));
    remove(&*storage, TRACKER);
    assert_eq!(open(&storage).unwrap().which(), Some(Tracked::Iteration(10)));
}

#[test]
fn a_tracker_that_makes_no_sense_stops_everything() {
    let storage = run();
    for text in [&b""[..], b"iter_10", b"\xff\xfe", &[b'9'; 100]] {
        put(&*storage, TRACKER, text.to_vec());
        assert!(matches!(open(&storage), Err(MegatronError::Tracker(_))));
        assert!(refusal(&storage).contains(TRACKER));
    }
}

#[test]
fn the_checkpoints_of_a_run_are_listed_with_what_they_lack() {
    let storage = run();
    put(&*storage, TRACKER, b"20".to_vec());
    remove(&*storage, "iter_0000020/metadata.json");
    let run = MegatronRun::new(Arc::clone(&storage));
    let all = block_on(run.checkpoints()).unwrap();
    let seen: Vec<_> = all.iter().map(|c| (c.which, c.is_complete())).collect();
    assert_eq!(
        seen,
        [(Tracked::Release, true), (Tracked::Iteration(10), true), (Tracked::Iteration(20), false)]
    );
    let problem = all[2].entry.problem.as_deref().unwrap();
    assert!(problem.contains("no metadata.json"), "{problem}");
    assert_eq!(block_on(run.latest()).unwrap().unwrap().which, Tracked::Iteration(10));
}

#[test]
fn a_run_without_a_complete_checkpoint_says_why() {
    let storage: Arc<dyn Storage> = in_memory(&fixture("run_torch_dist_dp2"));
    remove(&*storage, "iter_0000010/metadata.json");
    let error = refusal(&storage);
    assert!(error.contains("says 10") && error.contains("no metadata.json"), "{error}");
}
