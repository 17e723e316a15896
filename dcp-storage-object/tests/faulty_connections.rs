//! Checkpoints in an object store whose connections fail: no wrong byte is returned, no checkpoint
//! is visible that is not whole, and each failure names what failed.
//!
//! A seed chooses the faults. `DCP_TEST_FAULT_SEEDS=1..2000` runs those; without it, there are few.
//! Needs the servers of `cargo xtask emulators`; the trials of one that is not there are ignored.

#![expect(clippy::unwrap_used, clippy::panic, reason = "panicking is how a trial fails")]

#[path = "faulty_connections/checkpoint.rs"]
mod checkpoint;
#[path = "faulty_connections/kill.rs"]
mod kill;
#[path = "faulty_connections/place.rs"]
mod place;

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::http::{FaultRule, HttpFault, SeededFaults};
use dcp_conformance::{StallStorage, Trial};
use dcp_core::error::error_chain;
use dcp_core::storage::{LeftoverAction, PutMode, UploadOptions};
use dcp_core::{Key, Storage, StorageErrorKind as Kind};
use dcp_testing::{key, on_ranks};

use checkpoint::{load, loaded, save, save_on_one};
use place::{Place, Store, block_on, put, read};

/// Of 1000 requests, how many have a fault.
const FAULTS_PER_MILLE: u64 = 60;

type Test = fn(&Place);

const TESTS: &[(&str, Test)] = &[
    ("a lost answer of a creation is not a conflict", lost_answer_of_a_creation),
    ("a lost answer of a commit is a commit", lost_answer_of_a_commit),
    ("of two savers at once the first to commit wins", two_savers),
    ("of concurrent creators exactly one wins, by name", concurrent_creators),
    ("expired credentials and a missing bucket have kinds of their own", kinds),
    ("leftovers of an upload are removed", leftovers),
    ("a body that is too short is read again, in any place", short_bodies),
    ("a killed save leaves the earlier checkpoint, and the next one cleans up", kill::killed_saves),
];

fn main() -> ExitCode {
    if kill::is_child() {
        kill::save_as_child();
        return ExitCode::SUCCESS;
    }
    let trials = Store::ALL.into_iter().flat_map(|store| {
        let trial = move |name: String, test: Box<dyn Fn() + Send>| {
            let run = move || {
                test();
                Ok(())
            };
            let kind = if store.is_there() { "" } else { "no emulator" };
            let name = format!("{}: {name}", store.name());
            Trial::test(name, run).with_kind(kind).with_ignored_flag(!store.is_there())
        };
        let named = TESTS.iter().map(move |(name, test)| {
            let test = *test;
            trial((*name).to_owned(), Box::new(move || test(&Place::new(store))))
        });
        let seeded = seeds().map(move |seed| {
            let name = format!("saves and loads with seeded faults are whole: seed {seed}");
            trial(name, Box::new(move || seeded_faults(store, seed)))
        });
        named.chain(seeded)
    });
    dcp_conformance::run(trials.collect())
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("DCP_TEST_FAULT_SEEDS") else { return 0..16 };
    let (first, end) = text.split_once("..").unwrap();
    first.parse().unwrap()..end.parse().unwrap()
}

/// Saves a checkpoint over another, or none, and loads it, all with faults.
fn seeded_faults(store: Store, seed: u64) {
    let place = Place::of_seed(store, seed);
    let before = seed.is_multiple_of(2).then_some(1);
    if let Some(step) = before {
        on_ranks(2, |rank, group| save(group, &place.storage(), step, rank).unwrap());
    }
    place.proxy.set_seeded(Some(SeededFaults::new(seed, FAULTS_PER_MILLE)));
    let saved = on_ranks(2, |rank, group| save(group, &place.storage(), 2, rank));
    let with_faults = on_ranks(3, |rank, group| load(group, &place.storage(), rank));
    let faults = place.proxy.traffic().faults;
    place.proxy.calm();
    let after = loaded(&place.storage());

    for error in saved.iter().filter_map(|saved| saved.as_ref().err()) {
        let text = error_chain(error);
        assert!(place.is_named_in(&text), "a failed save names no key: {text}");
    }
    match &after {
        Ok(2) => {}
        Ok(step) => {
            assert_eq!(Some(*step), before);
            assert!(saved.iter().all(Result::is_err), "the save is lost after {faults} faults");
        }
        Err(error) => {
            let text = error_chain(error);
            assert!(before.is_none() && saved.iter().all(Result::is_err), "{text}");
            // Or empty, if the first write failed.
            let is_incomplete = text.contains(".metadata") || text.contains("not a checkpoint");
            assert!(is_incomplete, "incomplete, and not damaged: {text}");
        }
    }
    for outcome in with_faults {
        match outcome {
            // `load` compares every element.
            Ok(step) => assert_eq!(Some(step), after.as_ref().ok().copied()),
            Err(error) => {
                let text = error_chain(&error);
                assert!(place.is_named_in(&text), "a failed load names no key: {text}");
                // A read of a range, and not of a whole object.
                let is_ranged = text.contains("cannot read") && text.contains(".distcp\"");
                assert!(!is_ranged || text.contains("bytes "), "no range: {text}");
            }
        }
    }
    save_on_one(&place.storage(), 3).unwrap();
    assert_eq!(loaded(&place.storage()).unwrap(), 3);
}

fn lost_answer_of_a_creation(place: &Place) {
    let storage = place.storage();
    let lose = || {
        let lost = FaultRule::new(HttpFault::LoseAnswer).method("PUT").containing("created");
        place.proxy.add(lost.times(1));
    };
    lose();
    let version = put(&storage, "created", "mine", PutMode::Create).unwrap().version;
    assert_eq!(place.proxy.traffic().faults, 1);
    assert_eq!(block_on(storage.stat(&key("created"))).unwrap().version, version);

    // The object of another writer does not pass as its own.
    lose();
    let other = put(&storage, "created", "other", PutMode::Create).unwrap_err();
    assert_eq!(other.kind(), Kind::AlreadyExists);
    let replace = PutMode::Update(version.unwrap());
    lose();
    put(&storage, "created", "newer", replace.clone()).unwrap();
    let late = put(&storage, "created", "late", replace).unwrap_err();
    assert_eq!(late.kind(), Kind::Conflict);
    assert_eq!(read(&storage, "created").unwrap(), "newer");
}

fn lost_answer_of_a_commit(place: &Place) {
    for step in [1, 2] {
        // GCS has its dot encoded.
        let lost = FaultRule::new(HttpFault::LoseAnswer).method("PUT").containing("metadata");
        place.proxy.add(lost.times(1));
        save_on_one(&place.storage(), step).unwrap();
        assert_eq!(loaded(&place.storage()).unwrap(), step);
    }
    assert_eq!(place.proxy.traffic().faults, 2);
}

/// A saver is stopped before each of its operations while another saves.
fn two_savers(place: &Place) {
    save_on_one(&place.storage(), 1).unwrap();
    let counted = StallStorage::new(place.storage(), u64::MAX);
    save_on_one(&(Arc::new(counted.clone()) as Arc<dyn Storage>), 1).unwrap();
    for operation in 1..=counted.operations() {
        let stalled = StallStorage::new(place.storage(), operation);
        let slow = Arc::new(stalled.clone()) as Arc<dyn Storage>;
        let (first, second) = std::thread::scope(|scope| {
            let first = scope.spawn(|| save_on_one(&slow, 2));
            block_on(stalled.stopped());
            let second = save_on_one(&place.storage(), 3);
            stalled.resume();
            (first.join().unwrap(), second)
        });
        let after = loaded(&place.storage()).unwrap();
        match (&first, &second) {
            (Ok(()), Ok(())) => {
                // One saved after the other.
                assert!(after == 2 || after == 3);
            }
            (Ok(()), Err(_)) => assert_eq!(after, 2),
            (Err(_), Ok(())) => assert_eq!(after, 3, "operation {operation}"),
            (Err(first), Err(second)) => {
                panic!("both failed: {} and {}", error_chain(first), error_chain(second))
            }
        }
        for error in [first.err(), second.err()].into_iter().flatten() {
            let text = error_chain(&error);
            assert!(place.is_named_in(&text), "{text}");
        }
    }
}

fn concurrent_creators(place: &Place) {
    // Seeded faults leave some requests without an answer.
    let place = &Place::new(place.store).with_stalls();
    for round in 0..8 {
        place.proxy.set_seeded(Some(SeededFaults::new(round, 150)));
        let name = format!("created-{round}");
        let outcomes = on_ranks(4, |rank, _| {
            put(&place.storage(), &name, &format!("creator {rank}"), PutMode::Create)
        });
        place.proxy.calm();
        let winners: Vec<usize> = (0..4).filter(|rank| outcomes[*rank].is_ok()).collect();
        let stored = read(&place.storage(), &name);
        let failures: Vec<_> = outcomes.iter().filter_map(|o| o.as_ref().err()).collect();
        for error in &failures {
            let text = error_chain(*error);
            assert!(text.contains(&name), "{text}");
            assert!(matches!(error.kind(), Kind::AlreadyExists | Kind::Transient), "{text}");
        }
        let gave_up = failures.iter().any(|error| error.kind() == Kind::Transient);
        match (&winners[..], stored) {
            ([winner], Ok(stored)) => assert_eq!(stored, format!("creator {winner}")),
            // A creator that gave up without an answer may have won.
            ([], _) if gave_up => {}
            (winners, stored) => panic!("round {round}: {winners:?} won, stored is {stored:?}"),
        }
    }
}

fn kinds(place: &Place) {
    let missing = place.in_bucket("dcp-test-absent");
    for error in
        [read(&missing, "k").unwrap_err(), put(&missing, "k", "x", PutMode::Create).unwrap_err()]
    {
        assert_eq!(error.kind(), Kind::NoBucket, "{}", error_chain(&error));
    }
    let storage = place.storage();
    assert_eq!(read(&storage, "k").unwrap_err().kind(), Kind::NotFound);

    place.proxy.add(FaultRule::new(HttpFault::expired_token()));
    for error in
        [read(&storage, "k").unwrap_err(), put(&storage, "k", "x", PutMode::Create).unwrap_err()]
    {
        let text = error_chain(&error);
        assert_eq!(error.kind(), Kind::Credentials, "{text}");
        assert!(text.contains("\"k\""), "{text}");
    }
    let text = error_chain(&save_on_one(&storage, 1).unwrap_err());
    assert!(text.contains("ExpiredToken"), "{text}");
}

fn leftovers(place: &Place) {
    let storage = place.storage();
    put(&storage, "whole", "x", PutMode::Create).unwrap();
    for name in ["folder/first", "second"] {
        block_on(async {
            let part = storage.capabilities().write_limits.part_bytes;
            let options = UploadOptions::new(PutMode::Overwrite, part);
            let mut upload = storage.start_upload(&key(name), options).await.unwrap();
            upload.put_part(b"part".to_vec().into()).await.unwrap();
            // As a killed process does.
            std::mem::forget(upload);
        });
    }
    let remove = |folder: Option<&Key>| {
        block_on(storage.leftovers(folder, std::time::Duration::ZERO, LeftoverAction::Remove))
            .unwrap()
    };
    // Azure lists no uploads, and removes their blocks after a week.
    let listed = usize::from(place.store != Store::Azure);
    assert_eq!(remove(Some(&key("folder"))).len(), listed);
    assert_eq!((remove(None).len(), remove(None).len()), (listed, 0));
    assert_eq!(place.names(), ["whole"]);
}

/// Each request of a load is answered in turn with too few bytes, in good order or not.
fn short_bodies(place: &Place) {
    save_on_one(&place.storage(), 1).unwrap();
    place.proxy.clear();
    loaded(&place.storage()).unwrap();
    let requests = place.proxy.traffic().requests;
    for request in 0..requests {
        for fault in [HttpFault::Truncate { after: 10 }, HttpFault::Shorten { by: 1 }] {
            place.proxy.add(FaultRule::new(fault.clone()).after(request).times(1));
            match loaded(&place.storage()) {
                Ok(step) => assert_eq!(step, 1),
                Err(error) => {
                    let text = error_chain(&error);
                    let of = format!("request {request}, {fault:?}: {text}");
                    // Without a length of its own to compare with, a whole object is parsed.
                    assert!(matches!(fault, HttpFault::Shorten { .. }), "{of}");
                    assert!(place.is_named_in(&text) && !text.contains(".distcp"), "{of}");
                }
            }
            place.proxy.calm();
        }
    }
}
