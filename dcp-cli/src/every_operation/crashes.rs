//! The machine crashes at any system call of a command and loses what was not synced.

use std::fs;
use std::path::{Path, PathBuf};

use dcp_storage_fs::disk_log::DiskLog;
use dcp_testing::{Crashes, Loss, Tortured, put_disk, torture_seeds};

use super::copies::at;
use super::{Bench, Files, Is, dcp, files, put, scratch};

impl Bench {
    /// Looks at what any crash can leave, over nothing and over the old one.
    pub(super) fn crash(&mut self) {
        let mut row = Tortured::new(&self.case.name(), "crash");
        row.models = Loss::all(torture_seeds()).count() as u64;
        for replaces in [false, true] {
            let (root, target) = self.crash_target();
            let mut args = self.case.args(&target);
            if replaces {
                put(&files(&self.before), &target);
                args.push("--overwrite".to_owned());
            }
            let log = DiskLog::start(&root).unwrap();
            dcp(&args, None).ok("undisturbed");
            let mut crashes = Crashes::of(&log);
            drop(log);
            row.points += crashes.points() as u64;
            for point in 0..crashes.points() {
                for loss in Loss::all(torture_seeds()) {
                    let Some(disk) = crashes.new_disk(point, loss) else { continue };
                    put_disk(&disk, &root);
                    let when = format!(
                        "{}: crash before {}, {loss:?}, replacing: {replaces}",
                        args.join(" "),
                        crashes.event(point)
                    );
                    let is = self.look(&target, replaces, &when);
                    row.count(is.word());
                    self.allow(is, replaces, &when);
                }
            }
            // What a command that succeeded has written survives every crash.
            for loss in Loss::all(torture_seeds()) {
                put_disk(&crashes.disk(crashes.points() - 1, loss), &root);
                let is = self.look(&target, replaces, "after the end");
                assert_eq!(is, Is::New, "{}: after the end, {loss:?}", args.join(" "));
            }
            fs::remove_dir_all(&root).unwrap();
        }
        row.report();
    }

    fn crash_target(&self) -> (PathBuf, PathBuf) {
        let root = self.folder.path().join("crashed");
        let target = root.join(if self.case.file { "file" } else { "folder" });
        fs::create_dir_all(&root).unwrap();
        (root, target)
    }

    #[track_caller]
    fn allow(&self, is: Is, replaces: bool, when: &str) {
        match is {
            Is::New | Is::Old => {}
            Is::Nothing | Is::Unfinished if !replaces || self.case.gap => {}
            _ => panic!("{when}: the old one is gone"),
        }
    }
}

/// Records a command below `root`, and calls `look` with what each crash leaves there, whether the
/// command was over, and where it was.
fn crash_command(
    what: &str,
    args: &[&str],
    root: &Path,
    mut look: impl FnMut(bool, &str) -> &'static str,
) {
    let log = DiskLog::start(root).unwrap();
    dcp(args, None).ok("undisturbed");
    let mut crashes = Crashes::of(&log);
    drop(log);
    let mut row = Tortured::new(what, "crash");
    row.points = crashes.points() as u64;
    row.models = Loss::all(torture_seeds()).count() as u64;
    for point in 0..crashes.points() {
        for loss in Loss::all(torture_seeds()) {
            let is_over = point + 1 == crashes.points();
            let disk = crashes.new_disk(point, loss);
            let Some(disk) = disk.or_else(|| is_over.then(|| crashes.disk(point, loss))) else {
                continue;
            };
            put_disk(&disk, root);
            let when = format!("{what}: crash before {}, {loss:?}", crashes.event(point));
            row.count(look(is_over, &when));
        }
    }
    row.report();
}

fn verifies(place: &Path) -> bool {
    dcp(&["verify", &place.display().to_string(), "--deep"], None).outcome.is_ok()
}

/// The files of a fixture without those that say what is in it.
fn checkpoint(fixture: &str) -> Files {
    let mut files = files(&dcp_testing::fixture(fixture));
    files.retain(|name, _| !name.to_string_lossy().starts_with("expected"));
    files
}

#[track_caller]
fn copies(fixture: &str) {
    // Without the expected tensors, which are a checkpoint of another format.
    let (source, wanted) = (scratch(), checkpoint(fixture));
    put(&wanted, source.path());
    let source = source.path();
    let folder = scratch();
    let target = folder.path().join("copy");
    let args = ["copy", &source.display().to_string(), &target.display().to_string()];
    crash_command("dcp copy", &args, folder.path(), |is_over, when| {
        let whole = verifies(&target);
        let found = at(&target);
        for (name, bytes) in &wanted {
            let found = found.get(name);
            let len = found.map(Vec::len);
            assert!(!whole || found == Some(bytes), "{when}: {name:?} has {len:?} bytes");
        }
        assert!(whole || !is_over, "{when}");
        dcp(&args, None).ok(when);
        assert!(at(&target) == wanted, "{when}: again");
        if whole { "new" } else { "incomplete" }
    });
}

#[test]
fn copies_of_checkpoints() {
    copies("pytorch/fsdp2_adam_2r");
    copies("megatron/tp2_basic/ckpt");
}

#[test]
fn a_rewritten_index() {
    let folder = scratch();
    let target = folder.path().join("target");
    let old = checkpoint("pytorch/t21_plain");
    put(&old, &target);
    let shown = target.display().to_string();
    let args = ["rewrite-metadata", &shown, "--to=torch", "--profile=torch2.15"];
    let index = Path::new(".metadata");
    crash_command("dcp rewrite-metadata", &args, folder.path(), |is_over, when| {
        let is_old = at(&target).get(index) == old.get(index);
        assert!(verifies(&target) && !(is_old && is_over), "{when}");
        dcp(&args, None).ok(when);
        assert!(verifies(&target), "{when}: again");
        if is_old { "old" } else { "new" }
    });
}

#[test]
fn deletions_of_a_run() {
    let folder = scratch();
    let run = folder.path().join("run");
    let step = |step: u64| run.join(format!("step-{step}"));
    put(&checkpoint("pytorch/fsdp2_adam_2r"), &step(10));
    put(&checkpoint("pytorch/t21_plain"), &step(20));
    put(&checkpoint("pytorch/t21_plain"), &step(30));
    let shown = run.display().to_string();
    // The files of a simulated crash are written in any order.
    let args = ["prune", &shown, "--keep-last", "1", "--by", "step", "--yes"];
    crash_command("dcp prune", &args, folder.path(), |is_over, when| {
        assert!(verifies(&step(30)), "{when}");
        let older = [10, 20].map(|number| verifies(&step(number)));
        assert!(!is_over || older == [false; 2], "{when}");
        let opener = dcp::opener(dcp::default_storages());
        let listed = dcp_testing::block_on(opener.run(&shown).steps()).unwrap();
        for (number, whole) in [(10, older[0]), (20, older[1]), (30, true)] {
            let name = format!("step-{number}");
            let complete = listed.iter().find(|one| one.name == name);
            let complete = complete.is_some_and(|one| one.is_complete());
            assert_eq!(complete, whole, "{when}: {name} in {listed:?}");
        }
        let shown_as = |text: &str, number: u64| -> Option<String> {
            let row = text.lines().find(|row| row.starts_with(&format!("step-{number} ")))?;
            row.split_whitespace().nth(2).map(str::to_owned)
        };
        let ls = dcp(&["ls", &shown], None);
        let text = ls.said.clone();
        ls.ok(when);
        for (number, whole) in [(10, older[0]), (20, older[1]), (30, true)] {
            let state = shown_as(&text, number);
            let is_right = match whole {
                true => state.as_deref() == Some("complete"),
                // A deleted one is in the list only with files left.
                false => matches!(state.as_deref(), None | Some("incomplete")),
            };
            assert!(is_right, "{when}: step-{number} is {state:?} in\n{text}");
        }
        let all = older.iter().filter(|whole| **whole).count() + 1;
        assert!(text.contains(&format!("{all} of them complete")), "{when}: {text}");
        dcp(&args, None).ok(when);
        let left = at(&run);
        assert!(left.keys().all(|name| name.starts_with("step-30")), "{when}: {left:?}");
        match older {
            [true, true] => "old",
            [false, false] => "new",
            _ => "some deleted",
        }
    });
}
