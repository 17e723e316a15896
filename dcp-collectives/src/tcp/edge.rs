//! The connection to a neighbor in the control tree.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dcp_core::Rank;

use super::wire::{self, Control};

/// The deadline for a few bytes on a control connection, after which it fails.
const CONTROL_WRITE: Duration = Duration::from_secs(1);

/// A neighbor in the control tree, and the connection to it.
#[derive(Debug)]
pub(super) struct Neighbor {
    pub(super) rank: Rank,
    pub(super) is_parent: bool,
    pub(super) stream: Arc<TcpStream>,
}

/// The sending end of a connection to a neighbor.
#[derive(Debug)]
pub(super) struct Edge {
    pub(super) peer: Rank,
    pub(super) is_parent: bool,
    writer: Mutex<Option<Arc<TcpStream>>>,
    is_deaf: AtomicBool,
}

impl Edge {
    pub(super) fn new(neighbor: Neighbor) -> Self {
        let Neighbor { rank: peer, is_parent, stream } = neighbor;
        Self { peer, is_parent, writer: Mutex::new(Some(stream)), is_deaf: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<TcpStream>>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a control message. The thread that reads from the neighbor notices a lost one.
    pub(super) fn notify(&self, news: &Control) {
        let mut writer = self.lock();
        let Some(mut stream) = writer.as_deref() else { return };
        let sent = stream
            .set_write_timeout(Some(CONTROL_WRITE))
            .and_then(|()| wire::encode(news))
            .and_then(|bytes| stream.write_all(&bytes));
        if let Err(error) = sent {
            tracing::debug!(peer = self.peer, %error, "a neighbor does not listen");
            // A connection that broke ends by itself. One that stalled must be ended on both
            // sides, or the ranks behind it would wait their whole deadline for news.
            if wire::is_pause(&error) {
                self.is_deaf.store(true, Ordering::SeqCst);
                drop(stream.shutdown(Shutdown::Both));
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
        if let Some(stream) = self.lock().take() {
            drop(stream.shutdown(Shutdown::Write));
        }
    }
}
