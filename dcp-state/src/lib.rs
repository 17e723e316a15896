#![doc = include_str!("../README.md")]
//!
//! A framework implements [`Model`] and [`Optimizer`] once. [`get_state_dict`] and
//! [`set_state_dict`] do the rest, as `torch.distributed.checkpoint.state_dict` does (2.15): FQNs
//! without the components of wrappers ([`fqn_of`]), parameters of optimizers by FQN, tied and frozen
//! parameters, state that an optimizer creates lazily, both layouts of optimizer state, whole
//! tensors of sharded ones, and a state dict that rank 0 broadcasts. [`TrainingState`] is a model
//! with its optimizers as a [`Stateful`](dcp_core::Stateful) value.

pub mod adam;
mod broadcast;
mod elements;
mod error;
mod fqn;
mod gather;
mod get;
mod layout;
mod model;
mod optimizer;
mod options;
mod set;
mod training;

pub use error::{IncompatibleKeys, StateDictError};
pub use fqn::fqn_of;
pub use get::{Optimizers, get_model_state_dict, get_optimizer_state_dict, get_state_dict};
pub use model::{HiddenModule, Model, ModelEntry, ParamId};
pub use optimizer::{Optimizer, ParamGroup};
pub use options::StateDictOptions;
pub use set::{set_model_state_dict, set_optimizer_state_dict, set_state_dict};
pub use training::TrainingState;
