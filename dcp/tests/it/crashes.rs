//! The machine crashes at any system call of a save and loses what was not synced.
//!
//! Each save is recorded once. For each of its system calls and each model of loss, the files that a
//! disk may then hold are written, and looked at as a trainer does that starts again.

use std::path::Path;
use std::sync::Arc;

use dcp::collectives::{LocalGroup, TcpConfig};
use dcp::jobs::run::{KeepLast, StepNaming};
use dcp::manager::CheckpointManager;
use dcp::{Checkpointer, Collective, DType, Region, StateDict, Tensor, Value};
use dcp_storage_fs::disk_log::DiskLog;
use dcp_testing::{Crashes, Loss, Tortured, put_disk, torture_seeds};

/// A save that is recorded, by the URL of its run.
struct Scene {
    what: &'static str,
    /// Makes what is there before.
    before: fn(&str),
    /// The save.
    save: fn(&str),
    /// The next one, whose values are [`NEXT`].
    next: fn(&str),
    /// The values of a checkpoint, by its URL.
    load: fn(&str) -> Result<u8, String>,
    /// The values that the newest valid checkpoint may have, in the order in which they appear; 0 is
    /// none.
    values: &'static [u8],
}

/// The values of the save after a crash.
const NEXT: u8 = 9;

impl Scene {
    fn torture(&self) {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let recorded = folder.path().join("recorded");
        std::fs::create_dir(&recorded).unwrap();
        let url = |root: &Path| root.join("run").display().to_string();
        (self.before)(&url(&recorded));
        let log = DiskLog::start(&recorded).unwrap();
        (self.save)(&url(&recorded));
        let mut crashes = Crashes::of(&log);
        drop(log);
        let root = folder.path().join("crashed");
        let mut row = Tortured::new(self.what, "crash");
        row.points = crashes.points() as u64;
        row.models = Loss::all(torture_seeds()).count() as u64;
        let last = self.values[self.values.len() - 1];
        for point in 0..crashes.points() {
            for loss in Loss::all(torture_seeds()) {
                let is_end = point + 1 == crashes.points();
                let disk = crashes.new_disk(point, loss);
                let Some(disk) = disk.or_else(|| is_end.then(|| crashes.disk(point, loss))) else {
                    continue;
                };
                put_disk(&disk, &root);
                let url = url(&root);
                let when =
                    format!("{}: crash before {}, {loss:?}", self.what, crashes.event(point));
                let value = self.look(&url, &when);
                assert!(self.values.contains(&value), "{when}: {value} of {:?}", self.values);
                // What a save that succeeded has written survives every crash.
                assert!(!is_end || value == last, "{when}: {value} after the end");
                row.count(match value {
                    0 => "none",
                    value if value == last => "new",
                    _ => "old",
                });
                (self.next)(&url);
                assert_eq!(self.look(&url, &when), NEXT, "{when}: after the next save");
            }
        }
        row.report();
    }

    /// The values of the newest valid checkpoint.
    #[track_caller]
    fn look(&self, url: &str, when: &str) -> u8 {
        dcp_testing::block_on(async {
            let opener = dcp::opener(dcp::default_storages());
            if !Path::new(url).exists() {
                return 0;
            }
            let run = opener.run(url);
            for step in run.steps().await.unwrap() {
                let url = format!("{url}/{}", step.name);
                let verified = match opener.open(&url).await {
                    Err(_) => false,
                    Ok(checkpoint) => {
                        checkpoint.verify().deep(true).run().await.is_ok_and(|report| report.ok)
                    }
                };
                let loaded = (self.load)(&url);
                assert_eq!(verified, loaded.is_ok(), "{when}: {} is {loaded:?}", step.name);
                // A tracker that names an earlier iteration makes later ones incomplete.
                let is_behind = step.problem.as_ref().is_some_and(|problem| {
                    problem.starts_with("latest_checkpointed_iteration.txt is at")
                });
                assert!(
                    step.is_complete() == verified || verified && is_behind,
                    "{when}: {} is listed as {step:?}, {loaded:?}",
                    step.name
                );
            }
            let valid = run.latest_valid(true).await.unwrap();
            let Some(step) = valid.step else { return 0 };
            (self.load)(&format!("{url}/{}", step.name)).unwrap()
        })
    }
}

/// The state of a save with these values, as `rank` of `world` holds it.
pub(crate) fn state(value: u8, rank: u32, world: u32) -> StateDict {
    let rows = Region::new([u64::from(rank) * 6 / u64::from(world), 0], [6 / u64::from(world), 50]);
    let tensor = Tensor::zeros_sharded(DType::UInt8, [6, 50], [rows.unwrap()]).unwrap();
    let view = tensor.shards()[0].view().unwrap().clone();
    view.fill_from(&vec![value; view.byte_len() as usize]).unwrap();
    let mut state = StateDict::new();
    state.insert("sharded", tensor);
    let replicated = Tensor::replicated(DType::UInt8, [100], vec![value; 100]).unwrap();
    state.insert("replicated", replicated);
    state.insert("step", i64::from(value));
    state
}

pub(crate) fn load(url: &str) -> Result<u8, String> {
    let mut mine = state(0, 0, 1);
    // Not on the runtime of the caller.
    let loaded = std::thread::scope(|scope| {
        scope.spawn(|| dcp::load(&mut mine, url).blocking().map(drop)).join().unwrap()
    });
    loaded.map_err(|error| dcp::core::error::error_chain(&error))?;
    let value = u8::try_from(mine.get("step").and_then(Value::as_int).unwrap()).unwrap();
    for name in ["sharded", "replicated"] {
        let tensor = mine.get(name).and_then(Value::as_tensor).unwrap();
        assert!(tensor.to_vec().unwrap().iter().all(|byte| *byte == value), "{name} of {value}");
    }
    Ok(value)
}

fn save_by(checkpointer: &Checkpointer, url: &str, value: u8, rank: u32, world: u32) {
    let step = format!("{url}/step-1");
    checkpointer.save(&state(value, rank, world), step).blocking().unwrap();
}

fn save(url: &str, value: u8) {
    save_by(&Checkpointer::new(), url, value, 0, 1);
}

fn save_on_threads(url: &str, value: u8) {
    LocalGroup::new(3)
        .run(|group| {
            let rank = group.rank();
            save_by(&Checkpointer::in_group(Arc::new(group)), url, value, rank, 3);
            Ok::<_, dcp::CheckpointError>(())
        })
        .into_iter()
        .for_each(|outcome| outcome.unwrap());
}

fn save_over_tcp(url: &str, value: u8) {
    let (listener, port) = dcp_testing::listener();
    let listener = std::sync::Mutex::new(Some(listener));
    dcp_testing::on_each((0..2).collect(), |rank| {
        let mut config = TcpConfig::new(rank, 2, dcp_testing::loopback().to_string(), port);
        if rank == 0 {
            config = config.listener(listener.lock().unwrap().take().unwrap());
        }
        let group = Arc::new(config.connect().unwrap());
        save_by(&Checkpointer::in_group(group), url, value, rank, 2);
    });
}

fn save_in_the_background(url: &str, value: u8) {
    let checkpointer = Checkpointer::new();
    let pending = dcp::block_on(async {
        checkpointer.save(&state(value, 0, 1), format!("{url}/step-1")).background()
    });
    dcp::block_on(pending.unwrap().unwrap().wait()).unwrap().unwrap();
}

fn manage(url: &str, naming: StepNaming, value: u8) {
    let manager = CheckpointManager::new(url).naming(naming).keep(KeepLast(1));
    let saved = manager.save(value.into(), &state(value, 0, 1)).metric("loss", 1.0);
    let saved = saved.blocking().unwrap();
    assert!(saved.problem.is_none(), "{:?}", saved.problem);
}

#[test]
fn a_first_save() {
    let scene = Scene {
        what: "first save",
        before: |_| {},
        save: |url| save(url, 2),
        next: |url| save(url, NEXT),
        load,
        values: &[0, 2],
    };
    scene.torture();
}

#[test]
fn an_overwrite() {
    let scene = Scene {
        what: "overwrite",
        before: |url| save(url, 1),
        save: |url| save(url, 2),
        next: |url| save(url, NEXT),
        load,
        values: &[1, 2],
    };
    scene.torture();
}

#[test]
fn an_overwrite_in_the_background() {
    let scene = Scene {
        what: "overwrite, asynchronous",
        before: |url| save(url, 1),
        save: |url| save_in_the_background(url, 2),
        next: |url| save_in_the_background(url, NEXT),
        load,
        values: &[1, 2],
    };
    scene.torture();
}

#[test]
fn saves_of_three_ranks() {
    let first = Scene {
        what: "first save, 3 ranks",
        before: |_| {},
        save: |url| save_on_threads(url, 2),
        next: |url| save(url, NEXT),
        load,
        values: &[0, 2],
    };
    first.torture();
    let overwrite = Scene {
        what: "overwrite, 3 ranks",
        before: |url| save(url, 1),
        save: |url| save_on_threads(url, 2),
        next: |url| save(url, NEXT),
        load,
        values: &[1, 2],
    };
    overwrite.torture();
}

#[test]
fn an_overwrite_of_ranks_over_tcp() {
    let scene = Scene {
        what: "overwrite, 2 ranks over TCP",
        before: |url| save_on_threads(url, 1),
        save: |url| save_over_tcp(url, 2),
        next: |url| save(url, NEXT),
        load,
        values: &[1, 2],
    };
    scene.torture();
}

#[test]
fn a_run_whose_older_checkpoints_are_deleted() {
    let scene = Scene {
        what: "save and retention by the manager",
        before: |url| manage(url, StepNaming::Dash, 1),
        save: |url| manage(url, StepNaming::Dash, 2),
        next: |url| manage(url, StepNaming::Dash, NEXT),
        load,
        values: &[1, 2],
    };
    scene.torture();
    let tracked = Scene {
        what: "save and retention with a tracker",
        before: |url| manage(url, StepNaming::Iteration, 1),
        save: |url| manage(url, StepNaming::Iteration, 2),
        next: |url| manage(url, StepNaming::Iteration, NEXT),
        ..scene
    };
    tracked.torture();
}

#[cfg(feature = "megatron")]
mod megatron {
    use dcp::core::registry::Access;
    use dcp::megatron::{MegatronSaveOptions, Tracked, save, write_tracker};

    use super::*;
    use crate::megatron::{load_value, open, state};

    fn save_iteration(url: &str, iteration: u64, value: u8) {
        let storage = open(&format!("{url}/iter_{iteration:07}"), Access::Write);
        dcp_testing::on_ranks(2, |rank, group| {
            let options = MegatronSaveOptions::new().group(group).overwrite(true);
            dcp_testing::block_on(save(&state(value, rank, 2), &storage, &options)).unwrap();
        });
        let run = open(url, Access::Write);
        dcp_testing::block_on(write_tracker(&*run, Tracked::Iteration(iteration))).unwrap();
    }

    #[test]
    fn saves_of_megatron() {
        let first = Scene {
            what: "Megatron-Core: first save, 2 ranks",
            before: |_| {},
            save: |url| save_iteration(url, 1, 2),
            next: |url| save_iteration(url, 1, NEXT),
            load: load_value,
            values: &[0, 2],
        };
        first.torture();
        let overwrite = Scene {
            what: "Megatron-Core: overwrite, 2 ranks",
            before: |url| save_iteration(url, 1, 1),
            values: &[1, 2],
            ..first
        };
        overwrite.torture();
        let second = Scene {
            what: "Megatron-Core: next iteration and tracker",
            save: |url| save_iteration(url, 2, 2),
            next: |url| save_iteration(url, 3, NEXT),
            ..overwrite
        };
        second.torture();
    }
}
