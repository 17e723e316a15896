//! Checkpoints of [OLMo-core](https://github.com/allenai/OLMo-core): the folders of a training
//! run, the two layouts of its optimizer, and its API to save, load and unshard.

mod alike;
mod groups;
mod key_mapping;
mod layout;
mod load;
mod load_keys;
mod rekeyed;
mod run_dir;
mod save;
mod state;
mod unshard;
mod values;

pub use key_mapping::KeyMapping;
pub use layout::{OptimizerLayout, source_with_layout, with_layout};
pub use load::{LoadOptions, LoadedState, get_checkpoint_metadata, load_model_and_optim_state};
pub use load_keys::load_keys;
pub use run_dir::{RunDir, StepDir};
pub use save::{SaveOptions, async_save_model_and_optim_state, save_model_and_optim_state};
pub use state::flatten_optim;
pub use unshard::{
    UnshardFormat, UnshardOptions, UnshardReport, UnshardStrategy, unshard_checkpoint,
};
