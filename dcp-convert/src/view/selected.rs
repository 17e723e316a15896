//! Some keys of a checkpoint, in the order and under the names that a selection gives them.

use crate::error::ConvertError;
use crate::job::JobOptions;
use crate::select::Selection;
use crate::source::Source;
use crate::view::Assembled;

impl Selection {
    /// The chosen part of a checkpoint, as a job reads it.
    ///
    /// # Errors
    ///
    /// As [`Selection::of`], when the selection leaves nothing, and when the checkpoint cannot be
    /// read.
    pub async fn apply(&self, source: &Source, job: &JobOptions) -> Result<Source, ConvertError> {
        if self.is_everything() {
            return Ok(source.clone());
        }
        let metadata = source.metadata().await?;
        let chosen = self.of(&metadata)?;
        if chosen.is_empty() && !metadata.is_empty() {
            let problem = "leaves nothing of the checkpoint";
            return Err(ConvertError::unsupported("the selection", problem));
        }
        let mut view = Assembled::builder(std::slice::from_ref(source), job).await?;
        for one in chosen {
            view.pass(one.fqn, one.path, 0, one.entry)?;
        }
        view.finish()
    }
}
