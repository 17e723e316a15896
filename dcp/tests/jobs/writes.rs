//! Jobs on whole checkpoints, as a program uses them.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use dcp_conformance::{MemoryStorage, StallStorage};
use dcp_core::error::StorageOp;
use dcp_core::format::{Subfolder, WantedKeys};
use dcp_core::location::Location;
use dcp_core::metadata::Entry;
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{DType, Key, Payload, Storage, StorageError, StorageErrorKind};
use dcp_jobs::keys::StatePart;
use dcp_jobs::rollback::Undone;
use dcp_jobs::{
    Checkpoint, Destination, ErrorKind, Format, JobOptions, Keys, Need, Rollback, TargetOptions,
};
use dcp_storage_fs::FsStorage;
use futures_util::StreamExt;

fn storages() -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    storages
}

fn fixture(name: &str) -> String {
    dcp_testing::fixture(name).display().to_string()
}

async fn open(url: &str) -> Checkpoint {
    dcp::opener(storages()).open(url).await.unwrap()
}

#[tokio::test]
async fn a_conversion_casts_floats_and_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("new/copy").display().to_string();
    let checkpoint = open(&fixture("pytorch/fsdp2_adam_2r")).await;
    let written =
        checkpoint.convert(&target).to(Format::Dcp).dtype(DType::BFloat16).run().await.unwrap();
    let copy = open(&target).await;
    let metadata = copy.source().metadata().await.unwrap();
    assert_eq!(written.report.tensors + written.report.objects, metadata.len());
    for (fqn, entry) in metadata.iter() {
        let Entry::Tensor(tensor) = entry else { continue };
        let kept = fqn.ends_with(".step") || tensor.dtype == DType::Int64;
        assert_eq!(tensor.dtype == DType::BFloat16, !kept, "{fqn}: {}", tensor.dtype);
    }
    assert!(copy.verify().deep(true).run().await.unwrap().ok);
}

#[tokio::test]
async fn targets_that_touch_something_are_refused_by_kind() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    dcp_testing::copy_folder(&dcp_testing::fixture("pytorch/t21_plain"), &source);
    let at = |name: &str| folder.path().join(name).display().to_string();
    let checkpoint = open(&at("source")).await;
    let refused = async |target: &str, format| {
        checkpoint.convert(at(target)).to(format).run().await.unwrap_err().kind()
    };
    assert_eq!(refused("source", Format::Dcp).await, ErrorKind::SameTarget);
    assert_eq!(refused("./source/", Format::HuggingFace).await, ErrorKind::SameTarget);
    assert_eq!(refused("source/inside", Format::Dcp).await, ErrorKind::Overlap);
    assert_eq!(refused("source/.metadata", Format::Safetensors).await, ErrorKind::Overlap);
    assert_eq!(refused("", Format::Dcp).await, ErrorKind::Overlap);

    // What formats own in the folder, named by an index or not.
    fs::write(source.join("config.json"), "{}").unwrap();
    assert_eq!(refused("source/config.json", Format::Safetensors).await, ErrorKind::Overlap);
    fs::remove_file(source.join("config.json")).unwrap();

    let nameless = checkpoint.convert(at("no-format")).run().await.unwrap_err();
    assert_eq!(nameless.kind(), ErrorKind::InvalidOption);
    checkpoint.convert(at("copy")).to(Format::Dcp).run().await.unwrap();
    assert_eq!(refused("copy", Format::Dcp).await, ErrorKind::TargetExists);
    assert_eq!(refused("copy", Format::HuggingFace).await, ErrorKind::OtherCheckpoint);
    assert_eq!(refused("copy", Format::Safetensors).await, ErrorKind::InvalidPlace);
    checkpoint.convert(at("copy")).to(Format::Dcp).overwrite(true).run().await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_opened_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("file"), "text").unwrap();
    let opener = dcp::opener(storages());
    for (url, kind) in [
        (at("nothing"), ErrorKind::NotFound),
        (at(""), ErrorKind::NotACheckpoint),
        (at("file"), ErrorKind::NotACheckpoint),
        ("tape://7".to_owned(), ErrorKind::Unsupported),
    ] {
        assert_eq!(opener.open(&url).await.unwrap_err().kind(), kind, "{url}");
    }
}

/// What is opened to look at is opened again where all of it is needed.
#[tokio::test]
async fn ranks_that_differ_need_a_choice_only_where_all_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("copy.pt").display().to_string();
    let url = fixture("pytorch/no_collectives_2r");
    let opener = dcp::opener(storages());
    let undecided = opener.clone().need(Need::Whole).open(&url).await.unwrap_err();
    assert_eq!(undecided.kind(), ErrorKind::Undecided);
    assert!(undecided.hint().unwrap().contains("`Opener::rank`"), "{undecided:?}");

    let looked_at = opener.open(&url).await.unwrap();
    assert!(!looked_at.notes().is_empty());
    let undecided = looked_at.convert(&target).run().await.unwrap_err();
    assert_eq!(undecided.kind(), ErrorKind::Undecided);
    assert!(!Path::new(&target).exists());

    let second = opener.rank(1).open(&url).await.unwrap();
    second.convert(&target).run().await.unwrap();
}

#[tokio::test]
async fn a_checkpoint_of_some_keys_has_no_other_tensor_but_jobs_on_all_do() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("copy.pt").display().to_string();
    let url = fixture("pytorch/fsdp2_adam_2r");
    let opener = dcp::opener(storages());
    let tensors = async |checkpoint: &Checkpoint| {
        let metadata = checkpoint.source().metadata().await.unwrap();
        metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some()).count()
    };
    let all = opener.open(&url).await.unwrap();
    let one = opener.open_keys(&url, WantedKeys::one("model.norm.bias")).await.unwrap();
    assert_eq!(tensors(&one).await, 1);
    let shown = one.inspect().key("model.norm.bias").run().await.unwrap();
    let expected = all.inspect().key("model.norm.bias").run().await.unwrap();
    assert_eq!(shown.summary, expected.summary);

    // The error names what there is.
    let unknown = opener.open_keys(&url, WantedKeys::one("model.norm.bais")).await.unwrap();
    let error = unknown.get("model.norm.bais").run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownKey);
    assert!(error.hint().unwrap().contains("model.norm.bias"), "{error:?}");

    assert_eq!(one.verify().run().await.unwrap(), all.verify().run().await.unwrap());
    one.convert(&target).run().await.unwrap();
    assert_eq!(tensors(&open(&target).await).await, tensors(&all).await);
}

#[tokio::test]
async fn notes_are_heard_at_once_and_returned() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("model").display().to_string();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let said = Arc::clone(&heard);
    let opener = dcp::opener(storages()).on_note(move |note| {
        said.lock().unwrap().push(note.to_owned());
    });
    let checkpoint = opener.open(&fixture("pytorch/fsdp2_adam_2r")).await.unwrap();
    let opened = checkpoint.notes().len();
    let model = checkpoint.convert(&target).to(Format::HuggingFace).run().await.unwrap();
    assert!(
        model.notes.iter().any(|note| note.contains("`StatePart::Everything`")),
        "{:?}",
        model.notes
    );
    assert_eq!(heard.lock().unwrap()[opened..], model.notes);

    // A part that was chosen is not worth a note.
    let keys = Keys::all().part(StatePart::Model);
    let conversion = checkpoint.convert(&target).to(Format::HuggingFace).overwrite(true);
    let notes = conversion.keys(keys).run().await.unwrap().notes;
    assert!(!notes.iter().any(|note| note.contains("`StatePart::Everything`")), "{notes:?}");
}

/// The crate of the format and the job on a checkpoint by its URL have one verdict.
#[tokio::test]
async fn a_shifted_optimizer_is_a_problem_for_every_verify() {
    for (name, is_sound) in [
        ("megatron/gpt_fully_reshardable_multibucket_CORRUPT/ckpt", false),
        ("megatron/gpt_dp2_dp_reshardable/ckpt", true),
    ] {
        let url = fixture(name);
        let storage: Arc<dyn Storage> = Arc::new(FsStorage::open(&url).unwrap());
        let job = JobOptions::default();
        for deep in [false, true] {
            let own = dcp_megatron::verify(&storage, deep, &job).await.unwrap();
            let report = open(&url).await.verify().deep(deep).run().await.unwrap();
            assert_eq!((own.ok, report.ok), (is_sound, is_sound), "{name}, deep: {deep}");
            assert_eq!((own.problems, own.notes), (report.problems, report.notes), "{name}");
        }
    }
}

#[tokio::test]
async fn what_a_cancelled_job_created_is_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("old"), "old").unwrap();
    let key = |name: &str| Key::new(name).unwrap();
    let url = folder.path().display().to_string();
    let open = async || storages().open(&url, Access::Write).await.unwrap();

    let unused = Rollback::new();
    assert_eq!(unused.undo(unused.quiesce().await).await, Undone::Nothing);

    let rollback = Rollback::new();
    let storage = rollback.watch(open().await);
    storage.put(&key("new"), Payload::from("new"), PutMode::Create).await.unwrap();
    assert_eq!(rollback.undo(rollback.quiesce().await).await, Undone::All);
    assert!(!folder.path().join("new").exists() && folder.path().join("old").exists());

    let rollback = Rollback::new();
    let storage = rollback.watch(open().await);
    storage.put(&key("new"), Payload::from("new"), PutMode::Create).await.unwrap();
    storage.put(&key("old"), Payload::from("other"), PutMode::Overwrite).await.unwrap();
    let undone = rollback.undo(rollback.quiesce().await).await;
    assert_eq!(undone, Undone::Replaced(key("old")));
    assert!(folder.path().join("new").exists(), "what replaced the old one may need it");
}

#[tokio::test]
async fn a_tensor_is_saved_under_names_that_say_how() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let checkpoint = open(&fixture("pytorch/t21_plain")).await;
    let metadata = checkpoint.source().metadata().await.unwrap();
    let tensor = metadata.iter().find(|(_, entry)| entry.as_tensor().is_some()).unwrap().0;
    let item = checkpoint.get(&**tensor).run().await.unwrap();
    let (options, job) = (TargetOptions::default(), JobOptions::default());
    for name in ["x.npy", "new/x.safetensors", "x.pt"] {
        item.save(&at(name), &options, &job).await.unwrap();
        let again = item.save(&at(name), &options, &job).await.unwrap_err();
        assert_eq!(again.kind(), ErrorKind::TargetExists, "{name}");
    }
    let nameless = item.save(&at("x"), &options, &job).await.unwrap_err();
    assert_eq!(nameless.kind(), ErrorKind::InvalidOption);
    let unknown = checkpoint.get("no.such.key").run().await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::UnknownKey);

    let shown = checkpoint.inspect().key(&**tensor).run().await.unwrap();
    assert_eq!(shown.summary.keys.len(), 1);
    assert_eq!(
        dcp_megatron::framework::common_state(&checkpoint).await.unwrap_err().kind(),
        ErrorKind::InvalidOption
    );
    let copy = open(&at("new/x.safetensors")).await;
    let report = copy.diff(&copy).run().await.unwrap();
    assert!(report.equal && copy.stats().run().await.unwrap().tensors.len() == 1);
}

#[tokio::test]
async fn every_storage_that_is_opened_passes_the_layers() {
    let opened = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&opened);
    let storages = storages().layer(move |storage, request| {
        let access = request.access;
        seen.lock().unwrap().push(access);
        storage
    });
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("copy").display().to_string();
    let opener = dcp::opener(storages).need(Need::Whole);
    let checkpoint = opener.open(&fixture("pytorch/t21_plain")).await.unwrap();
    checkpoint.reshard(&target).ranks(2).dry_run(true).run().await.unwrap();
    assert!(!opened.lock().unwrap().contains(&Access::Write) && !Path::new(&target).exists());
    checkpoint.reshard(&target).ranks(2).run().await.unwrap();
    assert!(opened.lock().unwrap().contains(&Access::Write));
    let unasked = checkpoint.reshard(&target).run().await.unwrap_err();
    assert_eq!(unasked.kind(), ErrorKind::InvalidOption);
}

/// A conversion that is cancelled at any of its operations leaves nothing once it is taken back.
#[tokio::test]
async fn a_cancelled_conversion_leaves_nothing() {
    let source = fixture("pytorch/t21_plain");
    for operation in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new/model").display().to_string();
        let (found, stalled) = tokio::sync::oneshot::channel();
        let found = Mutex::new(Some(found));
        let storages = storages().layer(move |storage, request| {
            let access = request.access;
            let opened = access == Access::Write;
            let Some(found) = opened.then(|| found.lock().unwrap().take()).flatten() else {
                return storage;
            };
            let storage = StallStorage::new(storage, operation);
            found.send(storage.clone()).unwrap();
            Arc::new(storage)
        });
        let checkpoint = dcp::opener(storages).open(&source).await.unwrap();
        let rollback = Rollback::new();
        let destination = Destination::new(&target).to(Format::HuggingFace).max_shard_bytes(600);
        let work = checkpoint.convert(destination).rollback(&rollback).run();
        let stopped = async {
            let stalled = stalled.await.unwrap();
            stalled.stopped().await;
            // What is getting its name gets it; nothing else does.
            let quiet = rollback.quiesce();
            stalled.resume();
            quiet.await
        };
        let quiet = tokio::select! {
            biased;
            quiet = stopped => quiet,
            written = work => {
                written.unwrap();
                assert!(operation > 5, "only {operation} operations were tried");
                break;
            }
        };
        assert_eq!(rollback.undo(quiet).await, Undone::All, "operation {operation}");
        let Ok(left) = storages_of(&target).await else { continue };
        let left: Vec<_> = left.list(None).map(|object| object.unwrap().key).collect().await;
        assert!(left.is_empty(), "operation {operation}: {left:?}");
    }
}

async fn storages_of(target: &str) -> Result<Arc<dyn Storage>, StorageError> {
    storages().open(target, Access::Read).await
}

/// Folders of one storage in memory as `mem://bucket/…`, and, by another name, as `alias://…`.
fn buckets(memory: &Arc<dyn Storage>) -> StorageRegistry {
    let mut storages = storages();
    for (scheme, start) in [("mem", "mem://bucket/"), ("alias", "alias://")] {
        let memory = Arc::clone(memory);
        storages.register(scheme, move |request| {
            let folder = request.url.strip_prefix(start).unwrap_or_default();
            let folder = folder.split('/').filter(|name| !name.is_empty() && *name != ".");
            Ok(match folder.collect::<Vec<_>>().join("/") {
                // A file is no folder to open.
                file if file.ends_with(".safetensors") => {
                    let kind = StorageErrorKind::NotFound;
                    return Err(StorageError::new(kind, StorageOp::Open, None));
                }
                folder if folder.is_empty() => Arc::clone(&memory),
                folder => Arc::new(Subfolder::new(Arc::clone(&memory), Key::new(folder)?)),
            })
        });
    }
    storages.register_locator("alias", |url| {
        let url = url.replacen("alias://", "mem://bucket/", 1);
        Location::of_url(&url).into_iter().collect()
    });
    storages
}

#[tokio::test]
async fn targets_in_any_storage_are_kept_apart_from_their_source() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    for entry in fs::read_dir(fixture("pytorch/t21_plain")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let bytes = fs::read(entry.path()).unwrap();
        let key = Key::new(format!("run/step1/{name}")).unwrap();
        memory.put(&key, bytes.into(), PutMode::Create).await.unwrap();
    }
    let opener = dcp::opener(buckets(&memory));
    let checkpoint = opener.open("mem://bucket/run/step1").await.unwrap();
    let before = checkpoint.source().metadata().await.unwrap();
    for (target, format, kind) in [
        ("mem://bucket/run/step1/", Format::Dcp, ErrorKind::SameTarget),
        ("mem://bucket/run/./step1", Format::HuggingFace, ErrorKind::SameTarget),
        ("alias://run/step1", Format::Dcp, ErrorKind::SameTarget),
        ("mem://bucket/run/step1/new", Format::Dcp, ErrorKind::Overlap),
        ("alias://run/step1/new", Format::HuggingFace, ErrorKind::Overlap),
        ("mem://bucket/run", Format::Dcp, ErrorKind::Overlap),
        ("mem://bucket/run/step1/.metadata", Format::Safetensors, ErrorKind::Overlap),
        ("alias://run/step1/.metadata", Format::Safetensors, ErrorKind::Overlap),
    ] {
        let conversion = checkpoint.convert(Destination::new(target).overwrite(true));
        let error = conversion.to(format).run().await.unwrap_err();
        assert_eq!(error.kind(), kind, "{target}: {error}");
    }
    let after = opener.open("alias://run/step1").await.unwrap().source().metadata().await.unwrap();
    assert_eq!(after.to_wire(), before.to_wire());
    for (target, format) in [
        ("mem://bucket/run/step10", Format::Dcp),
        ("mem://bucket/run/step1/free.safetensors", Format::Safetensors),
    ] {
        checkpoint.convert(target).to(format).run().await.unwrap();
    }
    assert!(memory.contains(&Key::new("run/step10/.metadata").unwrap()).await.unwrap());
}

#[tokio::test]
async fn reports_have_the_notes_of_their_jobs() {
    let corrupt = fixture("megatron/gpt_fully_reshardable_multibucket_CORRUPT/ckpt");
    let checkpoint = open(&corrupt).await;
    let stats = checkpoint.stats().run().await.unwrap();
    let diff = checkpoint.diff(&checkpoint).run().await.unwrap();
    for (notes, count) in [(stats.notes, 1), (diff.notes, 2)] {
        assert_eq!(notes.len(), count, "{notes:?}");
        assert!(
            notes.iter().all(|note| note.contains("`Checkpoint::verify` says what")),
            "{notes:?}"
        );
    }
}

/// A job that does nothing with an option refuses it.
#[tokio::test]
async fn options_of_plug_ins_that_a_job_does_not_pass_on_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let source = fixture("pytorch/fsdp2_adam_2r");
    let two = [open(&source).await, open(&source).await];
    let identical = dcp_jobs::view::Duplicates::Identical;
    let merge =
        || dcp_jobs::combine::merge(&two, at("merged")).to(Format::Dcp).duplicates(identical);
    let mapping = dcp_mapping::MappingOptions::new().untie(true);
    let repaired = dcp_megatron::framework::OptimizerOptions::new().repair(true);
    let errors = [
        merge().with(dcp_olmo::OptimizerLayout::Flat).run().await.unwrap_err(),
        merge().with(mapping.clone()).run().await.unwrap_err(),
        merge().with(repaired).run().await.unwrap_err(),
        two[0].reshard(at("reshard")).ranks(2).with(mapping.clone()).run().await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
    // A program without the mapping says so, and does not keep the names in silence.
    let plain = dcp_jobs::Opener::new(storages()).open(&source).await.unwrap();
    let error = plain.convert(at("hf")).to(Format::HuggingFace).with(mapping).run().await;
    assert!(error.unwrap_err().to_string().contains("is no plug-in of this program"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// The name of a framework's format is its target, too: what the format alone writes has no common state.
#[tokio::test]
async fn a_format_of_a_framework_is_written_by_the_framework() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let source = open(&fixture("megatron/tp2_basic/ckpt")).await;
    for name in ["torch-dist", "megatron"] {
        source.convert(at(name)).to(Format::Registered(name)).run().await.unwrap();
        let written = open(&at(name)).await;
        assert!(written.of_framework().unwrap().arguments().is_some(), "{name}");
        assert!(written.verify().deep(true).run().await.unwrap().ok, "{name}");
    }
    // Nothing reads a configuration here.
    let two = [open(&fixture("pytorch/t21_plain")).await];
    let target = Destination::new(at("merged")).to(Format::Registered("torch-dist"));
    let error = dcp_jobs::combine::merge(&two, target.config("models")).run().await.unwrap_err();
    assert!(error.message().starts_with("`Destination::config` is for a mapping"), "{error}");
}
