//! A group that counts bytes, and damages one message.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError};

/// A collective that counts what this rank sends and receives, call by call.
#[derive(Debug)]
pub struct CountingCollective {
    inner: Arc<dyn Collective>,
    calls: Mutex<Vec<(&'static str, usize)>>,
    cut: Option<usize>,
}

impl CountingCollective {
    /// Counts the calls to `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Collective>) -> Self {
        Self { inner, calls: Mutex::default(), cut: None }
    }

    /// Cuts the last byte off what this rank sends in call number `call`, a gather.
    #[must_use]
    pub fn cut(self, call: usize) -> Self {
        Self { cut: Some(call), ..self }
    }

    /// The calls since the last time, and their bytes.
    pub fn take(&self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn note(&self, what: &'static str, bytes: usize) {
        self.calls.lock().unwrap().push((what, bytes));
    }
}

impl Collective for CountingCollective {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: u32, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let len = match self.cut == Some(self.calls.lock().unwrap().len()) {
            true => mine.len() - 1,
            false => mine.len(),
        };
        self.note("gather", len);
        self.inner.gather(root, mine.slice(..len))
    }

    fn scatter(&self, root: u32, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        let mine = self.inner.scatter(root, all)?;
        self.note("scatter", mine.len());
        Ok(mine)
    }

    fn broadcast(&self, root: u32, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let received = self.inner.broadcast(root, from_root)?;
        self.note("broadcast", received.len());
        Ok(received)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        let all = self.inner.all_gather(mine)?;
        self.note("all_gather", all.iter().map(Bytes::len).sum());
        Ok(all)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner.barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
