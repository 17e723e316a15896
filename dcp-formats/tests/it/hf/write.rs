//! Folders that are written, replaced, refused, and left alone when that fails.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
use dcp_core::checkpoint::DataSource;
use dcp_core::error::StateProblem;
use dcp_core::storage::OwnThreads;
use dcp_core::{CheckpointError, DType, Payload, Storage, StorageErrorKind};
use dcp_formats::hf::{
    CONFIG_ASIDE, HfLayout, HfPart, HfPlan, HfReader, HfWriteOptions, HfWritten, IndexFile,
    write_folder,
};

use crate::harness::{block_on, get, key, names, put};
use crate::hf::folder::{Tensors, counting, data, file, tensors};

const INDEX: &str = "model.safetensors.index.json";

/// The most bytes of a file: two tensors, or all of them.
const TWO: u64 = 25;
const ALL: u64 = 1 << 20;

/// Three tensors of ten bytes, in files of at most this many.
fn plan(first: u8, most: u64) -> (HfPlan, Vec<Vec<u8>>) {
    let parts = ["a", "b", "c"].map(|fqn| HfPart::whole(fqn, DType::UInt8, [10]));
    let bytes = (0..3).map(|n| (first + 10 * n..first + 10 * n + 10).collect());
    (HfLayout::MaxFileBytes(most).plan(parts.to_vec()).unwrap(), bytes.collect())
}

fn write(
    storage: &Arc<MemoryStorage>,
    first: u8,
    overwrite: bool,
) -> Result<HfWritten, CheckpointError> {
    write_in(storage, first, overwrite, TWO)
}

fn write_in(
    storage: &Arc<MemoryStorage>,
    first: u8,
    overwrite: bool,
    most: u64,
) -> Result<HfWritten, CheckpointError> {
    let (plan, bytes) = plan(first, most);
    let mut options = HfWriteOptions::default();
    options.overwrite = overwrite;
    let shared = Arc::clone(storage) as Arc<dyn Storage>;
    block_on(write_folder(&shared, &plan, data(bytes), &options, None))
}

fn read(storage: &Arc<MemoryStorage>) -> Tensors {
    tensors(&HfReader::new(Arc::clone(storage) as _)).unwrap()
}

fn check(storage: &Arc<MemoryStorage>, first: u8) {
    let found = read(storage);
    for (n, fqn) in (0..).zip(["a", "b", "c"]) {
        let expected: Vec<u8> = (first + 10 * n..first + 10 * n + 10).collect();
        assert_eq!(found[fqn].to_vec().unwrap(), expected, "{fqn}");
    }
}

#[test]
fn files_and_then_the_index() {
    let storage = Arc::new(MemoryStorage::new());
    let written = write(&storage, 0, false).unwrap();
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX];
    assert_eq!(names(&*storage), files);
    let named: Vec<_> = written.files.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(named, files);
    for (key, byte_len) in &written.files {
        assert_eq!(get(&*storage, key.as_str()).len() as u64, *byte_len);
    }
    let index = IndexFile::parse(&get(&*storage, INDEX)).unwrap();
    assert_eq!((index.total_size, index.weight_map["c"].as_str()), (Some(30), files[1]));
    check(&storage, 0);
}

#[test]
fn a_model_that_is_there_is_refused_before_anything_is_written() {
    let with = |put_into: &dyn Fn(&MemoryStorage)| {
        let storage = Arc::new(MemoryStorage::new());
        put_into(&storage);
        let before = names(&*storage);
        let error = write(&storage, 0, false).unwrap_err();
        let CheckpointError::Storage(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), StorageErrorKind::AlreadyExists);
        assert_eq!(names(&*storage), before);
    };
    let tensor_file = |storage: &MemoryStorage, name: &str| {
        let (item, bytes) = counting("x", &[3], 0);
        file(storage, name, &[(item, bytes, None)]);
    };
    with(&|storage| put(storage, INDEX, b"{}".to_vec()));
    with(&|storage| tensor_file(storage, "model-00002-of-00002.safetensors"));
    // Loaders would take it instead of the index.
    with(&|storage| tensor_file(storage, "model.safetensors"));
    // Half of another model.
    with(&|storage| tensor_file(storage, "model-00007-of-00009.safetensors"));
}

#[test]
fn other_files_are_in_nobodys_way() {
    let storage = Arc::new(MemoryStorage::new());
    put(&*storage, "config.json", b"{}".to_vec());
    put(&*storage, "adapter.safetensors", b"not one".to_vec());
    write(&storage, 0, false).unwrap();
    check(&storage, 0);
    let written = write(&storage, 100, true).unwrap();
    assert_eq!(written.removed.len(), 2);
    assert_eq!(get(&*storage, "config.json"), "{}");
    assert_eq!(get(&*storage, "adapter.safetensors"), "not one");
}

#[test]
fn a_model_is_replaced_by_one_of_other_names_and_back() {
    let storage = Arc::new(MemoryStorage::new());
    write(&storage, 0, true).unwrap();
    let written = write(&storage, 100, true).unwrap();
    let tagged = ["model-g1-00001-of-00002.safetensors", "model-g1-00002-of-00002.safetensors"];
    assert_eq!(names(&*storage), [tagged[0], tagged[1], INDEX]);
    assert_eq!(written.removed.len(), 2);
    assert_eq!(written.left, []);
    check(&storage, 100);
    write(&storage, 200, true).unwrap();
    assert_eq!(names(&*storage)[0], "model-00001-of-00002.safetensors");
    assert_eq!(names(&*storage).len(), 3);
    check(&storage, 200);
}

/// Loaders of both kinds take the one file and no index.
#[test]
fn a_model_in_one_file_has_no_index_and_leaves_none() {
    let storage = Arc::new(MemoryStorage::new());
    let single = "model.safetensors";
    write(&storage, 0, true).unwrap();
    let written = write_in(&storage, 100, true, ALL).unwrap();
    assert_eq!((names(&*storage), written.index), (vec![single.to_owned()], None));
    let removed: Vec<_> = written.removed.iter().map(|key| key.as_str()).collect();
    let old = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(removed, [INDEX, old[0], old[1]]);
    check(&storage, 100);
    assert!(write_in(&storage, 50, false, ALL).is_err());
    write_in(&storage, 50, true, ALL).unwrap();
    assert_eq!(names(&*storage), [single]);
    check(&storage, 50);
    let written = write(&storage, 0, true).unwrap();
    assert_eq!((written.removed, names(&*storage).len()), (vec![key(single)], 3));
    check(&storage, 0);
}

/// As transformers does: an index beside a `model.safetensors` is left from another model.
#[test]
fn an_index_beside_a_model_in_one_file_is_not_read() {
    let storage = Arc::new(MemoryStorage::new());
    write(&storage, 0, true).unwrap();
    let other = Arc::new(MemoryStorage::new());
    write_in(&other, 100, true, ALL).unwrap();
    put(&*storage, "model.safetensors", get(&*other, "model.safetensors").to_vec());
    check(&storage, 100);
    put(&*storage, INDEX, b"{}".to_vec());
    check(&storage, 100);
    // One that names the file is its index.
    let map = r#"{"weight_map": {"a": "model.safetensors", "x": "gone.safetensors"}}"#;
    put(&*storage, INDEX, map.as_bytes().to_vec());
    assert!(tensors(&HfReader::new(Arc::clone(&storage) as _)).is_err());
}

#[test]
fn an_old_single_file_is_replaced_too() {
    let storage = Arc::new(MemoryStorage::new());
    let (item, bytes) = counting("x", &[3], 0);
    file(&*storage, "model.safetensors", &[(item, bytes, None)]);
    let written = write(&storage, 0, true).unwrap();
    assert_eq!(written.removed, [key("model.safetensors")]);
    check(&storage, 0);
}

/// An index is not trusted with what is removed.
#[test]
fn only_tensor_files_at_the_top_are_removed() {
    let storage = Arc::new(MemoryStorage::new());
    for name in ["config.json", "sub/x.safetensors", "y.safetensors"] {
        put(&*storage, name, b"x".to_vec());
    }
    let map =
        r#"{"weight_map": {"a": "config.json", "b": "sub/x.safetensors", "c": "y.safetensors"}}"#;
    put(&*storage, INDEX, map.as_bytes().to_vec());
    let written = write(&storage, 0, true).unwrap();
    assert_eq!(written.removed, [key("y.safetensors")]);
    check(&storage, 0);
}

/// Data that fails at one item.
#[derive(Debug)]
struct Broken {
    inner: Arc<crate::harness::Source>,
    at: usize,
}

#[async_trait]
impl DataSource for Broken {
    async fn resolve(
        &self,
        item: usize,
        range: std::ops::Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        if item == self.at {
            let problem = "broken on purpose".to_owned();
            return Err(StateProblem::NotStorable { problem }.of("w").into());
        }
        self.inner.resolve(item, range).await
    }

    fn segment_bytes(&self) -> u64 {
        self.inner.segment_bytes()
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

#[test]
fn a_failure_leaves_the_old_model_and_nothing_else() {
    let ways = [(0, 1, TWO), (2, 1, TWO), (0, 4, TWO), (2, 4, TWO), (2, 1, ALL)];
    let all = ways.into_iter().flat_map(|way| [(way, TWO), (way, ALL)]);
    for ((at, parallelism, most), old) in all {
        let storage = Arc::new(MemoryStorage::new());
        write_in(&storage, 7, false, old).unwrap();
        let before = names(&*storage);
        let (plan, bytes) = plan(100, most);
        let broken = Arc::new(Broken { inner: data(bytes), at });
        let mut options = HfWriteOptions::default();
        (options.overwrite, options.parallelism) = (true, parallelism);
        let shared = Arc::clone(&storage) as Arc<dyn Storage>;
        let error = block_on(write_folder(&shared, &plan, broken, &options, None)).unwrap_err();
        assert!(error.to_string().contains("broken on purpose"), "{error}");
        assert_eq!(names(&*storage), before);
        check(&storage, 7);
    }
}

#[test]
fn ranks_parts_are_written_as_pytorch_does() {
    let storage = Arc::new(MemoryStorage::new());
    let part =
        |fqn: &str, rows, at, rank| HfPart::part_of(fqn, DType::UInt8, [rows, 2], [at, 0], rank);
    let parts = vec![part("a", 2, 0, 0), part("a", 1, 2, 1), part("b", 1, 0, 1)];
    let plan = HfLayout::default().plan(parts).unwrap();
    let bytes = data(vec![vec![0, 1, 2, 3], vec![4, 5], vec![6, 7]]);
    let shared = || Arc::clone(&storage) as Arc<dyn Storage>;
    let options = HfWriteOptions::default();
    let written = block_on(write_folder(&shared(), &plan, bytes.clone(), &options, None)).unwrap();
    assert_eq!(written.index, None);
    let files = [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ];
    assert_eq!(names(&*storage), files);
    let found = read(&storage);
    assert_eq!(found["a"].to_vec().unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(found["b"].to_vec().unwrap(), [6, 7]);
    // Without an index, every file counts.
    assert!(block_on(write_folder(&shared(), &plan, bytes, &options, None)).is_err());
}

/// What is no file of the model that is replaced stays, whatever loaders make of it.
#[test]
fn only_files_of_a_model_are_replaced() {
    let others = [
        "adapter.safetensors",
        "model-00003-of-00002.safetensors",
        "model-1-of-2.safetensors",
        "model-part-of-mine.safetensors",
        "model-v2-00001-of-00001.safetensors",
        "shard-x-model-00001-of-00001.safetensors",
    ];
    let series = [
        "model-00001-of-00009.safetensors",
        "model-g2-00001-of-00001.safetensors",
        "shard-00007-model-00001-of-00001.safetensors",
    ];
    let mut options = HfWriteOptions::default();
    options.overwrite = true;
    for distributed in [true, false] {
        let storage = Arc::new(MemoryStorage::new());
        others.iter().chain(&series).for_each(|name| put(&*storage, name, b"old".to_vec()));
        let part = match distributed {
            true => HfPart::part_of("a", DType::UInt8, [2, 2], [0, 0], 0),
            false => HfPart::whole("a", DType::UInt8, [2, 2]),
        };
        let plan = HfLayout::default().plan(vec![part]).unwrap();
        assert_eq!(plan.distributed, distributed);
        let shared = Arc::clone(&storage) as Arc<dyn Storage>;
        let bytes = data(vec![vec![0, 1, 2, 3]]);
        let written = block_on(write_folder(&shared, &plan, bytes, &options, None)).unwrap();
        let removed: Vec<_> = written.removed.iter().map(|key| key.as_str()).collect();
        assert_eq!(removed, series);
        others.iter().for_each(|name| assert_eq!(get(&*storage, name), "old"));
    }
}

/// Types that the format has no name for keep theirs.
#[test]
fn nameless_types_come_back() {
    let storage = Arc::new(MemoryStorage::new());
    let parts = vec![HfPart::whole("c", DType::Complex128, [2])];
    let plan = HfLayout::default().plan(parts).unwrap();
    let bytes: Vec<u8> = (0..32).collect();
    let shared = Arc::clone(&storage) as Arc<dyn Storage>;
    let options = HfWriteOptions::default();
    block_on(write_folder(&shared, &plan, data(vec![bytes.clone()]), &options, None)).unwrap();
    let found = read(&storage);
    assert_eq!((found["c"].dtype(), found["c"].to_vec().unwrap()), (DType::Complex128, bytes));
}

const CONFIG: &str = "config.json";

/// Breaks a storage at an operation.
type Break = fn(FaultStorage, u64) -> FaultStorage;

/// Puts an old model somewhere.
type Fill<'a> = &'a dyn Fn(&Arc<MemoryStorage>);

/// A folder whose writer met a fault, and whether it said that all went well.
struct Met {
    storage: Arc<MemoryStorage>,
    operations: u64,
    outcome: Result<HfWritten, CheckpointError>,
}

/// Writes over what `before` put there, with a fault.
fn met(
    most: u64,
    before: &dyn Fn(&Arc<MemoryStorage>),
    fault: &dyn Fn(FaultStorage) -> FaultStorage,
) -> Met {
    let storage = Arc::new(MemoryStorage::new());
    before(&storage);
    let faulty = fault(FaultStorage::new(Arc::clone(&storage) as _));
    let (plan, bytes) = plan(100, most);
    let mut options = HfWriteOptions::default();
    options.overwrite = true;
    options.beside =
        vec![(key("vocab.txt"), "new words".into()), (key(CONFIG), "the new configuration".into())];
    let shared = Arc::new(faulty.clone()) as Arc<dyn Storage>;
    let outcome = block_on(write_folder(&shared, &plan, data(bytes), &options, None));
    Met { storage, operations: faulty.operations(), outcome }
}

/// What a loader makes of the folder: the first number of its weights, its configuration, and
/// whether all is there.
fn taken(storage: &Arc<MemoryStorage>) -> (Option<u8>, Option<String>) {
    let weights = tensors(&HfReader::new(Arc::clone(storage) as _));
    let first = weights.ok().map(|found| {
        let first = found["a"].to_vec().unwrap()[0];
        check(storage, first);
        first
    });
    let there = names(&**storage).iter().any(|name| name == CONFIG);
    let config = there.then(|| String::from_utf8(get(&**storage, CONFIG).to_vec()).unwrap());
    (first, config)
}

/// Every operation fails in every way, over no model and over models of both kinds.
#[test]
fn weights_and_configuration_are_of_one_model_whatever_fails() {
    // The names of the new model: two files and their index, or one file.
    for (most, files) in [(TWO, 5), (ALL, 3)] {
        of_one_model(most, files);
    }
}

fn of_one_model(most: u64, files: usize) {
    let nothing = |_: &Arc<MemoryStorage>| ();
    let indexed = |storage: &Arc<MemoryStorage>| {
        write(storage, 7, false).unwrap();
        put(&**storage, CONFIG, b"the old configuration".to_vec());
        put(&**storage, "vocab.txt", b"old words".to_vec());
    };
    let single = |storage: &Arc<MemoryStorage>| {
        let tensors = ["a", "b", "c"].map(|name| {
            let at = 7 + 10 * (name.as_bytes()[0] - b'a');
            let (item, bytes) = counting(name, &[10], at);
            (item, bytes, None)
        });
        file(&**storage, "model.safetensors", &tensors);
        put(&**storage, CONFIG, b"the old configuration".to_vec());
    };
    let bare = |storage: &Arc<MemoryStorage>| drop(write(storage, 7, false).unwrap());
    let faults: [(&str, Break); 7] = [
        ("dead", |storage, n| storage.dying_after(n - 1)),
        ("torn", |storage, n| storage.fault(n, Fault::Tear)),
        ("full", |storage, n| storage.full_after(n - 1)),
        ("read-only", |storage, n| storage.read_only_after(n - 1)),
        ("failed", |storage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Other))),
        ("done and failed", |storage, n| storage.fault(n, Fault::FailAfterwards)),
        ("lost", |storage, n| storage.fault(n, Fault::LoseReply)),
    ];
    let bare_single =
        |storage: &Arc<MemoryStorage>| drop(write_in(storage, 7, false, ALL).unwrap());
    let olds: [(&str, Fill<'_>); 5] = [
        ("nothing", &nothing),
        ("indexed", &indexed),
        ("single", &single),
        ("bare", &bare),
        ("bare single", &bare_single),
    ];
    for (old, before) in olds {
        for (how, fault) in &faults {
            let mut seen = [false; 2];
            for n in 1.. {
                let Met { storage, operations, outcome } = met(most, before, &|s| fault(s, n));
                let when = format!("over {old}, {how} at operation {n}: {outcome:?}");
                let (weights, config) = taken(&storage);
                let all = names(&*storage);
                match (weights, config.as_deref()) {
                    (Some(7), Some("the old configuration")) => seen[0] = true,
                    (Some(7), None) if old.starts_with("bare") => seen[0] = true,
                    (None, _) if old == "nothing" => seen[0] = true,
                    (Some(100), Some("the new configuration")) => seen[1] = true,
                    // A reader of ours refuses it, and transformers takes no folder without one.
                    (None, None) => {
                        assert!(all.iter().any(|name| name == CONFIG_ASIDE), "{when}: {all:?}");
                    }
                    // There was none, and the new one comes last.
                    (Some(100), None) if old.starts_with("bare") => {
                        assert!(outcome.is_err(), "{when}")
                    }
                    other => panic!("{when}: {other:?} of {all:?}"),
                }
                if outcome.is_err() && *how == "failed" && weights == Some(7) {
                    let strays: Vec<_> = all.iter().filter(|name| name.contains("g1-")).collect();
                    assert!(strays.is_empty(), "{when}: {strays:?}");
                }
                if outcome.is_ok() {
                    let new = (Some(100), Some("the new configuration"));
                    assert_eq!((weights, config.as_deref()), new, "{when}");
                }
                // The next one gets through, and cleans up.
                let again = Arc::clone(&storage);
                let Met { storage, outcome, .. } = met(
                    most,
                    &|fresh| {
                        for name in names(&*again) {
                            put(&**fresh, &name, get(&*again, &name).to_vec());
                        }
                    },
                    &|storage| storage,
                );
                outcome.unwrap();
                let (weights, config) = taken(&storage);
                assert_eq!(
                    (weights, config.as_deref()),
                    (Some(100), Some("the new configuration"))
                );
                let left = names(&*storage);
                assert_eq!(left.len(), files, "{when}: {all:?}, and then {left:?}");
                if operations < n {
                    assert!(n > 8, "{when}: only {n} operations were tried");
                    break;
                }
            }
            assert_eq!(seen, [true; 2], "{old}, {how}");
        }
    }
}
