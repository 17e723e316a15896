//! A process that is killed before each operation of a save.

use std::io::{BufRead as _, BufReader};

use dcp_testing::Tortured;

use crate::child::{STEP, STOP, start};
use crate::state::{load, state};

/// Lets a child save until it is about to begin this operation, and kills it there. Whether it was.
fn killed_before(operation: u64, place: &str) -> bool {
    let mut child = start("save", place, &[(STOP, operation.to_string())]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|line| line == "stopped" || line == "saved").unwrap();
    if line == "stopped" {
        child.kill().unwrap();
    }
    let status = child.wait().unwrap();
    assert_eq!(status.success(), line == "saved", "{status}");
    line == "stopped"
}

fn saves_again(place: &str) {
    dcp::save(&state(7, 0, 1), place).blocking().unwrap();
    assert_eq!(load(place).unwrap(), 7);
    let names = std::fs::read_dir(place).unwrap().map(|file| file.unwrap().file_name());
    let names: Vec<_> = names.collect();
    assert_eq!(names.len(), 3, "data, metadata and sidecar, no leftovers: {names:?}");
}

#[test]
fn a_first_save_that_is_killed_at_any_operation_is_none_or_whole() {
    let mut loaded = false;
    let mut row = Tortured::new("first save, one process", "SIGKILL");
    for operation in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("run").display().to_string();
        let killed = killed_before(operation, &place);
        match load(&place) {
            Ok(step) => {
                assert_eq!(step, STEP);
                loaded = true;
            }
            Err(error) => {
                let text = dcp::core::error::error_chain(&error);
                assert!(!loaded, "lost at operation {operation}: {text}");
                assert!(!text.contains("bad "), "plainly incomplete, not damaged: {text}");
            }
        }
        row.points += 1;
        row.count(if loaded { "new" } else { "none" });
        if !killed {
            break;
        }
        saves_again(&place);
    }
    row.report();
    assert!(loaded);
}

#[test]
fn an_overwrite_that_is_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint() {
    let mut loaded = 1;
    let mut row = Tortured::new("overwrite, one process", "SIGKILL");
    for operation in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("run").display().to_string();
        dcp::save(&state(1, 0, 1), &place).blocking().unwrap();
        let killed = killed_before(operation, &place);
        let step = load(&place).unwrap();
        assert!(step == loaded || step == STEP, "{step} at operation {operation}");
        loaded = step;
        row.points += 1;
        row.count(if step == STEP { "new" } else { "old" });
        if !killed {
            break;
        }
        saves_again(&place);
    }
    row.report();
    assert_eq!(loaded, STEP);
}
