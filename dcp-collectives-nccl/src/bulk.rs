//! A group whose large messages go over a network of devices.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

use crate::header::Header;
use crate::link::{Link, LinkDeadline, LinkError, SLOTS};
use crate::terms::Terms;

/// A group that sends large messages of `broadcast` and `all_gather` over a network of devices, and all
/// else over an inner group: the lengths of those messages, small ones, plans and outcomes.
///
/// All ranks use the network, or none does ([`is_bulk`](Self::is_bulk)). Messages are in host memory on
/// both sides, and go through pinned memory and the devices in chunks, two at once.
///
/// A rank whose device fails aborts the group. A message that does not come within the deadline is an
/// error that the inner group explains, if it can: with the rank that aborted or died. After any
/// error every later call fails.
pub struct BulkCollective<L: Link> {
    inner: Arc<dyn Collective>,
    bulk: Option<Mutex<Bulk<L>>>,
    aborted: Arc<AtomicBool>,
    /// The error after which every call fails.
    broken: Mutex<Option<CollectiveError>>,
    unavailable: Vec<(Rank, String)>,
}

/// The network, when all ranks have it.
#[derive(Debug)]
pub(crate) struct Bulk<L> {
    pub(crate) link: L,
    pub(crate) terms: Terms,
    pub(crate) deadline: Duration,
    pub(crate) aborted: Arc<AtomicBool>,
}

impl<L: Link> BulkCollective<L> {
    pub(crate) fn new(
        inner: Arc<dyn Collective>,
        bulk: Option<Bulk<L>>,
        unavailable: Vec<(Rank, String)>,
    ) -> Self {
        if let Some((rank, reason)) = unavailable.first() {
            tracing::warn!(rank, reason, "large messages use the inner group");
        }
        let aborted = bulk.as_ref().map(|bulk| Arc::clone(&bulk.aborted)).unwrap_or_default();
        Self { inner, bulk: bulk.map(Mutex::new), aborted, broken: Mutex::default(), unavailable }
    }

    /// Whether large messages go over the network; the same on all ranks.
    #[must_use]
    pub fn is_bulk(&self) -> bool {
        self.bulk.is_some()
    }

    /// The ranks without the network, and why; the same on all ranks.
    #[must_use]
    pub fn unavailable(&self) -> &[(Rank, String)] {
        &self.unavailable
    }

    fn broken(&self) -> MutexGuard<'_, Option<CollectiveError>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the inner group, unless the network has failed.
    fn inner<T>(
        &self,
        call: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        match &*self.broken() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }?;
        call(&*self.inner)
    }

    /// Sends the messages that are too long for the inner group, in rank order of their senders.
    fn send(
        &self,
        op: &'static str,
        bulk: &Mutex<Bulk<L>>,
        headers: Vec<(Rank, Header)>,
        mine: Option<&Bytes>,
    ) -> Result<Vec<Bytes>, CollectiveError> {
        let mut bulk = bulk.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = LinkDeadline::new(bulk.deadline, &self.aborted);
        let mut messages = Vec::with_capacity(headers.len());
        for (root, header) in headers {
            let len = match header {
                Header::Whole(message) => {
                    messages.push(message);
                    continue;
                }
                Header::Length(len) => len,
            };
            let from = mine.filter(|_| root == self.inner.rank());
            match bulk.send(root, from, len, &patience) {
                Ok(message) => messages.push(message),
                Err(error) => return Err(self.fail(op, root, &mut bulk, error)),
            }
        }
        Ok(messages)
    }

    /// Ends the group after an error of the link.
    fn fail(
        &self,
        op: &'static str,
        root: Rank,
        bulk: &mut Bulk<L>,
        error: LinkError,
    ) -> CollectiveError {
        bulk.link.abort();
        let mine = |reason: String| {
            self.inner.abort(&reason);
            CollectiveError::Aborted { rank: self.inner.rank(), reason }
        };
        let error = match error {
            LinkError::Failed(reason) => mine(reason),
            LinkError::Aborted => mine("this rank has aborted the group".to_owned()),
            // The inner group names the rank that died or gave up. When all are there, none was in time.
            LinkError::Late => match self.inner.barrier() {
                Err(error) => error,
                Ok(()) => {
                    let deadline = bulk.deadline;
                    self.inner.abort(&format!("no answer within {deadline:?} in {op}"));
                    CollectiveError::Timeout { rank: root, op, deadline }
                }
            },
        };
        self.broken().get_or_insert(error).clone()
    }
}

impl<L: Link> Bulk<L> {
    /// Sends a message of `len` bytes from `root`, which alone has it, to all.
    fn send(
        &mut self,
        root: Rank,
        from: Option<&Bytes>,
        len: u64,
        patience: &LinkDeadline,
    ) -> Result<Bytes, LinkError> {
        let exhausted = || LinkError::Failed(format!("no memory for a message of {len} bytes"));
        let len = usize::try_from(len).map_err(|_| exhausted())?;
        let chunk = usize::try_from(self.terms.chunk_bytes).unwrap_or(usize::MAX).max(1);
        let mut received = Vec::new();
        if from.is_none() {
            received.try_reserve_exact(len).map_err(|_| exhausted())?;
        }
        let (mut at, mut turn, mut under_way) = (0, 0, VecDeque::with_capacity(SLOTS));
        loop {
            while at < len && under_way.len() < SLOTS {
                let end = at.saturating_add(chunk).min(len);
                let part = from.and_then(|from| from.get(at..end));
                self.link.start(turn, root, part, end - at, patience)?;
                under_way.push_back(turn);
                (at, turn) = (end, (turn + 1) % SLOTS);
            }
            let Some(slot) = under_way.pop_front() else { break };
            let bytes = self.link.finish(slot, patience)?;
            if from.is_none() {
                received.extend_from_slice(bytes);
            }
        }
        if from.is_none() && received.len() != len {
            let found = received.len();
            return Err(LinkError::Failed(format!("{found} bytes of {len} came")));
        }
        Ok(from.cloned().unwrap_or_else(|| received.into()))
    }
}

impl<L: Link> Collective for BulkCollective<L> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.inner(|inner| inner.gather(root, mine))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.inner(|inner| inner.scatter(root, all))
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let Some(bulk) = &self.bulk else {
            return self.inner(|inner| inner.broadcast(root, from_root));
        };
        let Terms { threshold, max_message, .. } = terms(bulk);
        let said = from_root.as_ref().map(|message| Header::of(message, threshold).to_bytes());
        let said = self.inner(|inner| inner.broadcast(root, said))?;
        let header = self.agreed(Header::parse(&said, root, "broadcast", max_message))?;
        let mut all = self.send("broadcast", bulk, vec![(root, header)], from_root.as_ref())?;
        Ok(all.pop().unwrap_or_default())
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        let Some(bulk) = &self.bulk else { return self.inner(|inner| inner.all_gather(mine)) };
        let Terms { threshold, max_message, .. } = terms(bulk);
        let said = Header::of(&mine, threshold).to_bytes();
        let said = self.inner(|inner| inner.all_gather(said))?;
        let headers = (0..)
            .zip(&said)
            .map(|(rank, said)| Ok((rank, Header::parse(said, rank, "all_gather", max_message)?)));
        let headers = self.agreed(headers.collect())?;
        self.send("all_gather", bulk, headers, Some(&mine))
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner(|inner| inner.barrier())
    }

    fn abort(&self, reason: &str) {
        // A call that waits for the network sees this.
        self.aborted.store(true, Ordering::Release);
        self.inner.abort(reason);
    }
}

impl<L: Link> BulkCollective<L> {
    /// Ends the group when this rank cannot read a message.
    fn agreed<T>(&self, parsed: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        parsed.map_err(|error| {
            self.inner.abort(&error.to_string());
            self.broken().get_or_insert(error).clone()
        })
    }
}

fn terms<L>(bulk: &Mutex<Bulk<L>>) -> Terms {
    bulk.lock().unwrap_or_else(PoisonError::into_inner).terms
}

impl<L: Link> fmt::Debug for BulkCollective<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BulkCollective")
            .field("inner", &self.inner)
            .field("is_bulk", &self.is_bulk())
            .finish_non_exhaustive()
    }
}
