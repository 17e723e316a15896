//! Runs the ranks of a group, and defines their messages.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

use super::Subject;
use crate::case::{Failure, ensure};

/// The deadline for clauses in which no call reaches it.
pub(super) const PATIENT: Duration = Duration::from_secs(120);

/// The deadline for clauses in which ranks fail or die, which a group may detect at once or at the
/// deadline. A late rank must not count as dead.
pub(super) const DEAD: Duration = Duration::from_secs(20);

/// Deadlines for clauses that wait for one, tried in order until one suffices for ranks on a busy
/// machine.
pub(super) const SILENT: [Duration; 3] =
    [Duration::from_millis(500), Duration::from_secs(3), Duration::from_secs(32)];

/// The time beyond its deadline after which a call counts as hung.
const HANGS: Duration = Duration::from_secs(60);

/// A member of a group, on its thread.
pub(super) struct Member {
    pub(super) rank: Rank,
    pub(super) collective: Box<dyn Collective>,
}

impl Subject {
    /// Builds a group and runs `work` on every rank. Each rank drops its member on return.
    ///
    /// Returns the error of the first rank that fails, with its name.
    pub(super) fn on_ranks<T, F>(
        &self,
        world_size: u32,
        deadline: Duration,
        work: F,
    ) -> Result<Vec<T>, Failure>
    where
        T: Send,
        F: Fn(Member) -> Result<T, Failure> + Sync,
    {
        let group = (self.build)(world_size, deadline);
        ensure!(
            group.len() == world_size as usize,
            "the group has {} members, expected {world_size}",
            group.len()
        );
        let work = &work;
        let outcomes = std::thread::scope(|scope| {
            let threads = (0..)
                .zip(group)
                .map(|(rank, collective)| scope.spawn(move || work(Member { rank, collective })))
                .collect::<Vec<_>>();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(Failure::new("it panicked"))))
                .collect::<Vec<_>>()
        });
        (0..)
            .zip(outcomes)
            .map(|(rank, outcome): (Rank, _)| {
                outcome.map_err(|failure| {
                    Failure::new(format!("rank {rank} of {world_size}: {}", failure.message()))
                })
            })
            .collect()
    }
}

/// A message that identifies sender and turn, with a length that depends on the rank.
pub(super) fn message(turn: u32, from: Rank, to: Rank) -> Bytes {
    let mut bytes = format!("turn {turn}, from {from} to {to};").into_bytes();
    bytes.resize(bytes.len() + 7 * from as usize, b'.');
    bytes.into()
}

/// `len` bytes in a pattern that depends on the rank.
pub(super) fn bulk(len: usize, from: Rank) -> Bytes {
    let period = (0..251).map(|byte: u8| byte ^ from as u8).collect::<Vec<_>>();
    let mut bytes = period.repeat(len.div_ceil(period.len()));
    bytes.truncate(len);
    bytes.into()
}

/// Fails unless `got` contains the messages of ranks 0, 1, …, as `expected` creates them.
pub(super) fn in_rank_order(
    got: &[Bytes],
    world_size: u32,
    expected: impl Fn(Rank) -> Bytes,
) -> Result<(), Failure> {
    ensure!(
        got.len() == world_size as usize,
        "it got {} messages of {world_size} ranks",
        got.len()
    );
    for (rank, message) in (0..).zip(got) {
        let expected = expected(rank);
        ensure!(
            *message == expected,
            "message {rank} is {}, it should be {}",
            shown(message),
            shown(&expected)
        );
    }
    Ok(())
}

/// The beginning of a message, for display.
pub(super) fn shown(message: &Bytes) -> String {
    let head = message.iter().take(40).copied().collect::<Vec<_>>();
    format!("{:?} ({} bytes)", String::from_utf8_lossy(&head), message.len())
}

/// Calls `op` until it fails. Fails itself when `op` hangs or succeeds too often.
///
/// An operation in which this rank only sends may succeed once or twice before another rank's
/// failure arrives.
pub(super) fn until_error<T>(
    deadline: Duration,
    mut op: impl FnMut() -> Result<T, CollectiveError>,
) -> Result<CollectiveError, Failure> {
    const TRIES: u32 = 3;
    for _ in 0..TRIES {
        let begun = Instant::now();
        let outcome = op();
        let taken = begun.elapsed();
        ensure!(taken <= deadline + HANGS, "a call took {taken:?}, the deadline is {deadline:?}");
        if let Err(error) = outcome {
            return Ok(error);
        }
    }
    Err(Failure::new(format!("{TRIES} calls succeeded though the group is broken")))
}
