//! One rank of a save meets a full disk, an error, a read-only folder or a stall at each of its
//! operations: every rank returns, all with the same outcome, and the old checkpoint or the new one
//! is there.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp::collectives::LocalGroup;
use dcp::core::StorageErrorKind;
use dcp::{CheckpointError, Checkpointer, Collective, Storage};
use dcp_conformance::{Fault, FaultStorage, StallStorage};
use dcp_testing::Tortured;

use crate::crashes::{load, state};

const RANKS: u32 = 3;

/// What happens to the storage of one rank from its operation `n` on.
#[derive(Clone, Copy)]
struct Trouble {
    how: &'static str,
    storage: fn(FaultStorage, u64) -> FaultStorage,
}

const TROUBLES: [Trouble; 5] = [
    Trouble { how: "full disk", storage: |storage, n| storage.full_after(n - 1) },
    Trouble { how: "read-only folder", storage: |storage, n| storage.read_only_after(n - 1) },
    Trouble {
        how: "one I/O error",
        storage: |storage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Other)),
    },
    Trouble {
        how: "I/O errors from then on",
        storage: |storage, n| {
            (n..n + 100)
                .fold(storage, |storage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Other)))
        },
    },
    Trouble { how: "lost reply", storage: |storage, n| storage.fault(n, Fault::LoseReply) },
];

type Outcome = Result<(), CheckpointError>;

fn save(
    group: impl Collective + 'static,
    url: &str,
    layer: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage> + Send + Sync + 'static,
) -> Outcome {
    let rank = group.rank();
    let storages = dcp::default_storages().layer(move |storage, _| layer(storage));
    let checkpointer = Checkpointer::in_group(Arc::new(group)).storages(storages);
    checkpointer.save(&state(2, rank, RANKS), url).blocking().map(drop)
}

fn save_old(folder: &Path) -> String {
    let url = folder.join("run").display().to_string();
    dcp::save(&state(1, 0, 1), &url).blocking().unwrap();
    url
}

/// Checks what all ranks returned, and what is there then.
#[track_caller]
fn judge(outcomes: &[Outcome], url: &str, row: &mut Tortured, when: &str) {
    let value = load(url).unwrap_or_else(|error| panic!("{when}: {error}"));
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    assert!(failed == 0 || failed == outcomes.len(), "{when}: {outcomes:?}");
    assert!(failed > 0 || value == 2, "{when}: success without the new checkpoint");
    row.points += 1;
    row.count(if value == 2 { "new" } else { "old" });
    dcp::save(&state(9, 0, 1), url).blocking().unwrap();
    assert_eq!(load(url), Ok(9), "{when}: the next save");
}

#[test]
fn all_ranks_report_the_trouble_of_one() {
    for trouble in TROUBLES {
        let mut row = Tortured::new("overwrite, 3 ranks", trouble.how);
        for victim in 0..RANKS {
            for n in 1.. {
                let folder = tempfile::tempdir().unwrap();
                let url = save_old(folder.path());
                let opened: Arc<Mutex<Option<FaultStorage>>> = Arc::default();
                let outcomes = dcp_testing::on_each(LocalGroup::new(RANKS).build(), |group| {
                    let opened = Arc::clone(&opened);
                    let is_victim = group.rank() == victim;
                    save(group, &url, move |storage| {
                        if !is_victim {
                            return storage;
                        }
                        let faulty = (trouble.storage)(FaultStorage::new(storage), n);
                        *opened.lock().unwrap() = Some(faulty.clone());
                        Arc::new(faulty)
                    })
                });
                let when = format!("{} at operation {n} of rank {victim}", trouble.how);
                for outcome in &outcomes {
                    let Err(error) = outcome else { continue };
                    let text = dcp::core::error::error_chain(error);
                    assert!(text.contains(&format!("rank {victim}")), "{when}: {text}");
                }
                judge(&outcomes, &url, &mut row, &when);
                let operations = opened.lock().unwrap().as_ref().unwrap().operations();
                if operations < n {
                    assert!(n > 1);
                    break;
                }
            }
        }
        row.report();
    }
}

/// The deadline of a group in which one rank never answers. Where it is over before that rank stops,
/// a longer one follows.
const DEADLINE: Duration = Duration::from_millis(300);

/// Where the rank saves that is to stop, once it has opened it.
#[derive(Debug, Default)]
enum Opened {
    #[default]
    NotYet,
    Stalls(StallStorage),
    TooLate,
}

/// Saves with a rank that stops at its operation `n` until the others have returned. Returns what all
/// ranks returned, and whether the rank stopped.
fn save_stalled(url: &str, victim: u32, n: u64, deadline: Duration) -> (Vec<Outcome>, bool) {
    let opened: Arc<Mutex<Opened>> = Arc::default();
    let (sender, outcomes) = mpsc::channel();
    for group in LocalGroup::new(RANKS).deadline(deadline).build() {
        let (sender, opened, url) = (sender.clone(), Arc::clone(&opened), url.to_owned());
        let rank = group.rank();
        std::thread::spawn(move || {
            let outcome = save(group, &url, move |storage| {
                let mut opened = opened.lock().unwrap();
                if rank != victim || matches!(*opened, Opened::TooLate) {
                    return storage;
                }
                let stalled = StallStorage::new(storage, n);
                *opened = Opened::Stalls(stalled.clone());
                Arc::new(stalled)
            });
            sender.send((rank, outcome))
        });
    }
    drop(sender);
    let mut returned = Vec::new();
    while returned.len() + 1 < RANKS as usize {
        let (rank, outcome) = outcomes.recv().unwrap();
        returned.push(outcome);
        if rank == victim {
            break;
        }
    }
    let stalled = match std::mem::replace(&mut *opened.lock().unwrap(), Opened::TooLate) {
        Opened::Stalls(storage) => {
            let stalled = storage.operations() >= n;
            storage.resume();
            stalled
        }
        Opened::NotYet | Opened::TooLate => false,
    };
    returned.extend(outcomes.iter().map(|(_, outcome)| outcome));
    (returned, stalled)
}

#[test]
fn no_rank_waits_for_a_stalled_one_beyond_the_deadline() {
    let mut row = Tortured::new("overwrite, 3 ranks", "stalled rank");
    for victim in 0..RANKS {
        let (mut n, mut deadline) = (1, DEADLINE);
        loop {
            let folder = tempfile::tempdir().unwrap();
            let url = save_old(folder.path());
            let (returned, stalled) = save_stalled(&url, victim, n, deadline);
            let when = format!("stall at operation {n} of rank {victim}");
            assert_eq!(returned.len(), RANKS as usize, "{when}");
            let value = load(&url).unwrap_or_else(|error| panic!("{when}: {error}"));
            // A rank that goes on after the others gave up may still commit what all have written.
            let succeeded = returned.iter().any(Result::is_ok);
            assert!(!succeeded || value == 2, "{when}: {returned:?}");
            row.points += 1;
            row.count(if value == 2 { "new" } else { "old" });
            dcp::save(&state(9, 0, 1), &url).blocking().unwrap();
            assert_eq!(load(&url), Ok(9), "{when}: the next save");
            if stalled {
                n += 1;
            } else if returned.iter().all(Result::is_ok) {
                // It has fewer operations.
                assert!(n > 1);
                break;
            } else {
                assert!(deadline < 1000 * DEADLINE, "{when}: {returned:?}");
                deadline *= 8;
            }
        }
    }
    row.report();
}
