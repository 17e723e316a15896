//! States of Python as stateful values, which a save takes and a load fills.
//!
//! A state that Python cannot describe (an object that does not pickle, a tensor that no checkpoint holds) is found on
//! one rank, while the others wait for its plan. So its error is that of the state: the engine passes it on to all
//! ranks, and the exception of this rank has Python's own as its cause.

use dcp::{CheckpointError, StateDict, Stateful};
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::state::from_python;

/// A state to save.
pub(crate) struct Taken {
    state: Result<StateDict, String>,
    error: Option<PyErr>,
}

impl Taken {
    pub(crate) fn of(state: &Bound<'_, PyAny>, describe: &Bound<'_, PyAny>) -> Self {
        match from_python(state, describe) {
            Ok(state) => Self { state: Ok(state), error: None },
            Err(failure) => {
                let error = PyErr::from(failure);
                Self { state: Err(error.to_string()), error: Some(error) }
            }
        }
    }

    /// The failure of a save or load of this state, with Python's own error as its cause.
    pub(crate) fn explain(&self, py: Python<'_>, failure: Failure) -> Failure {
        let Some(cause) = &self.error else { return failure };
        let error = PyErr::from(failure);
        error.set_cause(py, Some(cause.clone_ref(py)));
        Failure::Python(error)
    }
}

impl Stateful for Taken {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.state.clone().map_err(CheckpointError::application)
    }

    fn load_state_dict(&mut self, _: StateDict) -> Result<(), CheckpointError> {
        Ok(())
    }
}

/// A state to load into, and what was loaded.
pub(crate) struct Loaded {
    pub(crate) into: Taken,
    state: Option<StateDict>,
}

impl Loaded {
    pub(crate) fn of(state: &Bound<'_, PyAny>, describe: &Bound<'_, PyAny>) -> Self {
        Self { into: Taken::of(state, describe), state: None }
    }

    /// The loaded state; empty where nothing was loaded.
    pub(crate) fn state(&self) -> StateDict {
        self.state.clone().unwrap_or_default()
    }
}

impl Stateful for Loaded {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.into.state_dict()
    }

    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError> {
        self.state = Some(state);
        Ok(())
    }
}
