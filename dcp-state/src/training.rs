//! A model and its optimizers as one stateful value.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use dcp_core::{CheckpointError, StateDict, Stateful, Value};

use crate::error::StateDictError;
use crate::fqn::Fqns;
use crate::get::{current_parts, model_state, parts_of};
use crate::layout::{flattened, nested};
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::options::StateDictOptions;
use crate::set::{set_model_state_dict, set_optimizer_state_dict};

/// A model and its optimizers, to save and to load in place: `{"model": ..., "optimizer": ...}`.
///
/// Each rank saves and loads its own shards. Options that need other ranks or host memory
/// (`full_state_dict`, `cpu_offload`) are refused: a load reshards, and a checkpoint has whole
/// tensors anyway.
pub struct TrainingState<'a> {
    model: &'a mut (dyn Model + Send),
    optimizers: Vec<&'a mut (dyn Optimizer + Send)>,
    options: StateDictOptions,
    keys: [String; 2],
}

impl<'a> TrainingState<'a> {
    /// A model and its optimizers, which get a state where they have none, so that a load has
    /// memory for it.
    ///
    /// # Errors
    ///
    /// When an optimizer cannot create its state.
    pub fn new(
        model: &'a mut (dyn Model + Send),
        mut optimizers: Vec<&'a mut (dyn Optimizer + Send)>,
    ) -> Result<Self, CheckpointError> {
        for optimizer in &mut optimizers {
            parts_of(*optimizer)?;
        }
        let keys = ["model", "optimizer"].map(str::to_owned);
        Ok(Self { model, optimizers, options: StateDictOptions::new(), keys })
    }

    /// The options of both state dicts.
    ///
    /// # Errors
    ///
    /// [`StateDictError::InvalidOptions`] for those that need other ranks or host memory.
    pub fn options(mut self, options: StateDictOptions) -> Result<Self, CheckpointError> {
        if options.full_state_dict || options.cpu_offload {
            return Err(StateDictError::InvalidOptions(
                "a `TrainingState` has the shards of each rank where they are; use \
                 `get_state_dict` for `full_state_dict` and `cpu_offload`",
            )
            .into());
        }
        self.options = options;
        Ok(self)
    }

    /// The keys of both state dicts, by default `model` and `optimizer`.
    #[must_use]
    pub fn keys(mut self, model: impl Into<String>, optimizer: impl Into<String>) -> Self {
        self.keys = [model.into(), optimizer.into()];
        self
    }
}

impl Stateful for TrainingState<'_> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let of_model = model_state(&*self.model, &self.options)?;
        let fqns = Fqns::of(&*self.model, &self.options)?;
        let all = self.optimizers.iter().map(|optimizer| current_parts(&**optimizer));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let of_optimizer = match self.options.flatten_optimizer_state_dict {
            true => flattened(&all, &fqns)?,
            false => nested(&all, &fqns)?,
        };
        let [model, optimizer] = self.keys.clone();
        Ok(StateDict::from([(model, of_model), (optimizer, of_optimizer)]))
    }

    fn load_state_dict(&mut self, mut state: StateDict) -> Result<(), CheckpointError> {
        let [model, optimizer] = &self.keys;
        let mut part = |key: &str| match state.remove(key) {
            Some(Value::Dict(part)) => part,
            // Flattening leaves nothing of an empty dict.
            _ => StateDict::new(),
        };
        let (of_model, of_optimizer) = (part(model), part(optimizer));
        let options = &self.options;
        if !self.optimizers.is_empty() {
            let optimizers = &mut self.optimizers;
            at_once(set_optimizer_state_dict(&*self.model, optimizers, of_optimizer, options))?;
        }
        at_once(set_model_state_dict(&mut *self.model, of_model, options))?;
        Ok(())
    }
}

/// Runs what has nothing to wait for: tensors were loaded in place, and no rank takes part.
fn at_once<T>(
    work: impl Future<Output = Result<T, CheckpointError>>,
) -> Result<T, CheckpointError> {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => Err(CheckpointError::application(
            "a tensor on a device was not loaded in place; use `set_state_dict`",
        )),
    }
}

impl std::fmt::Debug for TrainingState<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainingState")
            .field("optimizers", &self.optimizers.len())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
