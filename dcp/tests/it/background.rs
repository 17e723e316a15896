//! Background saves of programs without a runtime.

use std::sync::Arc;

use dcp::{Access, BackgroundSaver, DcpWriter, Saver, StorageWriter};

use crate::state::{load, state};

fn writer(place: &str) -> Arc<dyn StorageWriter> {
    let storage = dcp::default_storages().open(place, Access::Write).unwrap();
    Arc::new(DcpWriter::new(storage))
}

#[test]
fn a_background_save_outlives_the_blocking_call_in_which_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("run").display().to_string();
    let saver = BackgroundSaver::new(Saver::new());
    let start =
        |step| dcp::blocking::run(async { saver.start(&state(step, 0, 1), writer(&place)) });
    let pending = start(7).unwrap().unwrap();
    dcp::blocking::run(pending.wait()).unwrap().unwrap();
    assert_eq!(load(&place).unwrap(), 7);
    drop(start(8).unwrap().unwrap());
    drop(saver);
    assert_eq!(load(&place).unwrap(), 8);
}
