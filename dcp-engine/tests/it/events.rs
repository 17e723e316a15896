//! Events of saves and loads, as an observer receives them.

use std::sync::{Arc, Mutex};

use dcp_conformance::FaultStorage;
use dcp_core::{CheckpointError, Key, Rank, Storage};
use dcp_engine::event::Operation;
use dcp_engine::{CheckpointEvent, CheckpointObserver, Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::harness::{blank, block_on, memory, on_ranks, sample};

/// Keeps all events.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<(Rank, CheckpointEvent)>>);

impl CheckpointObserver for Recorder {
    fn observe(&self, rank: Rank, event: &CheckpointEvent) {
        self.0.lock().unwrap().push((rank, event.clone()));
    }
}

impl Recorder {
    /// The names of the events other than progress, and the sum of the progress in bytes.
    fn take(&self, rank: Rank) -> (Vec<String>, u64) {
        let events = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(events.iter().all(|(of, _)| *of == rank));
        let mut bytes = 0;
        let names = events.into_iter().filter_map(|(_, event)| match event {
            CheckpointEvent::Progress { bytes: more } => {
                bytes += more;
                None
            }
            other => Some(format!("{other:?}").split([' ', '{']).next().unwrap().to_owned()),
        });
        (names.collect(), bytes)
    }
}

#[test]
fn every_rank_observes_the_steps_of_its_saves_and_loads() {
    let storage = memory();
    let reports = on_ranks(2, |rank, group| {
        let recorder = Arc::new(Recorder::default());
        let saver =
            Saver::with_settings(Settings::in_group(Arc::clone(&group)).observer(recorder.clone()));
        let writer = DcpWriter::new(Arc::clone(&storage));
        let summary = block_on(saver.save(&sample(rank, 2, 1), &writer)).unwrap();
        let (steps, bytes) = recorder.take(rank);
        assert_eq!(steps, ["Planned", "Written", "Committed"]);
        assert!(bytes > 0, "rank {rank} writes something");

        let loader = Loader::with_settings(Settings::in_group(group).observer(recorder.clone()));
        let reader = DcpReader::new(Arc::clone(&storage));
        block_on(loader.load(&mut blank(rank, 2), &reader)).unwrap();
        assert_eq!(recorder.take(rank).0, ["Planned", "Read"]);
        summary.write_times
    });
    assert_eq!(reports[0], reports[1], "all ranks have the same times");
    assert!(reports[0].slowest_rank < 2 && reports[0].imbalance() >= 1.0, "{reports:?}");
    let file = reports[0].slowest_file.as_ref().unwrap();
    assert!(file.file.starts_with(&format!("__{}_", file.rank)), "{file:?}");
    let stored = block_on(storage.stat(&Key::new(&*file.file).unwrap())).unwrap();
    assert_eq!(stored.byte_len, file.bytes);
}

#[test]
fn a_failure_is_an_event_on_every_rank() {
    on_ranks(2, |rank, group| {
        let recorder = Arc::new(Recorder::default());
        let saver = Saver::with_settings(Settings::in_group(group).observer(recorder.clone()));
        let broken: Arc<dyn Storage> = Arc::new(FaultStorage::new(memory()).dying_after(0));
        block_on(saver.save(&sample(rank, 2, 1), &DcpWriter::new(broken))).unwrap_err();
        let events = std::mem::take(&mut *recorder.0.lock().unwrap());
        let [(_, CheckpointEvent::Failed { operation, error })] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(*operation, Operation::Save);
        assert!(error.contains("rank 0"), "{error}");
    });
}

#[test]
fn an_error_in_place_of_a_state_is_an_event() {
    let recorder = Arc::new(Recorder::default());
    block_on(
        Saver::with_settings(Settings::new().observer(recorder.clone()))
            .fail(CheckpointError::Canceled),
    );
    block_on(
        Loader::with_settings(Settings::new().observer(recorder.clone()))
            .fail(CheckpointError::Canceled),
    );
    assert_eq!(recorder.take(0).0, ["Failed", "Failed"]);
}
