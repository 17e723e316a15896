//! The keys of a selection, as a checkpoint is opened for them alone.

use dcp_core::CheckpointMetadata;
use dcp_core::format::WantedKeys;

use crate::error::JobError;
use crate::keys::select::{Chosen, Selection, list};
use crate::source::Source;

impl Selection {
    /// The keys that a job on this selection needs of a checkpoint, to open it for them. All, where the
    /// selection is an error, so that the job reports it.
    #[must_use]
    pub fn needed(&self) -> WantedKeys {
        self.needed_where(|_| true)
    }

    /// The same, of the keys whose new names `covers` accepts.
    pub(crate) fn needed_where(
        &self,
        covers: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> WantedKeys {
        let selection = self.clone();
        WantedKeys::choosing(move |keys| match selection.of(keys) {
            Ok(chosen) => {
                let mut needed = vec![false; keys.len()];
                for one in chosen.iter().filter(|one| covers(&one.fqn)) {
                    if let Some(needed) = needed.get_mut(one.entry) {
                        *needed = true;
                    }
                }
                needed
            }
            Err(_) => vec![true; keys.len()],
        })
    }

    /// The selected keys of a source, by their positions in its metadata.
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of), and when the source was opened without one of them.
    pub(crate) async fn in_source(&self, source: &Source) -> Result<Vec<Chosen>, JobError> {
        let names = source.names().await?;
        let chosen = self.of(&names)?;
        match source.lacks_tensors() {
            true => at_own_positions(chosen, &names, &*source.metadata().await?),
            false => Ok(chosen),
        }
    }
}

/// Keys that were chosen among `names`, by their positions in `metadata`.
///
/// # Errors
///
/// When `metadata` lacks one of them.
pub(crate) fn at_own_positions(
    mut chosen: Vec<Chosen>,
    names: &CheckpointMetadata,
    metadata: &CheckpointMetadata,
) -> Result<Vec<Chosen>, JobError> {
    let mut lacking = Vec::new();
    for one in &mut chosen {
        let Some((fqn, _)) = names.at(one.entry) else { continue };
        match metadata.index_of(fqn) {
            Some(position) => one.entry = position,
            None => lacking.push(&**fqn),
        }
    }
    if lacking.is_empty() {
        return Ok(chosen);
    }
    let problem = format!(
        "takes tensors that the checkpoint was opened without; open it for them too: {}",
        list(&lacking)
    );
    Err(JobError::invalid_option("the selection", problem))
}

/// Whether the metadata of a source has every key of its checkpoint that is needed.
///
/// # Errors
///
/// When its index cannot be read.
pub async fn has_needed(source: &Source, needed: &WantedKeys) -> Result<bool, JobError> {
    if !source.lacks_tensors() {
        return Ok(true);
    }
    let (names, metadata) = (source.names().await?, source.metadata().await?);
    let needed = needed.of(&names);
    let mut needed = names.iter().zip(needed).filter(|(_, needed)| *needed);
    Ok(needed.all(|((fqn, _), _)| metadata.get(fqn).is_some()))
}
