//! The connection to a neighbor in the control tree.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_core::Rank;

use super::channel::Channel;
use super::frame::{self, Control};

/// The deadline for a few bytes on a control connection, after which it fails.
const CONTROL_WRITE: Duration = Duration::from_secs(1);

/// A neighbor in the control tree, and the connection to it.
#[derive(Debug)]
pub(super) struct Neighbor {
    pub(super) rank: Rank,
    pub(super) is_parent: bool,
    pub(super) channel: Arc<dyn Channel>,
}

/// The sending end of a connection to a neighbor.
#[derive(Debug)]
pub(super) struct Edge {
    pub(super) peer: Rank,
    pub(super) is_parent: bool,
    writer: Mutex<Option<Arc<dyn Channel>>>,
    is_deaf: AtomicBool,
}

impl Edge {
    pub(super) fn new(neighbor: Neighbor) -> Self {
        let Neighbor { rank: peer, is_parent, channel } = neighbor;
        Self { peer, is_parent, writer: Mutex::new(Some(channel)), is_deaf: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Channel>>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a control message. The thread that reads from the neighbor notices a lost one.
    pub(super) fn notify(&self, news: &Control) {
        let mut writer = self.lock();
        let Some(channel) = writer.as_deref() else { return };
        let sent = frame::encode(news).and_then(|bytes| write_all(channel, &bytes));
        if let Err(error) = sent {
            tracing::debug!(peer = self.peer, %error, "a neighbor does not listen");
            // A connection that broke ends by itself. One that stalled must be ended on both
            // sides, or the ranks behind it would wait their whole deadline for news.
            if frame::is_pause(&error) {
                self.is_deaf.store(true, Ordering::SeqCst);
                channel.cut();
            }
            *writer = None;
        }
    }

    /// Whether the connection was ended because the neighbor took nothing for too long.
    pub(super) fn is_deaf(&self) -> bool {
        self.is_deaf.load(Ordering::SeqCst)
    }

    /// Says that nothing more will be sent.
    pub(super) fn close(&self) {
        if let Some(channel) = self.lock().take() {
            channel.finish();
        }
    }
}

fn write_all(channel: &dyn Channel, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match channel.write(bytes, CONTROL_WRITE) {
            Ok(len) => bytes = bytes.get(len..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    channel.flush(CONTROL_WRITE)
}
