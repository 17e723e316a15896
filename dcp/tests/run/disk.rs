//! Runs on a file system.

use std::fs;
#[cfg(unix)]
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dcp_core::Storage;
use dcp_core::registry::StorageRegistry;
use dcp_jobs::run::{KeepLast, PrunePlan, Run, StepOrder};
use dcp_storage_fs::FsStorage;
use dcp_testing::{fixture, key};

use crate::notes::lightning;

fn on_disk(root: &Path) -> Run {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| Ok(Arc::new(FsStorage::open(&request.url)?)));
    dcp::opener(storages).run(root.display().to_string())
}

#[cfg(unix)]
#[tokio::test]
async fn nothing_outside_of_the_run_is_deleted_and_no_empty_folder_stays() {
    let place = tempfile::tempdir().unwrap();
    let (root, outside) = (place.path().join("run"), place.path().join("outside"));
    let logs = place.path().join("logs");
    fs::create_dir(&logs).unwrap();
    fs::write(logs.join("events"), "of a trainer").unwrap();
    let from = fixture("pytorch/t21_plain");
    for step in [2, 3] {
        dcp_testing::copy_folder(&from, &root.join(format!("step-{step}")));
    }
    dcp_testing::copy_folder(&from, &outside);
    // A step that is a link, a link in a step to a folder without data and to a file, and a link to
    // another step.
    symlink(&outside, root.join("step-1")).unwrap();
    symlink(&logs, root.join("step-2/more")).unwrap();
    symlink(outside.join(".metadata"), root.join("step-2/linked")).unwrap();
    symlink("step-3", root.join("step-0")).unwrap();
    fs::create_dir_all(root.join("step-2/empty")).unwrap();
    let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
    let before = (count(&outside), count(&root.join("step-3")));
    let run = on_disk(&root);
    // A linked folder with data may be a part of the step.
    symlink(&outside, root.join("step-2/part")).unwrap();
    let report = run.prune().policy(KeepLast(1)).run().await.unwrap();
    assert!(report.deleted.is_empty(), "{report:?}");
    fs::remove_file(root.join("step-2/part")).unwrap();
    let report = run.prune().policy(KeepLast(1)).run().await.unwrap();
    let deleted: Vec<_> = report.deleted.iter().map(|one| one.step).collect();
    assert_eq!(deleted, [2], "{report:?}");
    assert_eq!((count(&outside), count(&root.join("step-3"))), before);
    assert!(logs.join("events").exists());
    assert!(root.join("step-1").is_symlink() && root.join("step-0").is_symlink());
    assert!(!root.join("step-2/.metadata").exists());
    assert!(!root.join("step-2/empty").exists(), "a folder that was empty before goes, too");

    // Without such links, the folder goes, too.
    dcp_testing::copy_folder(&from, &root.join("step-2"));
    fs::remove_file(root.join("step-2/more")).unwrap();
    fs::remove_file(root.join("step-2/linked")).ok();
    run.prune().policy(KeepLast(1)).by(StepOrder::Step).run().await.unwrap();
    assert!(!root.join("step-2").exists());
}

#[tokio::test]
async fn a_checkpoint_that_a_saver_holds_stays() {
    let place = tempfile::tempdir().unwrap();
    let from = fixture("pytorch/t21_plain");
    for step in [1, 2] {
        dcp_testing::copy_folder(&from, &place.path().join(format!("step-{step}")));
    }
    let storage = FsStorage::open(place.path()).unwrap();
    let held = storage.claim(&key("step-1/.metadata")).await.unwrap();
    let run = on_disk(place.path());
    let report = run.prune().policy(KeepLast(1)).run().await.unwrap();
    assert!(report.deleted.is_empty(), "{report:?}");
    assert!(report.not_deleted[0].reason.starts_with("a save has it"), "{report:?}");
    drop(held);
    let report = run.prune().policy(KeepLast(1)).run().await.unwrap();
    assert_eq!(report.deleted.len(), 1);
    assert!(!place.path().join("step-1").exists());
}

#[cfg(unix)]
#[tokio::test]
async fn what_links_of_the_run_and_of_kept_checkpoints_lead_to_stays() {
    let place = tempfile::tempdir().unwrap();
    let (root, from) = (place.path().join("run"), fixture("pytorch/t21_plain"));
    for step in [5, 10, 20, 30, 40] {
        dcp_testing::copy_folder(&from, &root.join(format!("step-{step}")));
    }
    symlink("step-10", root.join("best")).unwrap();
    symlink(root.join("step-20"), root.join("last")).unwrap();
    // The newest has a file of an older one, which no reader of its folder follows.
    fs::remove_file(root.join("step-40/__0_0.distcp")).unwrap();
    symlink("../step-30/__0_0.distcp", root.join("step-40/__0_0.distcp")).unwrap();
    let run = on_disk(&root);
    let prune = || run.prune().policy(KeepLast(1)).by(StepOrder::Step);
    let plan = prune().plan().await.unwrap();
    let reasons: Vec<_> = plan.steps.iter().map(|one| &*one.decision.reason).collect();
    assert_eq!(
        reasons[1..4],
        [
            "the link \"best\" leads to it",
            "the link \"last\" leads to it",
            "the newest complete one",
        ]
    );
    assert!(reasons[4].contains("unknown") && reasons[4].contains("__0_0.distcp"), "{plan:?}");
    let report = prune().run().await.unwrap();
    let deleted: Vec<_> = report.deleted.iter().map(|one| one.step).collect();
    assert_eq!(deleted, [5], "{report:?}");
    // A tracker that is a link out of the run.
    fs::write(place.path().join("tracker"), "step-10").unwrap();
    fs::remove_file(root.join("best")).unwrap();
    symlink("../tracker", root.join("latest")).unwrap();
    let plan = prune().plan().await.unwrap();
    assert_eq!(plan.steps[0].decision.reason, "\"latest\" names it");
    assert_eq!(plan.deleted().count(), 0);
}

#[tokio::test]
async fn empty_folders_and_locks_of_dead_savers_are_shown_and_removed() {
    let place = tempfile::tempdir().unwrap();
    dcp_testing::copy_folder(&fixture("pytorch/t21_plain"), &place.path().join("step-1"));
    let failed = place.path().join("step-2");
    fs::create_dir_all(failed.join("model")).unwrap();
    fs::write(failed.join(".dcp-lock.metadata"), "").unwrap();
    let run = on_disk(place.path());
    let day = Duration::from_secs(86_400);
    let plan = run.prune().incomplete(day).plan().await.unwrap();
    assert!(plan.steps[1].decision.reason.contains("younger than 1 d"), "{plan:?}");
    assert_eq!(plan.steps[1].step.problem.as_deref(), Some("it has no files"));
    let prune = || run.prune().incomplete(Duration::ZERO);
    let plan = prune().plan().await.unwrap();
    let deleted: Vec<_> = plan.deleted().map(|one| &*one.name).collect();
    assert_eq!(deleted, ["step-2"], "{plan:?}");
    let left: Vec<_> = plan.leftovers.iter().map(|one| &*one.path).collect();
    assert_eq!(left, ["step-2/.dcp-lock.metadata"]);
    assert!(failed.exists(), "a plan deletes nothing");
    // A lock that is held stays, and so does its folder.
    let storage = FsStorage::open(place.path()).unwrap();
    let held = storage.claim(&key("step-2/.metadata")).await.unwrap();
    let report = prune().run().await.unwrap();
    assert!(failed.exists() && report.leftovers.is_empty(), "{report:?}");
    drop(held);
    fs::create_dir_all(&failed).unwrap();
    fs::write(failed.join(".dcp-lock.metadata"), "").unwrap();
    let report = prune().run().await.unwrap();
    assert_eq!((report.deleted.len(), report.leftovers.len()), (1, 1), "{report:?}");
    assert!(!failed.exists());
}

#[tokio::test]
async fn locks_and_temporary_files_of_a_killed_deletion_go_with_the_folder() {
    let place = tempfile::tempdir().unwrap();
    let folder = |step: u64| place.path().join(format!("step-{step}"));
    for step in [1, 2] {
        dcp_testing::copy_folder(&fixture("pytorch/t21_plain"), &folder(step));
    }
    fs::create_dir(folder(1).join("model")).unwrap();
    // Of formats that are not in the folder any more, and of a folder in it.
    let locks = [".dcp-lock.metadata.json", ".dcp-lock.common.pt", "model/.dcp-lock.metadata"];
    let temp = ".dcp-tmp.0000000000000000.1.2.3";
    for name in locks.iter().chain(&[temp]) {
        fs::write(folder(1).join(name), "").unwrap();
    }
    let report = on_disk(place.path()).prune().policy(KeepLast(1)).run().await.unwrap();
    let [deleted] = &*report.deleted else { panic!("{report:?}") };
    assert_eq!((deleted.step, deleted.folder_stays.as_deref()), (1, None));
    assert!(!folder(1).exists());
    // A lock that is held keeps the whole step, whatever its format.
    dcp_testing::copy_folder(&fixture("pytorch/t21_plain"), &folder(1));
    let storage = FsStorage::open(place.path()).unwrap();
    let held = storage.claim(&key("step-1/.metadata")).await.unwrap();
    let prune = || on_disk(place.path()).prune().policy(KeepLast(1)).by(StepOrder::Step);
    let report = prune().run().await.unwrap();
    assert!(report.deleted.is_empty() && folder(1).join(".metadata").exists(), "{report:?}");
    drop(held);
    assert_eq!(prune().run().await.unwrap().deleted.len(), 1);
    assert!(!folder(1).exists());
}

/// Lets `make` put something in the place of a file of the last of four steps, and plans.
#[cfg(unix)]
async fn plan_with(file: &str, make: impl Fn(&Path)) -> PrunePlan {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("run");
    for step in [10, 20, 30, 40] {
        let folder = root.join(format!("step-{step}"));
        dcp_testing::copy_folder(&fixture("pytorch/t21_plain"), &folder);
        fs::write(folder.join("meta.pt"), lightning(step, "run/step-10")).unwrap();
    }
    let file = root.join(file);
    fs::remove_file(&file).ok();
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    make(&file);
    let prune = on_disk(&root).prune().policy(KeepLast(1)).by(StepOrder::Step);
    prune.plan().await.unwrap()
}

#[cfg(unix)]
fn fifo(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status();
    assert!(made.unwrap().success());
}

/// The state of Lightning that says nothing, in a folder of its own.
#[cfg(unix)]
fn elsewhere(link: &Path) {
    let folder = link.ancestors().find(|path| path.ends_with("run")).unwrap();
    let folder = folder.parent().unwrap().join("elsewhere");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("meta.pt"), lightning(40, "run/step-20")).unwrap();
    let is_state = link.ends_with("meta.pt");
    symlink(if is_state { folder.join("meta.pt") } else { folder }, link).unwrap();
}

#[cfg(unix)]
#[tokio::test]
async fn what_stands_in_the_place_of_a_note_keeps_all_complete_checkpoints() {
    let folder = |path: &Path| fs::create_dir(path).unwrap();
    let makers = [fifo as fn(&Path), folder, elsewhere];
    for file in ["step-40/meta.pt", "step-40/trainer_state.json", "last.ckpt/meta.pt"] {
        for (make, said) in makers.into_iter().zip(["is no file", "is a folder", "a link"]) {
            let plan = plan_with(file, make).await;
            assert_eq!(plan.deleted().count(), 0, "{file}: {plan:#?}");
            let [problem] = &*plan.unclear_notes else { panic!("{file} {said}: {plan:#?}") };
            assert!(problem.contains(file) && problem.contains(said), "{problem}");
        }
    }
    let plan = plan_with("last.ckpt", elsewhere).await;
    assert_eq!(plan.deleted().count(), 0, "{plan:#?}");
    assert!(plan.unclear_notes[0].starts_with("\"last.ckpt/meta.pt\" is behind a link"));
    let plan = plan_with("last.ckpt", fifo).await;
    assert_eq!(plan.deleted().count(), 0, "{plan:#?}");
    let plan = plan_with("notes.txt", fifo).await;
    assert_eq!(plan.deleted().count(), 2, "{plan:#?}");
    let dangling = |path: &Path| symlink("nowhere", path).unwrap();
    for make in [fifo as fn(&Path), folder, dangling] {
        let plan = plan_with("step-20/.dcp-pin", make).await;
        assert_eq!(plan.steps[1].decision.reason, "pinned", "{plan:#?}");
        assert!(plan.steps[1].step.pinned);
    }
}

/// A save whose files are of no format yet: those of a model of Hugging Face, or other ones.
#[tokio::test]
async fn a_save_under_way_stays_whatever_its_files_are() {
    for files in [&["model-00001-of-00002.safetensors"][..], &["data.bin"], &["model/__0_0.distcp"]]
    {
        let place = tempfile::tempdir().unwrap();
        dcp_testing::copy_folder(&fixture("pytorch/t21_plain"), &place.path().join("step-1"));
        for file in files {
            let path = place.path().join("step-2").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "half of it").unwrap();
        }
        let storage = FsStorage::open(place.path()).unwrap();
        let held = storage.claim(&key("step-2/.metadata")).await.unwrap();
        let run = on_disk(place.path());
        run.prune().incomplete(Duration::ZERO).run().await.unwrap();
        for file in files {
            assert!(place.path().join("step-2").join(file).exists(), "{file}");
        }
        drop(held);
    }
}
