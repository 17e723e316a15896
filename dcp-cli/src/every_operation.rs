//! Commands that write, stopped at every one of their operations in every way: what was there
//! before is intact or the new checkpoint is whole, anything else is reported as unfinished, and
//! the same command with `--overwrite` gets through and leaves nothing else.
//!
//! Commands run in this process, over a storage of which the n-th operation fails, dies or fills the
//! disk. So every operation is hit, whatever the speed of the machine: in all ways where `cargo xtask
//! torture` runs the tests, otherwise in two of six, which takes a third of the time.

#![allow(clippy::unwrap_used, reason = "these are tests")]

mod cases;
mod copies;
mod crashes;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::FromArgMatches;
use dcp::core::registry::{Access, OpenRequest};
use dcp::core::{Storage, StorageErrorKind};
use dcp_conformance::{Effect, Fault, FaultStorage};
use dcp_testing::Tortured;

use crate::cli::Cli;
use crate::failure::Failure;
use crate::plugins::Plugins;

/// The state of a target after a command.
type Break = Arc<dyn Fn(FaultStorage) -> FaultStorage>;

thread_local! {
    static BREAK: RefCell<Option<Break>> = const { RefCell::new(None) };
    /// The targets that were opened.
    static OPENED: RefCell<Vec<FaultStorage>> = const { RefCell::new(Vec::new()) };
    /// What commands say, while they are listened to.
    static HEARD: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What a command writes to, broken as the test requires.
pub(crate) fn faulty(storage: Arc<dyn Storage>, request: &OpenRequest) -> Arc<dyn Storage> {
    if request.access != Access::Write {
        return storage;
    }
    let how = BREAK.with_borrow(Clone::clone);
    let Some(how) = how else { return storage };
    let broken = how(FaultStorage::new(storage));
    OPENED.with_borrow_mut(|opened| opened.push(broken.clone()));
    Arc::new(broken)
}

/// Takes what a command says, if a test listens.
pub(crate) fn heard(text: &str) -> bool {
    HEARD.with_borrow_mut(|heard| match heard {
        Some(all) => {
            all.push_str(text);
            all.push('\n');
            true
        }
        None => false,
    })
}

/// What a command left behind, besides files.
struct Ran {
    outcome: Result<(), Failure>,
    said: String,
    /// What each operation on the target does to it.
    effects: Vec<Effect>,
}

impl Ran {
    #[track_caller]
    fn ok(self, when: &str) {
        assert!(self.outcome.is_ok(), "{when}: {:?} {}", self.outcome, self.said);
    }
}

/// Runs a command, on a target that is broken in this way.
fn dcp<A: AsRef<str>>(args: &[A], how: Option<Break>) -> Ran {
    let args = ["dcp"].into_iter().chain(args.iter().map(AsRef::as_ref));
    let plugins = Plugins::default();
    let cli = crate::command_line::program(&plugins).try_get_matches_from(args);
    let cli = Cli::from_arg_matches(&cli.unwrap()).unwrap();
    BREAK.set(how);
    OPENED.take();
    HEARD.set(Some(String::new()));
    let outcome = crate::command_line::run(cli, "in a test", &plugins);
    BREAK.set(None);
    let mut said = HEARD.take().unwrap_or_default();
    if let Err(failure) = &outcome {
        said.push_str(&format!("{failure:?}"));
    }
    let effects = OPENED.take().iter().flat_map(FaultStorage::effects).collect();
    Ran { outcome, said, effects }
}

/// The files below a place, or the file that it is, by their paths from there.
type Files = BTreeMap<PathBuf, Vec<u8>>;

fn files(place: &Path) -> Files {
    fn fill(files: &mut Files, root: &Path, at: &Path) {
        if at.is_file() {
            let name = at.strip_prefix(root).unwrap().to_owned();
            files.insert(name, fs::read(at).unwrap());
            return;
        }
        let Ok(entries) = fs::read_dir(at) else { return };
        entries.for_each(|entry| fill(files, root, &entry.unwrap().path()));
    }
    let mut files = Files::new();
    fill(&mut files, place, place);
    files
}

fn put(files: &Files, place: &Path) {
    for (name, bytes) in files {
        let path = if name.as_os_str().is_empty() { place.to_owned() } else { place.join(name) };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn is_temporary(name: &Path) -> bool {
    name.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".dcp-tmp."))
}

/// The lock of a process that is gone.
fn is_lock(name: &Path) -> bool {
    name.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".dcp-lock."))
}

/// A command that writes.
struct Case {
    /// What comes before the target, and what comes behind it.
    before: Vec<String>,
    after: Vec<String>,
    /// What is replaced: a command that writes it, but for the target.
    old: (Vec<String>, Vec<String>),
    /// Whether the target is one file.
    file: bool,
    /// Whether there is a moment with neither the old nor the new checkpoint when one is replaced.
    gap: bool,
    /// Whether a failure at such a moment leaves neither.
    lasting: bool,
    /// The folder in the target that is the checkpoint.
    inner: &'static str,
}

impl Case {
    /// Where the checkpoint is in a target.
    fn place(&self, target: &Path) -> PathBuf {
        if self.inner.is_empty() { target.to_owned() } else { target.join(self.inner) }
    }

    /// The command and what it writes, for the table of `cargo xtask torture`.
    fn name(&self) -> String {
        let to = self.after.iter().position(|arg| arg == "--to").map(|at| &self.after[at + 1]);
        let command = &self.before[0];
        to.map_or_else(|| format!("dcp {command}"), |to| format!("dcp {command} --to {to}"))
    }

    fn args(&self, target: &Path) -> Vec<String> {
        let target = target.display().to_string();
        self.before.iter().cloned().chain([target]).chain(self.after.iter().cloned()).collect()
    }

    fn old_args(&self, target: &Path) -> Vec<String> {
        let target = target.display().to_string();
        let (before, after) = &self.old;
        before.iter().cloned().chain([target]).chain(after.iter().cloned()).collect()
    }
}

/// What a target is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Nothing,
    Old,
    New,
    Unfinished,
}

impl Is {
    fn word(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Old => "old",
            Self::New => "new",
            Self::Unfinished => "incomplete",
        }
    }
}

/// A way to stop a command at its n-th operation.
struct Way {
    name: &'static str,
    how: fn(FaultStorage, u64) -> FaultStorage,
    /// Whether it makes a difference to stop at this operation rather than at the next one.
    matters: fn(Effect) -> bool,
    /// Whether the command is gone then, and cleans up nothing.
    dies: bool,
    /// Whether what failed has no effect, and what is done about it later has.
    undone: bool,
}

fn changes(effect: Effect) -> bool {
    effect != Effect::None
}

/// Of so many operations that follow each other, a test alone stops at one in each way.
const STRIDE: u64 = 3;

const WAYS: [Way; 6] = [
    Way {
        name: "killed",
        how: |s, n| s.dying_after(n - 1),
        matters: changes,
        dies: true,
        undone: false,
    },
    Way {
        name: "full",
        how: |s, n| s.full_after(n - 1),
        matters: |effect| effect == Effect::TakesSpace,
        dies: false,
        undone: true,
    },
    Way {
        name: "read-only",
        how: |s, n| s.read_only_after(n - 1),
        matters: changes,
        dies: false,
        undone: false,
    },
    Way {
        name: "failed",
        how: |s, n| s.fault(n, Fault::Fail(StorageErrorKind::Other)),
        matters: |_| true,
        dies: false,
        undone: true,
    },
    Way {
        name: "failed afterwards",
        how: |s, n| s.fault(n, Fault::FailAfterwards),
        matters: changes,
        dies: false,
        undone: false,
    },
    Way {
        name: "without a reply",
        how: |s, n| s.fault(n, Fault::LoseReply),
        matters: |_| true,
        dies: false,
        undone: false,
    },
];

/// A case with what it is compared with.
struct Bench {
    case: Case,
    folder: tempfile::TempDir,
    /// What the command writes where nothing is.
    whole: PathBuf,
    /// What it replaces.
    before: PathBuf,
    /// What was found at targets with these files.
    known: Vec<(Files, Is)>,
}

/// A folder in memory where there is such a place: thousands of writes are made durable here.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Bench {
    fn new(case: Case) -> Self {
        let folder = scratch();
        let name = if case.file { "file" } else { "folder" };
        let (whole, before) =
            (folder.path().join("whole").join(name), folder.path().join("before").join(name));
        for path in [&whole, &before] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        dcp(&case.args(&whole), None).ok("the new one");
        dcp(&case.old_args(&before), None).ok("the old one");
        Self { case, folder, whole, before, known: Vec::new() }
    }

    /// What is at `target`; whatever it is, a run with `--overwrite` gets through and cleans up.
    fn look(&mut self, target: &Path, replaces: bool, when: &str) -> Is {
        let mut found = files(target);
        found.retain(|name, _| !is_temporary(name));
        if let Some((_, is)) = self.known.iter().find(|(known, _)| *known == found) {
            return *is;
        }
        let is = self.judge(target, &found, when);
        // What is left of the old one counts as the old one only where there was one.
        assert!(replaces || is != Is::Old, "{when}");
        let again = self.folder.path().join("again").join(target.file_name().unwrap());
        put(&found, &again);
        let mut args = self.case.args(&again);
        args.push("--overwrite".to_owned());
        dcp(&args, None).ok(&format!("{when}: again, over {:?}", found.keys()));
        assert!(self.same(&again, &self.whole.clone()), "{when}: again");
        let (left, whole) = (files(&again), files(&self.whole));
        assert_eq!(left.len(), whole.len(), "{when}: {:?} became {:?}", found.keys(), left.keys());
        fs::remove_dir_all(again.parent().unwrap()).unwrap();
        self.known.push((found, is));
        is
    }

    fn judge(&self, target: &Path, found: &Files, when: &str) -> Is {
        if found.keys().all(|name| is_lock(name)) {
            return Is::Nothing;
        }
        let shown = self.case.place(target).display().to_string();
        let verified = dcp(&["verify", &shown, "--deep"], None);
        if verified.outcome.is_err() {
            assert!(!self.case.file, "{when}: half a file");
            let inspected = dcp(&["inspect", &shown], None);
            let reports = |said: &str| {
                let signs = ["did not finish", "not written to its end", "died while it replaced"];
                signs.iter().any(|sign| said.contains(sign))
                    || said.contains("when its writer died")
            };
            for said in [&verified.said, &inspected.said] {
                assert!(reports(said), "{when}: {:?} is reported as: {said}", found.keys());
            }
            return Is::Unfinished;
        }
        match (self.same(target, &self.before), self.same(target, &self.whole)) {
            (true, _) => Is::Old,
            (_, true) => Is::New,
            _ => panic!("{when}: {:?} passes for a checkpoint, and is neither", found.keys()),
        }
    }

    /// Whether two targets hold the same: weights, and the files with them.
    fn same(&self, one: &Path, other: &Path) -> bool {
        let beside = |at: &Path| {
            let mut files = files(at);
            files.retain(|name, _| {
                ["config.json", "vocab.txt"].iter().any(|beside| name == Path::new(beside))
            });
            files
        };
        if !self.case.file && beside(one) != beside(other) {
            return false;
        }
        let uri = |at: &Path| self.case.place(at).display().to_string();
        dcp(&["diff", &uri(one), &uri(other)], None).outcome.is_ok()
    }

    /// Runs the command on a target that is broken in this way.
    fn run(&self, replaces: bool, how: Break) -> (PathBuf, Ran) {
        let name = if self.case.file { "file" } else { "folder" };
        let target = self.folder.path().join("target").join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut args = self.case.args(&target);
        if replaces {
            put(&files(&self.before), &target);
            args.push("--overwrite".to_owned());
        }
        let ran = dcp(&args, Some(how));
        (target, ran)
    }

    /// Stops the command at every operation that matters, over nothing and over the old one.
    /// Unless the counts are wanted, at the first and then at every third, from `phase` on.
    fn stop(&mut self, way: &Way, phase: u64) {
        let mut row = Tortured::new(&self.case.name(), way.name);
        let is_thorough = std::env::var_os("DCP_TORTURE_REPORT").is_some();
        for replaces in [false, true] {
            let (target, undisturbed) = self.run(replaces, Arc::new(|storage| storage));
            fs::remove_dir_all(target.parent().unwrap()).unwrap();
            let mut seen = Vec::new();
            let mut mattering = 0;
            for n in 1.. {
                let effect = undisturbed.effects.get(n as usize - 1);
                if let Some(effect) = effect {
                    if !(way.matters)(*effect) {
                        continue;
                    }
                    let at = mattering;
                    mattering += 1;
                    if !is_thorough && at > 0 && at % STRIDE != phase {
                        continue;
                    }
                }
                let how = way.how;
                let (target, ran) = self.run(replaces, Arc::new(move |storage| how(storage, n)));
                let when = format!(
                    "{} {} at operation {n}, replacing: {replaces}, {:?}",
                    self.case.before.join(" "),
                    way.name,
                    ran.outcome
                );
                let left = files(&target);
                let is = self.look(&target, replaces, &when);
                row.points += 1;
                row.count(is.word());
                let passed = (ran.effects.len() as u64) < n;
                if !way.dies {
                    let temporary = left.keys().any(|name| is_temporary(name));
                    assert!(!temporary, "{when}: {:?}", left.keys());
                }
                match is {
                    Is::New => {}
                    _ if ran.outcome.is_ok() => panic!("{when}: it is {is:?}"),
                    Is::Unfinished if replaces && !self.case.gap => {
                        panic!("{when}: the old one is gone: {:?}", left.keys())
                    }
                    Is::Unfinished if replaces && self.case.lasting => {}
                    _ if way.undone => {
                        let was = if replaces { files(&self.before) } else { Files::new() };
                        let (left, was): (Vec<_>, Vec<_>) =
                            (left.iter().collect(), was.iter().collect());
                        let names: Vec<_> = left.iter().map(|(name, _)| name).collect();
                        assert!(left == was, "{when}: {names:?}");
                    }
                    _ => {}
                }
                if !seen.contains(&is) {
                    seen.push(is);
                }
                fs::remove_dir_all(target.parent().unwrap()).unwrap();
                if passed {
                    assert!(n > 1, "{when}: only {n} operations were tried");
                    break;
                }
            }
            let was = if replaces { Is::Old } else { Is::Nothing };
            assert!(seen.contains(&Is::New), "{}: {seen:?}", way.name);
            assert!(seen.contains(&was) || !(way.dies || way.undone), "{}: {seen:?}", way.name);
        }
        row.report();
    }
}

/// Stops a command at every operation in every way.
fn survives(case: Case) {
    let mut bench = Bench::new(case);
    for (at, way) in (0..).zip(&WAYS) {
        bench.stop(way, at % STRIDE);
    }
    bench.crash();
}
