//! Values that ranks have under one name are compared, and those that differ are named.

use std::fmt;
use std::sync::{Arc, Mutex};

use dcp_core::error::FailureKind;
use dcp_core::{StateDict, Storage, StorageErrorKind, Value};
use dcp_engine::{SaveSummary, Saver, Settings};
use dcp_formats::dcp::DcpWriter;
use dcp_testing::CountingCollective;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::{block_on, counting_whole, memory, on_ranks, sample};

/// Saves a state for each step with one saver on each of three ranks; what each rank returned, by step.
fn saves(states: &(dyn Fn(u32, usize) -> StateDict + Sync), steps: usize) -> Vec<Vec<SaveSummary>> {
    let places: Vec<Arc<dyn Storage>> = (0..steps).map(|_| memory()).collect();
    on_ranks(3, |rank, group| {
        let saver = Saver::with_settings(Settings::in_group(group));
        let save = |(step, place): (usize, &Arc<dyn Storage>)| {
            let writer = DcpWriter::new(Arc::clone(place));
            block_on(saver.save(&states(rank, step), &writer)).unwrap()
        };
        places.iter().enumerate().map(save).collect()
    })
}

fn names(summary: &SaveSummary) -> Vec<(&str, &[u32])> {
    summary.differing.iter().map(|value| (&*value.fqn, &*value.ranks)).collect()
}

#[test]
fn values_of_one_rank_under_a_name_of_all_are_named_on_every_rank() {
    let state = |rank, step: usize| {
        let mut state = sample(rank, 3, step as i32);
        state.insert("tensor", counting_whole(&[4, 2], rank as i32));
        state.insert("value", i64::from(rank / 2));
        state
    };
    for summaries in saves(&state, 3) {
        for (step, summary) in summaries.iter().enumerate() {
            assert_eq!(summary.reused_plan, step > 0);
            assert_eq!(names(summary), [("tensor", &[1, 2][..]), ("value", &[2])], "step {step}");
        }
    }
}

/// Notes the names in warnings.
#[derive(Clone, Debug, Default)]
struct Warned(Arc<Mutex<Vec<String>>>);

impl Visit for Warned {
    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "fqn" {
            self.0.lock().unwrap().push(value.to_owned());
        }
    }
}

impl Subscriber for Warned {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() == &Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn the_coordinator_warns_of_what_differs_by_name() {
    let place = memory();
    let warnings = on_ranks(2, |rank, group| {
        let warned = Warned::default();
        let mut state = sample(rank, 2, 0);
        state.insert("rng", i64::from(rank));
        let writer = DcpWriter::new(Arc::clone(&place));
        tracing::subscriber::with_default(warned.clone(), || {
            block_on(Saver::with_settings(Settings::in_group(group)).save(&state, &writer))
                .unwrap();
        });
        warned.0.lock().unwrap().clone()
    });
    assert_eq!(warnings, [vec!["rng".to_owned()], vec![]]);
}

#[test]
fn equal_replicas_and_shards_differ_from_nothing() {
    for summaries in saves(&|rank, step| sample(rank, 3, step as i32), 2) {
        assert!(summaries.iter().all(|summary| summary.differing.is_empty()), "{summaries:?}");
    }
}

/// State that differs by rank, saved in the right way, does not hide what differs beside it.
#[test]
fn names_with_a_rank_leave_the_other_values_comparable() {
    let state = |rank, step: usize| {
        let mut state = sample(rank, 3, step as i32);
        state.insert(format!("rng/rank_{rank}"), i64::from(rank) + 10 * step as i64);
        let differs = matches!((rank, step), (1, 0) | (2, 3));
        state.insert("epoch", i64::from(differs));
        state
    };
    for summaries in saves(&state, 5) {
        let found: Vec<_> = summaries.iter().map(names).collect();
        let [first, fourth] = [[("epoch", &[1][..])], [("epoch", &[2][..])]];
        assert_eq!(found, [&first[..], &[], &[], &fourth, &[]]);
        assert!(summaries.iter().skip(1).all(|summary| summary.reused_plan));
    }
}

#[test]
fn a_save_in_which_nothing_differs_sends_no_single_hashes() {
    let places = [memory(), memory(), memory()];
    let sent = on_ranks(2, |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let saver = Saver::with_settings(Settings::in_group(Arc::clone(&group) as _));
        let mut bytes = Vec::new();
        for (place, differs) in places.iter().zip([false, false, true]) {
            let mut state: StateDict =
                (0..100_i64).map(|n| (format!("value.{n}"), Value::from(n))).collect();
            state.insert("value.7", i64::from(differs) * i64::from(rank));
            let writer = DcpWriter::new(Arc::clone(place));
            let saved = block_on(saver.save(&state, &writer)).unwrap();
            assert_eq!(saved.differing.len(), usize::from(differs));
            // The report follows the last message of the plan.
            let calls = group.take();
            bytes.push(calls[calls.len() - 3].1);
        }
        bytes
    });
    for sent in sent {
        let [first, second, third] = sent[..] else { panic!("{sent:?}") };
        // Durations take a few bytes more or less.
        assert!(first.abs_diff(second) < 20, "{sent:?}");
        assert!((1580..1630).contains(&third.saturating_sub(first)), "{sent:?}");
    }
}

/// A local disk on each node, or the memory of each process.
#[test]
fn a_commit_whose_ranks_have_storages_of_their_own_names_the_file_and_the_rank() {
    for world in [2, 3] {
        let places: Vec<Arc<dyn Storage>> = (0..world).map(|_| memory()).collect();
        let results = on_ranks(world, |rank, group| {
            let writer = DcpWriter::new(Arc::clone(&places[rank as usize]));
            let saver = Saver::with_settings(Settings::in_group(group)).place("/scratch/run");
            block_on(saver.save(&sample(rank, world, 1), &writer))
        });
        for result in results {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), FailureKind::Storage(StorageErrorKind::NotFound));
            let text = error.to_string();
            // Whichever file the coordinator looks for first.
            let is_named = (1..world).any(|rank| {
                text.contains(&format!(
                    "\"__{rank}_0.distcp\" that rank {rank} wrote is not in \"/scratch/run\" as rank 0 \
                     sees it"
                ))
            });
            assert!(is_named && text.contains("all ranks share"), "{text}");
        }
    }
}
