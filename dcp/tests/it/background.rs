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
