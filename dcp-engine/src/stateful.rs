//! Saving and loading things that have a state of their own.

use dcp_core::{CheckpointError, StateDict, Stateful, StorageReader, StorageWriter, Value};

use crate::load::{LoadSummary, Loader};
use crate::save::{SaveSummary, Saver};

/// The parts of an application that are saved together, by name.
///
/// Names become the first step of every FQN. Parts are expanded at this level only, as PyTorch
/// 2.15 does with `Stateful` values.
#[derive(Default)]
pub struct AppState<'a> {
    parts: Vec<(String, &'a mut dyn Stateful)>,
}

impl<'a> AppState<'a> {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, part: &'a mut dyn Stateful) -> Self {
        self.parts.push((name.into(), part));
        self
    }

    /// The present state of all parts.
    ///
    /// # Errors
    ///
    /// When a part has no state to give.
    pub fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.parts
            .iter()
            .map(|(name, part)| Ok((name.clone(), Value::Dict(part.state_dict()?))))
            .collect()
    }

    /// Saves all parts.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`].
    pub async fn save(
        &self,
        saver: &Saver,
        writer: &dyn StorageWriter,
    ) -> Result<SaveSummary, CheckpointError> {
        saver.save(&self.state_dict()?, writer).await
    }

    /// Loads all parts: tensors in place, then each part gets its loaded state.
    ///
    /// # Errors
    ///
    /// As [`Loader::load`], and when a part refuses its state.
    pub async fn load(
        &mut self,
        loader: &Loader,
        reader: &dyn StorageReader,
    ) -> Result<LoadSummary, CheckpointError> {
        let mut state = self.state_dict()?;
        let summary = loader.load(&mut state, reader).await?;
        for (name, part) in &mut self.parts {
            if let Some(Value::Dict(loaded)) = state.remove(name) {
                part.load_state_dict(loaded)?;
            }
        }
        Ok(summary)
    }
}

impl std::fmt::Debug for AppState<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|(name, _)| name)).finish()
    }
}
