//! Background saves of programs without a runtime.

use dcp::Checkpointer;

use crate::state::{load, state};

#[test]
fn a_background_save_outlives_the_blocking_call_in_which_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("run").display().to_string();
    let checkpointer = Checkpointer::new();
    let start =
        |step| dcp::block_on(async { checkpointer.save(&state(step, 0, 1), &place).background() });
    let pending = start(7).unwrap().unwrap();
    dcp::block_on(pending.wait()).unwrap().unwrap();
    assert_eq!(load(&place).unwrap(), 7);
    drop(start(8).unwrap().unwrap());
    drop(checkpointer);
    assert_eq!(load(&place).unwrap(), 8);
}

#[test]
fn a_thread_without_a_runtime_waits_for_a_background_save() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").display().to_string();
    let saved = dcp::save(&state(4, 0, 1), &url).background().unwrap().blocking().unwrap();
    assert!(!saved.reused_plan);
    assert_eq!(load(&url).unwrap(), 4);
    let nowhere = folder.path().join("run/.metadata/below").display().to_string();
    assert!(dcp::save(&state(5, 0, 1), &nowhere).background().unwrap().blocking().is_err());
}
