//! Several stateful parts as one.

use dcp_core::{CheckpointError, StateDict, Stateful, Value};

/// The parts of an application that are saved together, by name: a model, its optimizer, a
/// scheduler, a data loader.
///
/// It is itself [`Stateful`]. Names become the first step of every FQN. Parts are expanded at this
/// level only, as PyTorch 2.15 does with `Stateful` values.
#[derive(Default)]
pub struct AppState<'a> {
    parts: Vec<(String, &'a mut (dyn Stateful + Send))>,
}

impl<'a> AppState<'a> {
    /// No parts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, part: &'a mut (dyn Stateful + Send)) -> Self {
        self.parts.push((name.into(), part));
        self
    }
}

impl Stateful for AppState<'_> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.parts
            .iter()
            .map(|(name, part)| Ok((name.clone(), Value::Dict(part.state_dict()?))))
            .collect()
    }

    fn load_state_dict(&mut self, mut state: StateDict) -> Result<(), CheckpointError> {
        for (name, part) in &mut self.parts {
            if let Some(Value::Dict(loaded)) = state.remove(name) {
                part.load_state_dict(loaded)?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for AppState<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|(name, _)| name)).finish()
    }
}
