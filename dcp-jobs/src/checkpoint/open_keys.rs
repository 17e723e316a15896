//! Checkpoints of which some keys are needed.

use dcp_core::format::WantedKeys;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::opener::Opener;
use crate::error::Error;

impl Opener {
    /// Opens a checkpoint as [`open`](Self::open) does, for these keys. A format may leave out other
    /// tensors, and all checks of them: it then opens a large checkpoint in less time and memory.
    /// Where no key is chosen, all are there, so that errors can name them. A job that needs others
    /// opens the checkpoint again.
    ///
    /// Conversions, reshards, averages, statistics and comparisons need the keys that they select, by
    /// [`Selection::needed`](crate::Selection::needed), [`Keys::needed`](crate::Keys::needed) or
    /// [`DiffOptions::needed`](crate::diff::DiffOptions::needed).
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_jobs::Opener) -> Result<(), dcp_jobs::Error> {
    /// use dcp_core::format::WantedKeys;
    ///
    /// let checkpoint = opener.open_keys("run/step1000", WantedKeys::one("model.norm")).await?;
    /// let norm = checkpoint.get("model.norm").run().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub async fn open_keys(&self, uri: &str, keys: WantedKeys) -> Result<Checkpoint, Error> {
        self.for_keys(Some(keys)).open(uri).await
    }
}
