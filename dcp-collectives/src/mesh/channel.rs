//! The interface to the carrier of the bytes: channels between two processes, and their opening.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dcp_core::Rank;

use super::inbox::Arrivals;
use crate::deadline::Deadline;

/// A connection of two processes that carries bytes in both directions, in order.
///
/// One thread reads while another writes. Reads and writes that cannot go on fail with
/// [`WouldBlock`](io::ErrorKind::WouldBlock) or [`TimedOut`](io::ErrorKind::TimedOut) after `wait`;
/// the channel stays usable. Dropping a channel closes it.
pub trait Channel: fmt::Debug + Send + Sync {
    /// Reads at least one byte; 0 bytes mean that the peer writes no more.
    ///
    /// # Errors
    ///
    /// When no byte comes within `wait`, or the connection is lost.
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize>;

    /// Accepts at least one byte, which may still be on its way to the peer when this returns.
    ///
    /// # Errors
    ///
    /// When no byte is accepted within `wait`, or the connection is lost.
    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize>;

    /// Hands on what was accepted. The peer then receives it without another call.
    ///
    /// # Errors
    ///
    /// When this takes longer than `wait`, or the connection is lost.
    fn flush(&self, wait: Duration) -> io::Result<()>;

    /// Ends the own direction. The peer still receives what was flushed.
    fn finish(&self);

    /// Ends both directions at once.
    fn cut(&self);
}

/// The purpose of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// News of a group: the calls and the failures of ranks.
    Control,
    /// The messages of a group.
    Data,
}

/// The group, the rank and the kind that the process that opens a channel sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The number of the group, the same on all of its ranks.
    pub group: u64,
    /// The number of ranks of the group.
    pub world_size: u32,
    /// The rank, in the group, that opens the channel.
    pub rank: Rank,
    /// The purpose of the channel.
    pub kind: Kind,
}

/// The limit of a wait for a peer.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    pub(crate) deadline: Deadline,
    /// Called periodically; `true` ends the wait early.
    pub(crate) give_up: &'a dyn Fn() -> bool,
}

impl Patience<'static> {
    pub(crate) fn until(deadline: Deadline) -> Self {
        Self { deadline, give_up: &|| false }
    }
}

impl Patience<'_> {
    /// The time that is left, or `None` once there is nothing to wait for. Callers check it every
    /// 50 ms or so while they wait.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        self.deadline.left().filter(|_| !(self.give_up)())
    }
}

impl fmt::Debug for Patience<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// The reason why a channel cannot be opened.
#[derive(Debug)]
pub enum OpenError {
    /// The peer has not answered yet; another attempt may succeed.
    Slow,
    /// The peer cannot be reached, or refuses.
    Failed(String),
}

/// The means by which a process reaches the others of its job.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Opens a channel to process `to`, which receives it through its [`Arrivals`].
    ///
    /// # Errors
    ///
    /// When the peer does not answer in time, cannot be reached, or refuses.
    fn open(
        &self,
        to: Rank,
        opening: Opening,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn Channel>, OpenError>;

    /// The channels that other processes open to this one.
    fn arrivals(&self) -> &Arrivals;
}
