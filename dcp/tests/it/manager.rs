//! A trainer's checkpoints of one run.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dcp::collectives::LocalGroup;
use dcp::core::registry::Access;
use dcp::jobs::run::{AnyOf, KeepBest, KeepEvery, KeepLast, SaveSchedule, StepNaming};
use dcp::manager::{CheckpointManager, Preemption, SaveReason};
use dcp::{CheckpointError, Checkpointer, Collective, DType, Region, StateDict, Tensor};

fn state(step: u64) -> StateDict {
    let mut state = StateDict::new();
    let bytes: Vec<u8> = (0..64).flat_map(|at| (at as f32 + step as f32).to_le_bytes()).collect();
    state.insert("weight", Tensor::replicated(DType::Float32, [8, 8], bytes).unwrap());
    state.insert("step", i64::try_from(step).unwrap());
    state
}

fn step_of(state: &StateDict) -> i64 {
    match state.get("step") {
        Some(dcp::Value::Int(step)) => *step,
        other => panic!("{other:?}"),
    }
}

fn run_in(folder: &tempfile::TempDir) -> String {
    folder.path().join("run").display().to_string()
}

fn steps(manager: &CheckpointManager) -> Vec<u64> {
    let steps = dcp::block_on(manager.run().steps()).unwrap().unwrap();
    steps.iter().filter(|one| one.is_complete()).map(|one| one.step).collect()
}

fn flip_a_byte(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Another content of the same length.
fn ruin(file: &Path) {
    let bytes: Vec<u8> = fs::read(file).unwrap().iter().map(|byte| !byte).collect();
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_trainer_resumes_from_the_newest_valid_checkpoint_and_hears_what_was_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let manager = CheckpointManager::new(&url).deep_resume(true);
    let mut mine = state(0);
    assert!(manager.resume(&mut mine).blocking().unwrap().is_none());
    for step in [10, 20, 30, 40] {
        manager.save(step, &state(step)).blocking().unwrap();
    }
    fs::remove_file(Path::new(&url).join("step-40/.metadata")).unwrap();
    flip_a_byte(&Path::new(&url).join("step-30/__0_0.distcp"));
    let resumed = manager.resume(&mut mine).blocking().unwrap().unwrap();
    assert_eq!((resumed.step, step_of(&mine)), (20, 20));
    let skipped: Vec<_> = resumed.skipped.iter().map(|one| one.step).collect();
    assert_eq!(skipped, [40, 30]);
    // The next saves replace them.
    manager.save(30, &state(30)).blocking().unwrap();
    let (storages, saved) = (dcp::default_storages(), format!("{url}/step-30"));
    let storage = dcp_testing::block_on(storages.open(&saved, Access::Read)).unwrap();
    let reader = dcp::formats::dcp::DcpReader::new(storage);
    let sidecar = dcp_testing::block_on(reader.sidecar()).unwrap().unwrap();
    assert_eq!((sidecar.step, sidecar.parent_step), (Some(30), Some(20)));
    manager.save(40, &state(40)).blocking().unwrap();
    assert_eq!(manager.resume(&mut mine).blocking().unwrap().unwrap().step, 40);
}

/// Lengths agree, so that only the load finds the damage.
#[test]
fn damage_that_a_load_finds_leads_to_the_next_older_checkpoint_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let resumed = LocalGroup::new(3).run(|group| {
        let rank = group.rank();
        let checkpointer = Checkpointer::in_group(Arc::new(group));
        let manager = CheckpointManager::new(&url).checkpointer(checkpointer);
        for step in [10, 20, 30] {
            manager.save(step, &shard(rank, step)?).blocking()?;
        }
        if rank == 0 {
            for step in [20, 30] {
                ruin(&Path::new(&url).join(format!("step-{step}/__1_0.distcp")));
            }
        }
        let mut mine = shard(rank, 0)?;
        // A decision that all ranks make together: the files are damaged by then.
        manager.save(5, &shard(rank, 5)?).blocking()?;
        let resumed = manager.resume(&mut mine).blocking()?.unwrap();
        let skipped: Vec<_> = resumed.skipped.iter().map(|one| one.step).collect();
        Ok::<_, CheckpointError>((resumed.step, step_of(&mine), skipped))
    });
    for resumed in resumed {
        assert_eq!(resumed.unwrap(), (10, 10, vec![30, 20]));
    }
    let manager = CheckpointManager::new(&url);
    for step in [5, 10] {
        for rank in [0, 1, 2] {
            ruin(&Path::new(&url).join(format!("step-{step}/__{rank}_0.distcp")));
        }
    }
    let mut whole = StateDict::new();
    whole.insert("weight", Tensor::zeros(DType::Float32, [6, 8]).unwrap());
    let error = manager.resume(&mut whole).blocking().unwrap_err();
    let error = error.to_string();
    assert!(error.contains("is valid; step-5: ") && error.contains("__"), "{error}");
}

#[test]
fn a_trainer_with_a_new_key_resumes_in_a_mode_that_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let manager = CheckpointManager::new(run_in(&folder));
    manager.save(10, &state(10)).blocking().unwrap();
    let mut more = state(0);
    more.insert("rng.rank7", u64::MAX);
    assert!(manager.resume(&mut more).blocking().is_err());
    let settings = dcp::Settings::new().load_mode(dcp::LoadMode::AllowMissing);
    let manager = manager.checkpointer(Checkpointer::with_settings(settings));
    let resumed = manager.resume(&mut more).blocking().unwrap().unwrap();
    assert_eq!((resumed.step, step_of(&more)), (10, 10));
    assert_eq!(more.get("rng.rank7").and_then(dcp::Value::as_u64), Some(u64::MAX));
}

#[test]
fn the_error_of_a_save_names_the_step_and_the_place() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run"), "a file").unwrap();
    let manager = CheckpointManager::new(run_in(&folder));
    let error = manager.save(10, &state(10)).blocking().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("step 10") && text.contains("run/step-10"), "{text}");
    assert!(matches!(error, CheckpointError::Step { step: 10, .. }));
    let error = manager.save(20, &state(20)).background().unwrap().wait().blocking().unwrap_err();
    assert!(error.to_string().contains("step 20"), "{error}");
}

#[test]
fn the_error_of_ranks_without_a_common_storage_names_the_url_of_the_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let errors = LocalGroup::new(3).run(|group| {
        let rank = group.rank();
        let disk = folder.path().join(format!("disk{rank}")).display().to_string();
        let checkpointer = Checkpointer::in_group(Arc::new(group));
        let saved = [
            checkpointer.save(&shard(rank, 1)?, format!("{disk}/a")).blocking(),
            dcp::block_on(
                checkpointer.save(&shard(rank, 1)?, format!("{disk}/b")).background()?.wait(),
            )?,
        ];
        Ok::<_, CheckpointError>(saved.map(|saved| saved.unwrap_err().to_string()))
    });
    for errors in errors {
        for (error, name) in errors.unwrap().iter().zip(["a", "b"]) {
            let place = format!("disk0/{name}\" as rank 0 sees it");
            // Whichever file the coordinator looks for first.
            let is_named = (1..3).any(|rank| error.contains(&format!("that rank {rank} wrote")));
            assert!(is_named && error.contains(&place), "{error}");
        }
    }
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let manager = CheckpointManager::new(&url).deep_resume(true);
    manager.save(10, &state(10)).blocking().unwrap();
    flip_a_byte(&Path::new(&url).join("step-10/__0_0.distcp"));
    let mut mine = state(0);
    let error = manager.resume(&mut mine).blocking().unwrap_err();
    assert!(error.to_string().contains("no checkpoint of the run"), "{error}");
    assert_eq!(step_of(&mine), 0);
}

#[test]
fn after_each_save_the_policy_decides_what_stays() {
    let folder = tempfile::tempdir().unwrap();
    let policy = AnyOf::new().or(KeepLast(1)).or(KeepEvery(30)).or(KeepBest::lowest(1, "loss"));
    let manager =
        CheckpointManager::new(run_in(&folder)).keep(policy).verify_before_deletion(false);
    for (step, loss) in [(10, 3.0), (20, 0.5), (30, 2.0), (40, 1.0), (50, 4.0)] {
        let saved = manager.save(step, &state(step)).metric("loss", loss).blocking().unwrap();
        assert!(saved.problem.is_none(), "{:?}", saved.problem);
    }
    assert_eq!(steps(&manager), [20, 30, 50]);
    let pending = manager.save(60, &state(60)).metric("loss", 0.1).background().unwrap();
    let saved = pending.wait().blocking().unwrap();
    let deleted: Vec<_> = saved.pruned.unwrap().deleted.iter().map(|one| one.step).collect();
    assert_eq!(deleted, [20, 50]);
    // A save without the metric takes away that of the earlier save of the step.
    manager.save(60, &state(60)).blocking().unwrap();
    let found = dcp::block_on(manager.run().steps()).unwrap().unwrap();
    assert!(found.iter().all(|one| one.step != 60 || one.metrics.is_empty()), "{found:?}");
}

#[test]
fn a_step_that_was_just_saved_stays_whatever_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let manager = CheckpointManager::new(run_in(&folder)).keep(KeepLast(2));
    for step in [21, 23, 3] {
        manager.save(step, &state(step)).blocking().unwrap();
    }
    assert!(steps(&manager).contains(&3), "{:?}", steps(&manager));
}

#[test]
fn iterations_have_a_tracker_that_names_the_last_save() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let manager = CheckpointManager::new(&url).naming(StepNaming::Iteration).keep(KeepLast(1));
    manager.save(10, &state(10)).blocking().unwrap();
    manager.save(20, &state(20)).blocking().unwrap();
    let tracker = Path::new(&url).join("latest_checkpointed_iteration.txt");
    assert_eq!(fs::read_to_string(tracker).unwrap(), "20");
    assert!(Path::new(&url).join("iter_0000020/.metadata").exists());
    assert!(!Path::new(&url).join("iter_0000010").exists());
}

/// Rank `rank` of 2 holds its rows.
fn shard(rank: u32, step: u64) -> Result<StateDict, CheckpointError> {
    let rows = Region::new([u64::from(rank) * 2, 0], [2, 8])?;
    let mut state = StateDict::new();
    state.insert("weight", Tensor::zeros_sharded(DType::Float32, [6, 8], [rows])?);
    state.insert("step", i64::try_from(step).unwrap());
    Ok(state)
}

#[test]
fn all_ranks_save_at_the_same_steps_for_the_same_reasons() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let preemptions: Vec<_> = (0..3).map(|_| Preemption::new()).collect();
    let clock = Arc::new(AtomicU64::new(0));
    let answers = LocalGroup::new(3).run(|group| {
        let rank = group.rank();
        // The clocks of the ranks differ; that of the coordinator counts.
        let now = Arc::clone(&clock);
        let ahead = Duration::from_secs(u64::from(rank) * 1000);
        let checkpointer = Checkpointer::in_group(Arc::new(group));
        let manager = CheckpointManager::new(&url)
            .checkpointer(checkpointer)
            .schedule(SaveSchedule::new().every_steps(10).every(Duration::from_secs(60)))
            .keep(KeepLast(1))
            .preemption(preemptions[rank as usize].clone())
            .clock(move || {
                SystemTime::UNIX_EPOCH + ahead + Duration::from_secs(now.load(Ordering::SeqCst))
            });
        let mut answers = Vec::new();
        for step in 1..=25 {
            if rank == 0 && step == 15 {
                clock.store(60, Ordering::SeqCst);
            }
            if rank == 2 && step == 22 {
                preemptions[2].request();
            }
            let reason = manager.should_save(step).blocking()?;
            if let Some(reason) = reason {
                manager.save(step, &shard(rank, step)?).blocking()?;
                answers.push((step, reason));
            }
        }
        let mut mine = shard(rank, 0)?;
        let resumed = manager.resume(&mut mine).blocking()?.map(|resumed| resumed.step);
        Ok::<_, CheckpointError>((answers, resumed, step_of(&mine)))
    });
    let answers: Vec<_> = answers.into_iter().collect::<Result<_, _>>().unwrap();
    let reasons = [
        (10, SaveReason::Step),
        (15, SaveReason::Time),
        (20, SaveReason::Step),
        (22, SaveReason::Preemption),
    ];
    for answer in answers {
        assert_eq!(answer, (reasons.to_vec(), Some(22), 22));
    }
    assert_eq!(steps(&CheckpointManager::new(&url)), [22]);
}

#[test]
fn between_checks_nothing_is_exchanged_and_a_preemption_waits_for_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let preemption = Preemption::new();
    let manager = CheckpointManager::new(run_in(&folder))
        .schedule(SaveSchedule::new().every_steps(7))
        .preemption(preemption.clone())
        .check_every(5);
    preemption.request();
    let answers: Vec<_> = (1..=16)
        .filter_map(|step| Some((step, manager.should_save(step).blocking().unwrap()?)))
        .collect();
    let (step, preempted) = (SaveReason::Step, SaveReason::Preemption);
    assert_eq!(answers, [(5, preempted), (7, step), (14, step)]);
}

#[test]
fn a_coordinator_that_cannot_list_the_run_fails_all_ranks_alike() {
    let folder = tempfile::tempdir().unwrap();
    // A file in place of the folder.
    let url = run_in(&folder);
    fs::write(&url, "no folder").unwrap();
    let errors = LocalGroup::new(2).run(|group| {
        let rank = group.rank();
        let checkpointer = Checkpointer::in_group(Arc::new(group));
        let manager = CheckpointManager::new(&url).checkpointer(checkpointer);
        let mut mine = shard(rank, 0).unwrap();
        Ok::<_, CheckpointError>(manager.resume(&mut mine).blocking().unwrap_err().to_string())
    });
    let errors: Vec<_> = errors.into_iter().collect::<Result<_, _>>().unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("rank 0"), "{errors:?}");
}

/// A clock may jump between any two steps, also between a save and the deletion after it.
#[test]
fn a_clock_that_jumps_causes_one_save_and_loses_no_checkpoint() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let start = SystemTime::UNIX_EPOCH + 1000 * DAY;
    let mut row = dcp_testing::Tortured::new("run with a schedule by time", "clock jump");
    for jump in 1..=5 {
        for jumped in [start - 900 * DAY, start + 10_000 * DAY] {
            let folder = tempfile::tempdir().unwrap();
            let readings = Arc::new(AtomicU64::new(0));
            let read = Arc::clone(&readings);
            let manager = CheckpointManager::new(run_in(&folder))
                .schedule(SaveSchedule::new().every(DAY))
                .keep(dcp::jobs::run::KeepYoungerThan(DAY))
                .clock(move || match read.fetch_add(1, Ordering::SeqCst) {
                    before if before < jump => start,
                    _ => jumped,
                });
            manager.save(1, &state(1)).blocking().unwrap();
            let mut saved = 1;
            for step in 2..10 {
                if manager.should_save(step).blocking().unwrap().is_some() {
                    manager.save(step, &state(step)).blocking().unwrap();
                    saved = step;
                    row.count("saved");
                }
            }
            assert!((2..10).contains(&saved), "no save after jump {jump}");
            let last = *steps(&manager).last().unwrap();
            assert_eq!(last, saved, "jump {jump}");
            let count = row.found.values().sum::<u64>();
            row.points += 1;
            assert_eq!(count, row.points, "one save after jump {jump}");
            assert!(readings.load(Ordering::SeqCst) > jump);
        }
    }
    row.report();
}

/// Two checkpoints of one model have files of the same names and lengths.
#[test]
fn a_file_of_another_checkpoint_is_found_by_a_load_and_named_by_verify() {
    let folder = tempfile::tempdir().unwrap();
    let url = run_in(&folder);
    let manager = CheckpointManager::new(&url);
    for step in [10, 20] {
        manager.save(step, &state(step)).blocking().unwrap();
    }
    let file = |step: &str| Path::new(&url).join(step).join("__0_0.distcp");
    fs::copy(file("step-10"), file("step-20")).unwrap();
    let place = format!("{url}/step-20");
    let mut mine = state(0);
    let error = dcp::load(&mut mine, &place).blocking().unwrap_err();
    let text = dcp::core::error::error_chain(&error);
    let named = text.contains("\"weight\"") || text.contains("\"step\"");
    assert!(text.contains("not the bytes of this save") && named, "{text}");
    let opener = dcp::opener(dcp::default_storages());
    let report = dcp_testing::block_on(async {
        let checkpoint = opener.open(&place).await.unwrap();
        checkpoint.verify().deep(true).run().await.unwrap()
    });
    let named = report.problems.iter().find(|problem| problem.key.as_deref() == Some("weight"));
    let named = named.unwrap_or_else(|| panic!("{report:?}"));
    assert!(named.message.contains("not the bytes of this save"), "{report:?}");
    let object = report.problems.iter().find(|problem| problem.key.as_deref() == Some("step"));
    let object = object.unwrap_or_else(|| panic!("{report:?}"));
    assert!(object.message.contains("not the bytes of this save"), "{report:?}");
    assert_eq!(
        dcp::block_on(manager.run().latest_valid(true)).unwrap().unwrap().step.unwrap().step,
        10
    );
}
