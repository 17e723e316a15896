//! The interface of a network of devices.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dcp_core::Rank;

/// Chunks of a link that are under way at once: the devices send one while the processor copies the
/// other.
pub(crate) const SLOTS: usize = 2;

/// A network that connects the devices of ranks.
pub trait Network: fmt::Debug + Send + Sync + 'static {
    /// A member of a group of devices.
    type Link: Link;

    /// The name in messages, such as `NCCL on cuda:0`.
    fn name(&self) -> String;

    /// Checks that this rank has the libraries and a device. Does not communicate.
    ///
    /// # Errors
    ///
    /// [`LinkError::Failed`] with the reason.
    fn probe(&self) -> Result<(), LinkError>;

    /// Bytes that identify a new group. One rank calls this, and sends them to the others.
    ///
    /// # Errors
    ///
    /// [`LinkError::Failed`] with the reason.
    fn identify(&self) -> Result<Vec<u8>, LinkError>;

    /// Joins the group with these bytes, which all ranks join at once, for chunks of at most
    /// `chunk_bytes`.
    ///
    /// # Errors
    ///
    /// [`LinkError::Failed`] with the reason, and the errors of [`LinkDeadline::check`].
    fn join(
        &self,
        group: &[u8],
        rank: Rank,
        world_size: u32,
        chunk_bytes: usize,
        patience: &LinkDeadline,
    ) -> Result<Self::Link, LinkError>;
}

/// A member of a group of devices. All members start the same chunks in the same order, in slots 0 and
/// 1 by turns. After an error nothing but `abort` is called.
pub trait Link: fmt::Debug + Send + 'static {
    /// Starts to send a chunk of `byte_len` bytes from `root` to all. There, `from` has the bytes, which
    /// are copied before this returns; on the others it is `None`.
    ///
    /// # Errors
    ///
    /// [`LinkError::Failed`] with the reason, and the errors of [`LinkDeadline::check`].
    fn start(
        &mut self,
        slot: usize,
        root: Rank,
        from: Option<&[u8]>,
        byte_len: usize,
        patience: &LinkDeadline,
    ) -> Result<(), LinkError>;

    /// Waits for the chunk of a slot, and returns its bytes, except on its root.
    ///
    /// # Errors
    ///
    /// [`LinkError::Failed`] with the reason, and the errors of [`LinkDeadline::check`].
    fn finish(&mut self, slot: usize, patience: &LinkDeadline) -> Result<&[u8], LinkError>;

    /// Ends everything that is under way on this rank, without the others.
    fn abort(&mut self);
}

/// The reason why a link does not send.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// A library, a device or the network failed.
    #[error("{0}")]
    Failed(String),
    /// The deadline has passed.
    #[error("the deadline has passed")]
    Late,
    /// This rank has aborted the group.
    #[error("this rank has aborted the group")]
    Aborted,
}

/// The limit of a link's waits: the deadline, or that this rank aborts the group.
#[derive(Clone, Debug)]
pub struct LinkDeadline {
    deadline: Instant,
    aborted: Arc<AtomicBool>,
}

impl LinkDeadline {
    pub(crate) fn new(deadline: Duration, aborted: &Arc<AtomicBool>) -> Self {
        // Further ahead than an `Instant` can be is for ever.
        let far = Duration::from_secs(365 * 24 * 60 * 60);
        let now = Instant::now();
        let deadline = now.checked_add(deadline).unwrap_or(now + far);
        Self { deadline, aborted: Arc::clone(aborted) }
    }

    /// Whether to wait on. A link calls this at least every 100 ms.
    ///
    /// # Errors
    ///
    /// [`LinkError::Aborted`] after this rank has aborted the group, and [`LinkError::Late`] after the
    /// deadline.
    pub fn check(&self) -> Result<(), LinkError> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(LinkError::Aborted);
        }
        if Instant::now() >= self.deadline { Err(LinkError::Late) } else { Ok(()) }
    }
}
