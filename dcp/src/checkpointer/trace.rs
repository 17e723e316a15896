//! Recording where the time of saves and loads goes.

use dcp_engine::{BackgroundSaver, Saver};
use dcp_trace::TraceRecorder;

use super::Checkpointer;

impl Checkpointer {
    /// Records the phases of saves and loads, the files, and the requests to the storage. Perfetto
    /// opens the file, and `dcp trace` draws it. Each process has a file of its own.
    ///
    /// ```
    /// use dcp::trace::TraceRecorder;
    /// use dcp::{Checkpointer, StateDict};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let (file, url) = (folder.path().join("trace-0.json"), folder.path().join("step-1"));
    /// # let url = url.to_string_lossy();
    /// let recorder = TraceRecorder::create(file)?;
    /// let checkpointer = Checkpointer::new().trace(&recorder);
    /// # #[cfg(feature = "blocking")]
    /// checkpointer.save(&StateDict::new(), url).blocking()?;
    /// recorder.finish()?;
    /// # drop(checkpointer);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn trace(self, recorder: &TraceRecorder) -> Self {
        let settings = self.settings().clone().observer(recorder.observer());
        let saver = Saver::with_settings(settings);
        let background = BackgroundSaver::new(saver.clone());
        Self { trace: Some(recorder.clone()), saver, background, ..self }
    }
}
