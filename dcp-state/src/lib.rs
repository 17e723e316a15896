#![doc = include_str!("../README.md")]
//!
//! A framework implements [`Model`] and [`Optimizer`] once. [`get_state_dict`] and
//! [`set_state_dict`] do the rest, as `torch.distributed.checkpoint.state_dict` does (2.15): FQNs
//! without the components of wrappers ([`fqn_of`]), parameters of optimizers by FQN, tied and frozen
//! parameters, state that an optimizer creates lazily, both layouts of optimizer state, whole
//! tensors of sharded ones, and a state dict that rank 0 broadcasts. [`TrainingState`] is a model
//! with its optimizers as a [`Stateful`](dcp_core::Stateful) value.
//!
//! # Whole state dicts in PyTorch
//!
//! PyTorch sets whole state dicts that rank 0 gathered and saved here on ranks of its own, and each rank
//! then holds the same (`cargo xtask interop`). What PyTorch 2.15 does otherwise, with its own state
//! dicts, too:
//!
//! - With `full_state_dict`, an optimizer's state in the flattened layout is a `KeyError` on every rank:
//!   gather it in the nested one.
//! - With `broadcast_from_rank0`, its `set_state_dict` hangs when other ranks pass an empty state dict of
//!   the model. They pass their own, or set model and optimizer by `set_model_state_dict` and
//!   `set_optimizer_state_dict`.
//! - Options of the optimizer that are tuples, such as `betas`, become lists.
//! - It writes into the dicts that it sets: a second model needs a copy.

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
