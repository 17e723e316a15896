//! The rules by which a request is repeated, and the time for it.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use dcp_core::StorageErrorKind as Kind;
use dcp_core::error::StorageOp;
use object_store::Error;

use crate::error::Failure;

/// The shortest and the longest mean pause between two attempts.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// A number that no other call returns, in practice.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// Says that a host does not answer, as nothing else happens for a long time. Requests in flight fail
/// together, and one of them speaks for all.
fn warn_of(host: &str, retry: u32, of: u32) {
    const TOGETHER: Duration = Duration::from_secs(3);
    static SAID: Mutex<Option<(String, u32, Instant)>> = Mutex::new(None);
    let now = Instant::now();
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let is_said = said.as_ref().is_some_and(|(known, number, at)| {
        known == host && *number == retry && now.duration_since(*at) < TOGETHER
    });
    if !is_said {
        *said = Some((host.to_owned(), retry, now));
        drop(said);
        tracing::warn!("cannot connect to {host}: retrying, {retry} of {of}");
    }
}

/// The attempts at one request: exponential backoff with jitter, until a deadline.
#[derive(Clone, Debug)]
pub(crate) struct Attempts {
    deadline: Instant,
    limit: Duration,
    max: u32,
    made: u32,
    pause: Duration,
}

impl Attempts {
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        let RetryPolicy { deadline, attempts_max } = policy;
        Self {
            deadline: Instant::now() + deadline,
            limit: deadline,
            max: attempts_max.max(1),
            made: 0,
            pause: PAUSE_MIN,
        }
    }

    /// Makes a request, which fails as transient when the deadline passes.
    pub(crate) async fn request<T>(
        &mut self,
        op: StorageOp,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Failure> {
        self.made += 1;
        match timeout_at(self.deadline, request).await {
            Ok(done) => done.map_err(|error| Failure::of(op, &error)),
            Err(_) => {
                Err(Failure::new(Kind::Transient, format!("no answer within {:?}", self.limit)))
            }
        }
    }

    /// The deadline, and a time beyond it.
    pub(crate) fn deadline_with(&self, more: Duration) -> Instant {
        self.deadline + more
    }

    /// Waits before the next attempt, or returns the failure when there is none.
    pub(crate) async fn pause(&mut self, failure: Failure) -> Result<(), Failure> {
        let half = self.pause / 2;
        // Between half of the pause and one and a half.
        let jitter = self.pause.mul_f64((random() % 1024) as f64 / 1024.0);
        let until = Instant::now() + half + jitter;
        if failure.kind != Kind::Transient || self.made >= self.max || until >= self.deadline {
            return Err(failure);
        }
        match &failure.unreachable {
            Some(host) => warn_of(host, self.made, self.max.saturating_sub(1)),
            None => tracing::debug!(attempt = self.made, %failure, "repeating a request"),
        }
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        sleep(until - Instant::now()).await;
        Ok(())
    }

    /// Describes the number of attempts; empty if there was no second one.
    pub(crate) fn summary(&self) -> String {
        match self.made {
            0 | 1 => String::new(),
            made => format!("after {made} attempts"),
        }
    }
}

/// The longest time and the largest number of attempts of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetryPolicy {
    pub(crate) deadline: Duration,
    pub(crate) attempts_max: u32,
}
