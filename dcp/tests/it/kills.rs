//! A process that is killed while it saves, again and again.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use crate::child::start;
use crate::state::load;

/// The steps that a killed child reported as saved.
fn reported(lines: impl Iterator<Item = String>) -> Vec<u8> {
    lines.filter_map(|line| line.strip_prefix("saved ")?.trim().parse().ok()).collect()
}

#[test]
fn after_a_kill_at_any_moment_the_last_saved_checkpoint_loads() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("run").display().to_string();
    let mut killed_with_a_checkpoint = 0;
    for round in 0..20_u64 {
        let before = load(&place).ok();
        let mut child = start("save", &place, &[]);
        // From before the first write to a few saves later.
        std::thread::sleep(Duration::from_millis(3 + round * 7));
        child.kill().unwrap();
        let steps =
            reported(BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok));
        child.wait().unwrap();
        match (load(&place), steps.last()) {
            (Ok(step), Some(last)) => {
                assert!(step == *last || step == last + 1, "{step} after {last}");
                killed_with_a_checkpoint += 1;
            }
            (Ok(step), None) => assert!(step == 1 || Some(step) == before, "{step}"),
            (Err(error), None) if before.is_none() => {
                let text = dcp::core::error_chain(&error);
                assert!(!text.contains("bad "), "plainly incomplete, not damaged: {text}");
            }
            (Err(error), _) => panic!("lost: {}", dcp::core::error_chain(&error)),
        }
    }
    assert!(killed_with_a_checkpoint > 0, "no round came as far as a save");

    dcp::blocking::save(&crate::state::state(7, 0, 1), &place).unwrap();
    assert_eq!(load(&place).unwrap(), 7);
    let mut files: Vec<_> = std::fs::read_dir(&place)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files.len(), 3, "data, metadata and sidecar, no leftovers: {files:?}");
}
