#![doc = include_str!("../README.md")]
//!
//! | OLMo-core | here |
//! |---|---|
//! | `save_model_and_optim_state`, `load_model_and_optim_state` | functions of the same names |
//! | `async_save_model_and_optim_state` | [`async_save_model_and_optim_state`] |
//! | `load_keys`, `unshard_checkpoint`, `get_checkpoint_metadata` | functions of the same names |
//! | `flatten_optimizer_state` | [`OptimizerLayout`]: either is read as the other |
//! | `step{N}/` folders of a `Checkpointer` | [`RunDir`], [`StepDir`] |

mod error;
mod format;
mod framework;
mod groups;
mod key_mapping;
mod layout;
mod load;
mod load_keys;
mod rekeyed;
mod roots;
mod run_dir;
mod save;
mod state;
mod unshard;
mod value_hash;
mod values;

pub use error::OlmoError;
pub use format::{OlmoFormat, OlmoNote, olmo_step};
pub use framework::Olmo;
pub use key_mapping::KeyMapping;
pub use layout::{OptimizerLayout, source_with_layout, with_layout};
pub use load::{LoadedState, OlmoLoadOptions, get_checkpoint_metadata, load_model_and_optim_state};
pub use load_keys::load_keys;
pub use run_dir::{RunDir, StepDir};
pub use save::{OlmoSaveOptions, async_save_model_and_optim_state, save_model_and_optim_state};
pub use state::flatten_optim;
pub use unshard::{
    UnshardFormat, UnshardOptions, UnshardReport, UnshardStrategy, unshard_checkpoint,
};
