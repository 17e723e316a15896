//! Presents the keys that a selection chooses, in its order and under its names.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Value};
use dcp_formats::torch_save::TorchSaveReader;

use crate::error::JobError;
use crate::keys::groups::{RenamedParams, keys_of_params};
use crate::keys::select::{Chosen, Selection};
use crate::options::JobOptions;
use crate::read::objects::read_object;
use crate::source::{KeptObjects, Source};
use crate::view::Assembled;

impl Selection {
    /// The selected part of a checkpoint, for a job.
    ///
    /// # Errors
    ///
    /// As [`Selection::of`]; when the selection is empty, and when the checkpoint cannot be read.
    pub async fn apply(&self, source: &Source, job: &JobOptions) -> Result<Source, JobError> {
        if self.is_everything() && !source.lacks_tensors() {
            return Ok(source.clone());
        }
        let (metadata, names) = (source.metadata().await?, source.names().await?);
        let chosen = self.in_source(source).await?;
        self.refuse_nothing(&names, &chosen, &metadata)?;
        let mut values = self.renamed_params(source, &metadata, &chosen).await?;
        let mut view = Assembled::builder(std::slice::from_ref(source), job).await?;
        let kept = kept(source, &metadata, &chosen, &values);
        for one in chosen {
            match values.remove(&one.entry) {
                Some(value) => view.object(one.fqn, one.path, value)?,
                None => view.pass(one.fqn, one.path, 0, one.entry)?,
            }
        }
        Ok(view.finish()?.keeping(kept))
    }

    /// Optimizer settings that list renamed parameters, with the new names.
    async fn renamed_params(
        &self,
        source: &Source,
        metadata: &Arc<CheckpointMetadata>,
        chosen: &[Chosen],
    ) -> Result<HashMap<usize, Value>, JobError> {
        let mut renamed = HashMap::new();
        if self.mapping.is_empty() && self.renames.is_empty() {
            return Ok(renamed);
        }
        let keys = keys_of_params(&*source.names().await?);
        for one in chosen {
            let Some((fqn, Entry::Object(_))) = metadata.at(one.entry) else { continue };
            let Some(params) = RenamedParams::of(fqn, &one.fqn, &keys) else { continue };
            let value = read_object(source, fqn).await?;
            if let Some(value) = params.apply(&value, &|key| self.name(key, key).ok().flatten()) {
                renamed.insert(one.entry, value);
            }
        }
        Ok(renamed)
    }
}

/// The selected objects that a `torch.save` file stores unchanged.
fn kept(
    source: &Source,
    metadata: &CheckpointMetadata,
    chosen: &[Chosen],
    changed: &HashMap<usize, Value>,
) -> Option<Arc<KeptObjects>> {
    let (reader, before) = match (source.extension::<TorchSaveReader>(), source.kept()) {
        (Some(reader), _) => (reader, None),
        (None, Some(kept)) => (Arc::clone(&kept.reader), Some(&kept.names)),
        (None, None) => return None,
    };
    let names = chosen.iter().filter(|one| !changed.contains_key(&one.entry)).filter_map(|one| {
        let (fqn, _) = metadata.at(one.entry)?;
        let in_file = match before {
            Some(names) => names.get(fqn)?,
            None => fqn,
        };
        Some((Arc::clone(&one.fqn), Arc::clone(in_file)))
    });
    Some(Arc::new(KeptObjects { reader, names: names.collect() }))
}
