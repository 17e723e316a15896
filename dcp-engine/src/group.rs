//! A collective on a thread of its own, and the ways in which ranks succeed or fail together.

use std::sync::Arc;
use std::sync::mpsc;

use bytes::{Bytes, BytesMut};
use dcp_core::error::{Phase, RankFailure, Standing};
use dcp_core::plan::PlanContext;
use dcp_core::{CheckpointError, Collective, CollectiveError, PlanError, Rank};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce(&dyn Collective) + Send>;

/// The ranks of one save or load; without a collective, this process alone.
///
/// Collectives block, so each operation gets a thread for them; the async side awaits the
/// results. An operation that ends without the knowledge of the other ranks (a panic, a canceled
/// future, an error outside the protocol) aborts the group, so that no rank hangs.
///
/// [`Saver`](crate::Saver) and [`Loader`](crate::Loader) are made of it; a crate with a protocol of
/// its own makes one for each operation and [`run`](Self::run)s it. Every method
/// is called by all ranks in the same order, also by those that have already failed: what failed
/// goes in as an `Err` and comes out, on every rank, as one [`CheckpointError::Ranks`]. A rank that
/// is lost makes every method fail with [`CheckpointError::Lost`].
#[doc(alias = "ProcessGroup")]
pub struct Group {
    collective: Option<Arc<dyn Collective>>,
    jobs: Option<mpsc::Sender<Job>>,
    coordinator: Rank,
    /// The number of this rank in failures.
    called: Rank,
    concluded: bool,
}

/// The byte at the end or start of messages without an encoding of their own.
const MESSAGE: u8 = 0;
const FAILURE: u8 = 1;

/// The outcome of a step on one rank, on the wire.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict<T> {
    #[serde(rename = "d")]
    Done(T),
    /// [`RankFailure::into_parts`] of each failure.
    #[serde(rename = "f")]
    Failed(Vec<(Rank, String, String)>),
}

impl Group {
    /// The ranks of `collective`, of which `coordinator` decides.
    ///
    /// # Errors
    ///
    /// When the group has no such rank, or there is no thread for its calls.
    pub fn new(
        collective: Option<Arc<dyn Collective>>,
        coordinator: Rank,
    ) -> Result<Self, CheckpointError> {
        let world_size = collective.as_ref().map_or(1, |c| c.world_size());
        if coordinator >= world_size {
            return Err(CollectiveError::Rendezvous {
                message: format!("coordinator {coordinator} of a group of {world_size} ranks"),
            }
            .into());
        }
        let jobs = collective.clone().map(start_thread).transpose()?;
        let called = collective.as_ref().map_or(0, |c| c.rank());
        Ok(Self { collective, jobs, coordinator, called, concluded: false })
    }

    /// Sets the number of this rank in failures, where the group is a part of a larger one; by default
    /// its rank in the group.
    #[must_use]
    pub fn called(mut self, rank: Rank) -> Self {
        self.called = rank;
        self
    }

    /// This rank, and the size of the group.
    #[must_use]
    pub fn context(&self) -> PlanContext {
        self.collective.as_ref().map_or_else(PlanContext::solo, |c| {
            PlanContext::new(c.rank(), c.world_size()).with_coordinator(self.coordinator)
        })
    }

    /// Whether every rank has this error, so that none goes on.
    #[must_use]
    pub fn is_agreed(&self, error: &CheckpointError) -> bool {
        self.collective.is_none() || matches!(error, CheckpointError::Ranks { .. })
    }

    /// Does an operation of all ranks, and [`conclude`](Self::conclude)s with its result.
    ///
    /// # Errors
    ///
    /// Those of `operation`.
    pub async fn run<T>(
        self,
        operation: impl AsyncFnOnce(&Self) -> Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        let result = operation(&self).await;
        self.conclude(&result);
        result
    }

    /// The operation ended with `result`, on every rank, unless the error says
    /// otherwise.
    pub fn conclude<T>(mut self, result: &Result<T, CheckpointError>) {
        self.concluded = result.as_ref().err().is_none_or(|error| self.is_agreed(error));
    }

    /// Brings each rank's outcome to the coordinator, which alone gets `Some`: every rank's value
    /// in rank order, or one error that lists all failures.
    ///
    /// # Errors
    ///
    /// When a rank is lost; what ranks failed with is in the result.
    pub async fn gather_results<T>(
        &self,
        phase: Phase,
        mine: Result<T, CheckpointError>,
    ) -> Result<Option<Result<Vec<T>, CheckpointError>>, CheckpointError>
    where
        T: Serialize + DeserializeOwned,
    {
        if self.collective.is_none() {
            return Ok(Some(mine.map(|value| vec![value])));
        }
        let (root, bytes) = (self.coordinator, self.verdict(mine)?);
        let all = self.call(phase, move |c| c.gather(root, bytes)).await?;
        all.map(|all| judge(phase, &all)).transpose()
    }

    /// Sends the decision of the coordinator, which alone passes `Some`, to all ranks. The
    /// coordinator keeps the second half of its value.
    ///
    /// # Errors
    ///
    /// On every rank what the coordinator failed with, or when a rank is lost.
    pub async fn broadcast_result<T, K>(
        &self,
        phase: Phase,
        decision: Option<Result<(T, K), CheckpointError>>,
    ) -> Result<(T, Option<K>), CheckpointError>
    where
        T: Serialize + DeserializeOwned,
    {
        if self.collective.is_none() {
            let (decided, kept) = decision.ok_or_else(no_decision)??;
            return Ok((decided, Some(kept)));
        }
        let root = self.coordinator;
        let (bytes, kept) = match decision {
            None => (None, None),
            Some(Ok((decided, kept))) => (Some(self.verdict(Ok(decided))?), Some(kept)),
            Some(Err(error)) => (Some(self.verdict::<T>(Err(error))?), None),
        };
        let bytes = self.call(phase, move |c| c.broadcast(root, bytes)).await?;
        let decided = judge(phase, &[bytes])??.pop().ok_or_else(no_decision)?;
        Ok((decided, kept))
    }

    /// Brings each rank's outcome to every rank: all values in rank order, or on every rank the
    /// same error that lists all failures.
    ///
    /// # Errors
    ///
    /// On every rank what any rank failed with, or when a rank is lost.
    pub async fn all_gather_results<T>(
        &self,
        phase: Phase,
        mine: Result<T, CheckpointError>,
    ) -> Result<Vec<T>, CheckpointError>
    where
        T: Serialize + DeserializeOwned,
    {
        if self.collective.is_none() {
            return Ok(vec![mine?]);
        }
        let bytes = self.verdict(mine)?;
        let all = self.call(phase, move |c| c.all_gather(bytes)).await?;
        judge(phase, &all)?
    }

    /// As [`all_gather_results`](Self::all_gather_results); this rank also keeps the second half
    /// of its own value.
    ///
    /// # Errors
    ///
    /// On every rank what any rank failed with, or when a rank is lost.
    pub async fn all_gather_with<T, K>(
        &self,
        phase: Phase,
        mine: Result<(T, K), CheckpointError>,
    ) -> Result<(Vec<T>, K), CheckpointError>
    where
        T: Serialize + DeserializeOwned,
    {
        let (sent, kept) = match mine {
            Ok((sent, kept)) => (Ok(sent), Some(kept)),
            Err(error) => (Err(error), None),
        };
        let all = self.all_gather_results(phase, sent).await?;
        Ok((all, kept.ok_or_else(|| self.unanswered())?))
    }

    /// Returns this rank's value when every rank has succeeded, or on every rank one error that
    /// lists all failures.
    ///
    /// # Errors
    ///
    /// On every rank what any rank failed with, or when a rank is lost.
    pub async fn all_succeed<T>(
        &self,
        phase: Phase,
        mine: Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        Ok(self.all_gather_with(phase, mine.map(|value| ((), value))).await?.1)
    }

    /// The error of a rank that failed where the group answers that none did, as with a
    /// [`Collective`] that mixes up messages.
    #[must_use]
    pub fn unanswered(&self) -> CheckpointError {
        let message = "the group lost the error of this rank".to_owned();
        CollectiveError::Mismatch { rank: self.called, op: "all_gather", message }.into()
    }

    /// Every rank's message in rank order, on the coordinator.
    ///
    /// # Errors
    ///
    /// When a rank is lost.
    pub async fn gather(
        &self,
        phase: Phase,
        mine: Bytes,
    ) -> Result<Option<Vec<Bytes>>, CheckpointError> {
        if self.collective.is_none() {
            return Ok(Some(vec![mine]));
        }
        let root = self.coordinator;
        self.call(phase, move |c| c.gather(root, mine)).await
    }

    /// Hands each rank its message from the coordinator, which alone passes `Some`, or on every
    /// rank the coordinator's error.
    ///
    /// # Errors
    ///
    /// On every rank what the coordinator failed with, or when a rank is lost.
    pub async fn scatter<K>(
        &self,
        phase: Phase,
        all: Option<Result<(Vec<Bytes>, K), CheckpointError>>,
    ) -> Result<(Bytes, Option<K>), CheckpointError> {
        if self.collective.is_none() {
            let (mut messages, kept) = all.ok_or_else(no_decision)??;
            return Ok((messages.pop().unwrap_or_default(), Some(kept)));
        }
        let tagged = |tag: u8, body: &[u8]| Bytes::from([&[tag], body].concat());
        let (messages, kept) = match all {
            None => (None, None),
            Some(Ok((messages, kept))) => {
                (Some(messages.iter().map(|m| tagged(MESSAGE, m)).collect()), Some(kept))
            }
            Some(Err(error)) => {
                let failure = tagged(FAILURE, &self.verdict::<()>(Err(error))?);
                (Some(vec![failure; self.context().world_size as usize]), None)
            }
        };
        let root = self.coordinator;
        let mine = self.call(phase, move |c| c.scatter(root, messages)).await?;
        match mine.split_first() {
            Some((&MESSAGE, _)) => Ok((mine.slice(1..), kept)),
            Some((&FAILURE, failure)) => {
                judge::<()>(phase, &[Bytes::copy_from_slice(failure)])??;
                Err(no_decision())
            }
            _ => Err(no_decision()),
        }
    }

    /// Gives every rank the bytes of `root`, which alone passes `Some`, or on every rank the same
    /// error with what `root` says.
    ///
    /// # Errors
    ///
    /// On every rank what `root` failed with, or when a rank is lost.
    pub async fn broadcast(
        &self,
        phase: Phase,
        root: Rank,
        from_root: Option<Result<Bytes, CheckpointError>>,
    ) -> Result<Bytes, CheckpointError> {
        if self.collective.is_none() {
            return from_root.ok_or_else(no_decision)?;
        }
        let message = from_root.map(|mine| self.tagged(mine)).transpose()?;
        let received = self.call(phase, move |c| c.broadcast(root, message)).await?;
        Self::untagged(phase, vec![received])?.pop().ok_or_else(no_decision)
    }

    /// Brings each rank's bytes to every rank, in rank order, or on every rank the same error that
    /// lists all failures. As [`all_gather_results`](Self::all_gather_results), for bytes that need no encoding.
    ///
    /// # Errors
    ///
    /// On every rank what any rank failed with, or when a rank is lost.
    pub async fn exchange(
        &self,
        phase: Phase,
        mine: Result<Bytes, CheckpointError>,
    ) -> Result<Vec<Bytes>, CheckpointError> {
        if self.collective.is_none() {
            return Ok(vec![mine?]);
        }
        let message = self.tagged(mine)?;
        let all = self.call(phase, move |c| c.all_gather(message)).await?;
        Self::untagged(phase, all)
    }

    /// A message whose last byte distinguishes data from failures.
    fn tagged(&self, mine: Result<Bytes, CheckpointError>) -> Result<Bytes, CheckpointError> {
        let (message, tag) = match mine {
            Ok(message) => (message, MESSAGE),
            Err(error) => (self.verdict::<()>(Err(error))?, FAILURE),
        };
        // With room for it, the whole message is not copied.
        let mut message = message.try_into_mut().unwrap_or_else(|shared| {
            let mut own = BytesMut::with_capacity(shared.len() + 1);
            own.extend_from_slice(&shared);
            own
        });
        message.extend_from_slice(&[tag]);
        Ok(message.freeze())
    }

    fn untagged(phase: Phase, all: Vec<Bytes>) -> Result<Vec<Bytes>, CheckpointError> {
        let (mut messages, mut failures) = (Vec::with_capacity(all.len()), Vec::new());
        for mut message in all {
            let tag = message.split_off(message.len().saturating_sub(1));
            match *tag {
                [MESSAGE] => messages.push(message),
                [FAILURE] => failures.push(message),
                _ => return Err(no_decision()),
            }
        }
        judge::<()>(phase, &failures)??;
        Ok(messages)
    }

    fn verdict<T: Serialize>(
        &self,
        mine: Result<T, CheckpointError>,
    ) -> Result<Bytes, CheckpointError> {
        let verdict = match mine {
            Ok(value) => Verdict::Done(value),
            // An error that already lists ranks is not wrapped again.
            Err(CheckpointError::Ranks { failures, .. }) => failed(failures),
            Err(error) => failed(vec![RankFailure::of(self.called, &error)]),
        };
        let mut bytes = Vec::new();
        ciborium::into_writer(&verdict, &mut bytes).map_err(|error| wire(&error))?;
        Ok(bytes.into())
    }

    async fn call<T: Send + 'static>(
        &self,
        phase: Phase,
        operation: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        let lose = |source| CheckpointError::Lost { phase, standing: Standing::NoSave, source };
        self.call_collective(operation).await.map_err(lose)
    }

    async fn call_collective<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError> + Send + 'static,
    ) -> Result<T, CollectiveError> {
        let lost = || CollectiveError::Rendezvous {
            message: "the thread of the collective is gone; it panicked".into(),
        };
        let jobs = self.jobs.as_ref().ok_or_else(lost)?;
        let (done, result) = oneshot::channel();
        let job: Job = Box::new(move |collective| {
            // Nobody listens any more only when the operation was canceled.
            let _ = done.send(operation(collective));
        });
        jobs.send(job).map_err(|_| lost())?;
        result.await.map_err(|_| lost())?
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(collective) = &self.collective
            && !self.concluded
        {
            collective.abort("the rank left a save or load before its end");
        }
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("context", &self.context()).finish_non_exhaustive()
    }
}

fn start_thread(collective: Arc<dyn Collective>) -> Result<mpsc::Sender<Job>, CheckpointError> {
    let (sender, jobs) = mpsc::channel::<Job>();
    std::thread::Builder::new()
        .name("dcp-collective".into())
        .spawn(move || jobs.into_iter().for_each(|job| job(&*collective)))
        .map_err(|error| CollectiveError::Rendezvous {
            message: format!("no thread for the collective: {error}"),
        })?;
    Ok(sender)
}

fn failed<T>(failures: Vec<RankFailure>) -> Verdict<T> {
    Verdict::Failed(failures.into_iter().map(RankFailure::into_parts).collect())
}

/// Folds the verdicts of ranks: the outer error is a message that cannot be read.
fn judge<T: DeserializeOwned>(
    phase: Phase,
    all: &[Bytes],
) -> Result<Result<Vec<T>, CheckpointError>, CheckpointError> {
    let (mut values, mut failures) = (Vec::new(), Vec::new());
    // One for all messages: clearing it takes longer than decoding an outcome.
    let mut scratch = [0; 4096];
    for bytes in all {
        match ciborium::de::from_reader_with_buffer(&**bytes, &mut scratch)
            .map_err(|error| wire(&error))?
        {
            Verdict::Done(value) => values.push(value),
            Verdict::Failed(some) => {
                failures.extend(some.into_iter().map(RankFailure::from_parts));
            }
        }
    }
    // Ranks that already had the same error send it again.
    failures.sort_by(|a, b| (a.rank, &a.message).cmp(&(b.rank, &b.message)));
    failures.dedup();
    Ok(if failures.is_empty() {
        Ok(values)
    } else {
        Err(CheckpointError::Ranks { phase, failures })
    })
}

fn wire(error: &dyn std::error::Error) -> CheckpointError {
    let message = "the outcome of a rank".to_owned();
    PlanError::message(message, error.to_string()).into()
}

fn no_decision() -> CheckpointError {
    PlanError::out_of_step("the message of the coordinator has no decision").into()
}
