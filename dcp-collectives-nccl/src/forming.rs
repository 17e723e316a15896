//! The forming of a group: ranks agree on one path for large messages.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

use crate::bulk::{Bulk, BulkCollective};
use crate::link::{Link, LinkDeadline, LinkError, Network};
use crate::terms::Terms;

/// Default of [`BulkBuilder::threshold`].
pub const DEFAULT_THRESHOLD: u64 = 1 << 20;
/// Default of [`BulkBuilder::chunk_bytes`].
pub const DEFAULT_CHUNK_BYTES: usize = 8 << 20;
/// Default of [`BulkBuilder::deadline`].
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Default of [`BulkBuilder::max_message`].
pub const DEFAULT_MAX_MESSAGE: u64 = 4 << 30;

/// Options of a [`BulkCollective`]. Those of rank 0 count, except the deadline.
#[derive(Debug)]
pub struct BulkBuilder<N> {
    inner: Arc<dyn Collective>,
    network: N,
    threshold: u64,
    chunk_bytes: usize,
    max_message: u64,
    deadline: Duration,
}

impl<L: Link> BulkCollective<L> {
    /// A group with the ranks of `inner`, over `network`.
    pub fn builder<N: Network<Link = L>>(inner: Arc<dyn Collective>, network: N) -> BulkBuilder<N> {
        BulkBuilder::new(inner, network)
    }
}

impl<N: Network> BulkBuilder<N> {
    fn new(inner: Arc<dyn Collective>, network: N) -> Self {
        Self {
            inner,
            network,
            threshold: DEFAULT_THRESHOLD,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            max_message: DEFAULT_MAX_MESSAGE,
            deadline: DEFAULT_DEADLINE,
        }
    }

    /// The length in bytes from which on a message goes over the network.
    #[must_use]
    pub fn threshold(mut self, bytes: u64) -> Self {
        self.threshold = bytes;
        self
    }

    /// The most bytes that the network sends at once, at least 1. Two chunks of pinned memory and two
    /// of the device's memory are allocated.
    #[must_use]
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = bytes.max(1);
        self
    }

    /// The longest message to accept over the network, in bytes.
    #[must_use]
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes;
        self
    }

    /// The longest that forming the group, or a message, may take on the network. The inner group has a
    /// deadline of its own.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Agrees with all ranks of the inner group, which all call this at once, and connects their
    /// devices. Where a rank cannot, all ranks use the inner group for all messages;
    /// [`BulkCollective::unavailable`] has the reasons.
    ///
    /// # Errors
    ///
    /// As every call of the inner group.
    pub fn connect(self) -> Result<BulkCollective<N::Link>, CollectiveError> {
        let Self { inner, network, deadline, .. } = &self;
        let aborted = Arc::new(AtomicBool::new(false));
        let patience = || LinkDeadline::new(*deadline, &aborted);
        let without = |reasons| Ok(BulkCollective::new(Arc::clone(inner), None, reasons));
        if inner.world_size() == 1 {
            return without(Vec::new());
        }
        if let Some(reasons) = disagreement(&**inner, &network.probe())? {
            return without(reasons);
        }
        let (mine, failed) = match (inner.rank() == 0).then(|| network.identify()) {
            Some(Ok(group)) => (Some([self.terms().to_bytes(), group].concat().into()), Ok(())),
            Some(Err(error)) => (Some(Bytes::new()), Err(error)),
            None => (None, Ok(())),
        };
        let said = inner.broadcast(0, mine)?;
        let terms = said.get(..Terms::LEN).and_then(Terms::parse);
        let link = match (failed, terms) {
            (Err(error), _) => Err(error),
            (Ok(()), None) => Err(LinkError::Failed("rank 0 names no group".to_owned())),
            (Ok(()), Some(terms)) => {
                let chunk = usize::try_from(terms.chunk_bytes).unwrap_or(usize::MAX);
                let (rank, world_size) = (inner.rank(), inner.world_size());
                let group = &said[Terms::LEN..];
                let joined = network.join(group, rank, world_size, chunk, &patience());
                joined.map(|link| (link, terms))
            }
        };
        let reasons = disagreement(&**inner, &link)?;
        match (link, reasons) {
            (Ok((link, terms)), None) => {
                let bulk = Bulk { link, terms, deadline: *deadline, aborted };
                Ok(BulkCollective::new(Arc::clone(inner), Some(bulk), Vec::new()))
            }
            (Ok((mut link, _)), Some(reasons)) => {
                // The others have none.
                link.abort();
                without(reasons)
            }
            (Err(_), reasons) => without(reasons.unwrap_or_default()),
        }
    }

    fn terms(&self) -> Terms {
        let Self { threshold, max_message, .. } = *self;
        Terms { threshold, chunk_bytes: self.chunk_bytes as u64, max_message }
    }
}

/// Exchanges outcomes: `None` when all ranks succeeded, otherwise why some did not.
fn disagreement<T>(
    inner: &dyn Collective,
    mine: &Result<T, LinkError>,
) -> Result<Option<Vec<(Rank, String)>>, CollectiveError> {
    let said = match mine {
        Ok(_) => Bytes::new(),
        Err(error) => Bytes::from(format!("\0{error}")),
    };
    let all = inner.all_gather(said)?;
    let failed = (0..).zip(&all).filter(|(_, said)| !said.is_empty());
    let text = |said: &Bytes| String::from_utf8_lossy(said).trim_start_matches('\0').to_owned();
    let reasons: Vec<(Rank, String)> = failed.map(|(rank, said)| (rank, text(said))).collect();
    Ok((!reasons.is_empty()).then_some(reasons))
}
