//! Runs of every framework in memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_core::format::Subfolder;
use dcp_core::registry::StorageRegistry;
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt as _};
use dcp_jobs::Opener;
use dcp_jobs::run::{PrunePlan, Run, RunStep, StepNaming};
use dcp_testing::{fixture, key};
use futures_util::{FutureExt as _, TryStreamExt as _};

// A storage in memory answers at once, also within a runtime.

pub(crate) fn put(storage: &dyn Storage, name: &str, bytes: Vec<u8>) {
    let put = storage.put(&key(name), bytes.into(), PutMode::Overwrite).now_or_never();
    put.unwrap().unwrap();
}

pub(crate) fn get(storage: &dyn Storage, name: &str) -> Vec<u8> {
    storage.read_all(&key(name)).now_or_never().unwrap().unwrap().to_vec()
}

pub(crate) fn names(storage: &dyn Storage) -> Vec<String> {
    let all: Vec<_> = storage.list(None).try_collect().now_or_never().unwrap().unwrap();
    let mut names: Vec<_> = all.into_iter().map(|meta: ObjectMeta| meta.key.to_string()).collect();
    names.sort();
    names
}

pub(crate) fn put_folder(storage: &dyn Storage, from: &Path, folder: &str) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let name = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        match entry.path().is_dir() {
            true => put_folder(storage, &entry.path(), &name),
            false => put(storage, &name, fs::read(entry.path()).unwrap()),
        }
    }
}

/// Opens `storage` as `memory://run`.
pub(crate) fn opener_of(storage: &Arc<dyn Storage>) -> Opener {
    let mut storages = StorageRegistry::empty();
    let root = Arc::clone(storage);
    storages.register("memory", move |request| {
        let path = request.url.trim_start_matches("memory://run").trim_matches('/');
        Ok(match path {
            "" => Arc::clone(&root),
            path => Arc::new(Subfolder::new(Arc::clone(&root), key(path))),
        })
    });
    dcp::opener(storages)
}

pub(crate) fn run_in(storage: &Arc<dyn Storage>) -> Run {
    opener_of(storage).run("memory://run")
}

/// A framework that saves runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Framework {
    PyTorch,
    Olmo,
    Megatron,
    HuggingFace,
}

pub(crate) const FRAMEWORKS: [Framework; 4] =
    [Framework::PyTorch, Framework::Olmo, Framework::Megatron, Framework::HuggingFace];

impl Framework {
    pub(crate) fn naming(self) -> StepNaming {
        match self {
            Self::PyTorch => StepNaming::Dash,
            Self::Olmo => StepNaming::Plain,
            Self::Megatron => StepNaming::Iteration,
            Self::HuggingFace => StepNaming::Checkpoint,
        }
    }

    /// Puts a whole checkpoint there, as the framework saves it.
    pub(crate) fn save(self, storage: &dyn Storage, step: u64) {
        let folder = self.naming().folder(step);
        match self {
            Self::PyTorch => put_folder(storage, &fixture("pytorch/t21_plain"), &folder),
            Self::Olmo => {
                let model = format!("{folder}/model_and_optim");
                put_folder(storage, &fixture("olmo/fsdp2-2rank-flat/ckpt"), &model);
                put_folder(storage, &fixture("olmo/trainer/step3"), &folder);
            }
            Self::Megatron => {
                let from = fixture("megatron/run_torch_dist_dp2/iter_0000010");
                put_folder(storage, &from, &folder);
                let tracker = format!("{step}").into_bytes();
                put(storage, "latest_checkpointed_iteration.txt", tracker);
            }
            Self::HuggingFace => {
                put_folder(storage, &fixture("hf/consolidated_index_4r/ckpt"), &folder);
            }
        }
    }

    /// A run in memory. Each file is a millisecond older than the next, however coarse the clock is.
    pub(crate) fn run(self, steps: impl IntoIterator<Item = u64>) -> Arc<MemoryStorage> {
        let (started, written) = (SystemTime::now(), AtomicU64::new(0));
        let age = move || Duration::from_millis(written.fetch_add(1, Ordering::Relaxed));
        let storage = MemoryStorage::new().clock(move || started + age());
        steps.into_iter().for_each(|step| self.save(&storage, step));
        Arc::new(storage)
    }
}

pub(crate) async fn steps(run: &Run) -> Vec<RunStep> {
    run.steps().await.unwrap()
}

pub(crate) fn numbers<'a>(steps: impl IntoIterator<Item = &'a RunStep>) -> Vec<u64> {
    steps.into_iter().map(|one| one.step).collect()
}

pub(crate) fn complete(steps: &[RunStep]) -> Vec<u64> {
    numbers(steps.iter().filter(|one| one.is_complete()))
}

pub(crate) fn reason(plan: &PrunePlan, step: u64) -> &str {
    &plan.steps.iter().find(|one| one.step.step == step).unwrap().decision.reason
}

/// The files of a folder, with their bytes.
pub(crate) fn files(storage: &dyn Storage, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let inside = |name: &String| name.starts_with(&format!("{folder}/"));
    names(storage).into_iter().filter(inside).map(|n| (n.clone(), get(storage, &n))).collect()
}
