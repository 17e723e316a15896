//! The rounds of a group: what every rank reports, and the exchanges that all have requested.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, Collective, CollectiveError, PlanError, Rank};
use tokio::sync::oneshot;

use super::GroupEnd;

/// The pause between rounds grows from the first to the last while nothing is exchanged.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(100);

const MAGIC: [u8; 4] = *b"djg1";
const OP: &str = "a round of a job";

/// An exchange of all ranks at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Gather = 1,
    Broadcast = 2,
    AllGather = 3,
}

type Messages = Result<Vec<Bytes>, CheckpointError>;

/// An exchange that this rank waits for.
struct Request {
    operation: Operation,
    mine: Bytes,
    reply: oneshot::Sender<Messages>,
}

type Observer = Arc<dyn Fn(u64) + Send + Sync>;

#[derive(Default)]
struct State {
    request: Option<Request>,
    /// The end of the work of this rank, if it has ended.
    outcome: Option<Result<(), String>>,
    end: Option<GroupEnd>,
    observer: Option<Observer>,
}

/// The state that the thread of the rounds shares with the jobs.
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether a rank failed or was lost.
    pub(super) broken: AtomicBool,
    /// Whether rank 0 may commit what this rank wrote.
    pub(super) handed_over: AtomicBool,
    /// Bytes that this rank has processed.
    pub(super) done: AtomicU64,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

/// The message of a rank in a round.
#[derive(Debug, PartialEq, Eq)]
struct Report {
    done: u64,
    standing: Standing,
}

#[derive(Debug, PartialEq, Eq)]
enum Standing {
    Working,
    Waiting(Operation),
    Finished,
    Failed(String),
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn observe(&self, observer: Observer) {
        self.state().observer = Some(observer);
    }

    /// Reports how the work of this rank ended. The first report stands.
    pub(super) fn report(&self, outcome: Result<(), String>) {
        self.state().outcome.get_or_insert(outcome);
        self.changed.notify_all();
    }

    /// Waits for the end.
    pub(super) fn wait(&self) -> GroupEnd {
        let mut state = self.state();
        let end = loop {
            match &state.end {
                Some(end) => break end.clone(),
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(state);
        // The thread says farewell to the other ranks, which would count a process that ends
        // before as lost.
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        end
    }

    pub(super) fn end_as_error(&self) -> CheckpointError {
        let state = self.state();
        as_error(state.end.as_ref())
    }

    pub(super) async fn exchange(&self, operation: Operation, mine: Bytes) -> Messages {
        let (reply, received) = oneshot::channel();
        {
            let mut state = self.state();
            if state.end.is_some() {
                return Err(as_error(state.end.as_ref()));
            }
            // A request that is dropped was replaced; its caller gets the error below.
            state.request = Some(Request { operation, mine, reply });
        }
        self.changed.notify_all();
        match received.await {
            Ok(messages) => messages,
            Err(_) => Err(self.end_as_error()),
        }
    }

    /// Calls the collective until the group ends.
    pub(super) fn run(&self, collective: &dyn Collective) {
        let mut pause = FIRST_PAUSE;
        let mut shown = 0;
        let end = loop {
            let standing = self.standing(pause);
            let mine = Report { done: self.done.load(Ordering::Relaxed), standing };
            let all = match round(collective, &mine) {
                Ok(all) => all,
                Err(error) => break GroupEnd::Lost(error),
            };
            shown = self.show(&all, shown);
            match next(&all) {
                Next::Pause => pause = (2 * pause).min(LAST_PAUSE),
                Next::End(end) => break end,
                Next::Exchange(operation) => {
                    let Some(request) = self.state().request.take() else {
                        break GroupEnd::Lost(out_of_step(collective.rank(), "no request"));
                    };
                    pause = FIRST_PAUSE;
                    match exchange(collective, operation, request.mine) {
                        // A job that was dropped does not wait.
                        Ok(messages) => drop(request.reply.send(Ok(messages))),
                        Err(error) => {
                            let _ = request.reply.send(Err(error.clone().into()));
                            break GroupEnd::Lost(error);
                        }
                    }
                }
            }
        };
        let mut state = self.state();
        self.broken.store(end != GroupEnd::Done, Ordering::Relaxed);
        state.request = None;
        state.end = Some(end);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the next report of this rank: at once when it has something to say, or after the pause.
    fn standing(&self, pause: Duration) -> Standing {
        let quiet = |state: &mut State| state.request.is_none() && state.outcome.is_none();
        let waited = self.changed.wait_timeout_while(self.state(), pause, quiet);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (&state.outcome, &state.request) {
            (Some(Err(reason)), _) => Standing::Failed(reason.clone()),
            (Some(Ok(())), _) => Standing::Finished,
            (None, Some(request)) => Standing::Waiting(request.operation),
            (None, None) => Standing::Working,
        }
    }

    /// Gives what all ranks have done since `shown` bytes to the observer. Returns the bytes shown.
    fn show(&self, all: &[Report], shown: u64) -> u64 {
        let Some(observer) = self.state().observer.clone() else { return shown };
        let done = all.iter().fold(0, |sum: u64, one| sum.saturating_add(one.done));
        if done > shown {
            observer(done - shown);
        }
        done.max(shown)
    }
}

fn as_error(end: Option<&GroupEnd>) -> CheckpointError {
    match end {
        Some(GroupEnd::Failed { rank, reason }) => {
            CollectiveError::Aborted { rank: *rank, reason: reason.clone() }.into()
        }
        Some(GroupEnd::Lost(error)) => error.clone().into(),
        Some(GroupEnd::Done) | None => CheckpointError::Canceled,
    }
}

fn out_of_step(rank: Rank, message: impl Into<String>) -> CollectiveError {
    CollectiveError::Mismatch { rank, op: OP, message: message.into() }
}

fn round(collective: &dyn Collective, mine: &Report) -> Result<Vec<Report>, CollectiveError> {
    let all = collective.all_gather(mine.encode())?;
    let decode = |(rank, bytes): (Rank, Bytes)| {
        Report::decode(&bytes).map_err(|error| out_of_step(rank, error.to_string()))
    };
    (0..).zip(all).map(decode).collect()
}

fn exchange(
    collective: &dyn Collective,
    operation: Operation,
    mine: Bytes,
) -> Result<Vec<Bytes>, CollectiveError> {
    match operation {
        Operation::Gather => Ok(collective.gather(0, mine)?.unwrap_or_default()),
        Operation::AllGather => collective.all_gather(mine),
        Operation::Broadcast => {
            let mine = (collective.rank() == 0).then_some(mine);
            Ok(vec![collective.broadcast(0, mine)?])
        }
    }
}

/// The step after a round; all ranks decide the same.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Pause,
    Exchange(Operation),
    End(GroupEnd),
}

fn next(all: &[Report]) -> Next {
    let reports = || (0..).zip(all).map(|(rank, report)| (rank, &report.standing));
    let failed = reports().find_map(|(rank, standing)| match standing {
        Standing::Failed(reason) => Some(GroupEnd::Failed { rank, reason: reason.clone() }),
        _ => None,
    });
    if let Some(end) = failed {
        return Next::End(end);
    }
    let finished = reports().find(|(_, standing)| **standing == Standing::Finished);
    let mut waiting = reports().filter_map(|(rank, standing)| match standing {
        Standing::Waiting(operation) => Some((rank, *operation)),
        _ => None,
    });
    match (finished, waiting.next()) {
        (Some((rank, _)), Some(_)) => {
            Next::End(GroupEnd::Lost(out_of_step(rank, "it has finished before the others")))
        }
        (Some(_), None) if reports().all(|(_, one)| *one == Standing::Finished) => {
            Next::End(GroupEnd::Done)
        }
        (None, Some((_, operation))) => match waiting.find(|(_, other)| *other != operation) {
            Some((rank, other)) => {
                let message = format!("it waits for {other:?}, rank 0 for {operation:?}");
                Next::End(GroupEnd::Lost(out_of_step(rank, message)))
            }
            None if reports().all(|(_, one)| *one == Standing::Waiting(operation)) => {
                Next::Exchange(operation)
            }
            None => Next::Pause,
        },
        _ => Next::Pause,
    }
}

impl Report {
    fn encode(&self) -> Bytes {
        let mut message = MessageWriter::new(MAGIC);
        message.number(self.done);
        match &self.standing {
            Standing::Working => message.number(0),
            Standing::Waiting(operation) => message.number(*operation as u64),
            Standing::Finished => message.number(4),
            Standing::Failed(reason) => {
                message.number(5);
                message.text(reason);
            }
        }
        message.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut message = MessageReader::new(bytes, MAGIC)?;
        let done = message.number()?;
        let standing = match message.number()? {
            0 => Standing::Working,
            1 => Standing::Waiting(Operation::Gather),
            2 => Standing::Waiting(Operation::Broadcast),
            3 => Standing::Waiting(Operation::AllGather),
            4 => Standing::Finished,
            5 => Standing::Failed(message.text()?.to_owned()),
            other => {
                let problem = format!("it has the unknown standing {other}");
                return Err(PlanError::message(OP, problem));
            }
        };
        message.finish()?;
        Ok(Self { done, standing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(standings: Vec<Standing>) -> Next {
        let report = |standing| {
            let report = Report { done: 300, standing };
            Report::decode(&report.encode()).unwrap()
        };
        next(&standings.into_iter().map(report).collect::<Vec<_>>())
    }

    #[test]
    fn a_round_is_followed_by_what_all_ranks_wait_for() {
        use Standing::{Failed, Finished, Waiting, Working};
        let gather = || Waiting(Operation::Gather);
        assert_eq!(after(vec![Working, gather()]), Next::Pause);
        assert_eq!(after(vec![gather(), gather()]), Next::Exchange(Operation::Gather));
        assert_eq!(after(vec![Working, Finished]), Next::Pause);
        assert_eq!(after(vec![Finished, Finished]), Next::End(GroupEnd::Done));
        let failed = Next::End(GroupEnd::Failed { rank: 1, reason: "full".to_owned() });
        let all = vec![gather(), Failed("full".to_owned()), Finished, Failed("late".to_owned())];
        assert_eq!(after(all), failed);
        let lost = |all, out| match after(all) {
            Next::End(GroupEnd::Lost(CollectiveError::Mismatch { rank, .. })) => rank == out,
            _ => false,
        };
        assert!(lost(vec![gather(), Working, Waiting(Operation::Broadcast)], 2));
        assert!(lost(vec![gather(), Finished], 1));
    }

    #[test]
    fn reports_of_another_version_are_refused() {
        assert!(Report::decode(b"djg2\0\0").is_err());
        assert!(Report::decode(b"djg1\0\x09").is_err());
        assert!(Report::decode(b"djg1\0\x05\xff").is_err());
    }
}
