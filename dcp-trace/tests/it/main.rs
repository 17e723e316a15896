//! Traces of real saves and loads, and of files that are no traces.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

mod targets;

use std::io::Write;
use std::sync::{Arc, Mutex};

use dcp_conformance::FaultStorage;
use dcp_core::storage::{PutMode, UploadOptions};
use dcp_core::{Key, StateDict, Storage, Tensor};
use dcp_engine::{Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_testing::{block_on, memory, on_ranks};
use dcp_trace::{Trace, TraceRecorder, TraceSummary};
use proptest::prelude::*;

/// A file in memory.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    fn trace(&self) -> Trace {
        Trace::parse(&self.bytes()).unwrap()
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A tensor per rank; rank 1 has the larger one.
fn state(rank: u32) -> StateDict {
    let elements = 1_000 * (u64::from(rank) + 1);
    let tensor = Tensor::from_slice(&vec![1.0_f32; elements as usize], [elements]).unwrap();
    let mut state = StateDict::new();
    state.insert(format!("rank{rank}.weight"), tensor);
    state
}

/// Each rank saves, and loads, with a file of its own.
fn save_and_load() -> Trace {
    let storage = memory();
    let traces = on_ranks(2, |rank, group| {
        let sink = Sink::default();
        let recorder = TraceRecorder::to(sink.clone());
        let storage = recorder.storage(rank, Arc::clone(&storage));
        let saver = Saver::with_settings(
            Settings::in_group(Arc::clone(&group)).observer(recorder.observer()),
        );
        let writer = DcpWriter::new(Arc::clone(&storage));
        block_on(saver.save(&state(rank), &writer)).unwrap();
        let loader = Loader::with_settings(Settings::in_group(group).observer(recorder.observer()));
        block_on(loader.load(&mut state(rank), &DcpReader::new(storage))).unwrap();
        recorder.finish().unwrap();
        sink.trace()
    });
    let mut all = Trace::default();
    traces.into_iter().for_each(|trace| all.merge(trace));
    all
}

#[test]
fn a_summary_has_the_phases_files_and_requests_of_every_rank() {
    let summary = TraceSummary::of(&save_and_load());
    assert_eq!(summary.ranks, [0, 1]);
    let names: Vec<_> = summary.operations.iter().map(|one| (&*one.name, one.number)).collect();
    assert_eq!(names, [("save", 0), ("load", 0)]);
    for operation in &summary.operations {
        assert_eq!(operation.ranks.len(), 2);
        for rank in &operation.ranks {
            let phases: Vec<_> = rank.phases.iter().map(|phase| &*phase.name).collect();
            match &*operation.name {
                "save" => assert_eq!(phases, ["plan", "write", "wait", "commit"]),
                _ => assert_eq!(phases, ["plan", "read", "wait"]),
            }
            assert!(rank.bytes >= 4_000 * (u64::from(rank.rank) + 1), "{rank:?}");
            assert!(rank.error.is_none() && rank.duration > 0.0, "{rank:?}");
        }
        assert!(operation.imbalance >= 1.0 && operation.duration > 0.0);
    }
    let written: Vec<_> = summary.files.iter().filter(|file| file.written).collect();
    for (file, rank) in [("__0_0.distcp", 0), ("__1_0.distcp", 1), (".metadata", 0)] {
        let found = written.iter().find(|one| one.file == file && one.rank == rank).unwrap();
        assert!(found.bytes > 0 && found.duration > 0.0, "{found:?}");
    }
    assert!(summary.files.iter().any(|one| !one.written && one.file == ".metadata"));
    assert!(summary.requests.iter().any(|one| one.name == "read" && one.failed == 0));
    assert!(!summary.is_cut);
}

#[test]
fn concurrent_requests_are_in_rows_of_their_own() {
    let sink = Sink::default();
    let recorder = TraceRecorder::to(sink.clone());
    let storage = recorder.storage(0, memory());
    let keys = [Key::new("a").unwrap(), Key::new("b").unwrap()];
    let uploads: Vec<_> = keys
        .iter()
        .map(|key| {
            block_on(storage.start_upload(key, UploadOptions::new(PutMode::Create, 1 << 20)))
                .unwrap()
        })
        .collect();
    for mut upload in uploads {
        block_on(upload.put_part(bytes::Bytes::from_static(b"part").into())).unwrap();
        block_on(upload.complete()).unwrap();
    }
    recorder.finish().unwrap();
    let trace = sink.trace();
    let files: Vec<_> = trace.events.iter().filter(|event| event.is_span("file")).collect();
    assert_eq!(files.len(), 2);
    assert_ne!(files[0].row, files[1].row);
    assert_eq!(files[0].number("bytes"), Some(4));
    // No two spans of a row overlap, or a viewer cannot draw them.
    for left in &trace.events {
        for right in trace.events.iter().filter(|right| right.row == left.row && *right != left) {
            let apart = left.micros + left.duration() <= right.micros
                || right.micros + right.duration() <= left.micros;
            assert!(apart || left.kind == "M" || right.kind == "M", "{left:?} {right:?}");
        }
    }
}

#[test]
fn failures_are_in_the_trace() {
    let sink = Sink::default();
    let recorder = TraceRecorder::to(sink.clone());
    let broken: Arc<dyn Storage> = Arc::new(FaultStorage::new(memory()).dying_after(0));
    let writer = DcpWriter::new(recorder.storage(0, broken));
    block_on(
        Saver::with_settings(Settings::new().observer(recorder.observer()))
            .save(&state(0), &writer),
    )
    .unwrap_err();
    recorder.finish().unwrap();
    let summary = TraceSummary::of(&sink.trace());
    assert!(summary.operations[0].ranks[0].error.is_some(), "{summary:?}");
    assert!(summary.requests.iter().any(|one| one.failed > 0), "{summary:?}");
}

#[test]
fn a_trace_of_a_process_that_died_is_read_up_to_its_end() {
    let mut whole = Vec::new();
    let trace = save_and_load();
    trace.write(&mut whole).unwrap();
    assert_eq!(Trace::parse(&whole).unwrap().events.len(), trace.events.len());
    for cut in [whole.len() - 3, whole.len() / 2, whole.len() / 3] {
        let part = Trace::parse(&whole[..cut]).unwrap();
        assert!(part.is_cut && !part.events.is_empty());
        assert!(TraceSummary::of(&part).is_cut);
    }
}

#[test]
fn a_failing_write_ends_the_recording_and_not_the_save() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let recorder = TraceRecorder::to(Full);
    let writer = DcpWriter::new(recorder.storage(0, memory()));
    block_on(
        Saver::with_settings(Settings::new().observer(recorder.observer()))
            .save(&state(0), &writer),
    )
    .unwrap();
    assert_eq!(recorder.finish().unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    recorder.finish().unwrap();
}

#[test]
fn what_is_no_trace_is_refused() {
    for text in ["", "PK", "[1]\n", "[\nno event,\n{}\n]", "{}", "{\"traceEvents\": 3}"] {
        Trace::parse(text.as_bytes()).unwrap_err();
    }
    let object = Trace::parse(br#"{"traceEvents": [{"ph": "X", "ts": 1, "dur": -2}]}"#).unwrap();
    assert_eq!(TraceSummary::of(&object).ranks, [0]);
}

#[test]
fn the_corpus_is_read() {
    for file in
        std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/trace")).unwrap()
    {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(Trace::parse(&bytes).is_ok());
        targets::trace(&bytes);
        for cut in 0..bytes.len() {
            targets::trace(&bytes[..cut]);
        }
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        targets::trace(&bytes);
    }
}
