//! Options for the optimizer state of Megatron-Core checkpoints.

use clap::{Args, ValueEnum};
use dcp::megatron::framework::{OptimizerForm, OptimizerOptions};

/// Options about the optimizer's state of Megatron-Core.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct MegatronOptimizer {
    /// Show the optimizer's state in another form: a tensor for each parameter and state, which
    /// any layout of ranks can have. Parameters in flat buffers are identified by their values.
    #[arg(hide_short_help = true, long, value_name = "FORM")]
    optimizer: Option<Form>,

    #[command(flatten)]
    corrupt: CorruptOptimizer,

    /// Restart the optimizer: master parameters from the weights, moments and steps zero.
    #[arg(hide_short_help = true, long, conflicts_with = "allow_corrupt_optimizer")]
    repair_optimizer: bool,
}

/// Whether damaged optimizer state of Megatron-Core is copied.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct CorruptOptimizer {
    /// Copy optimizer state that Megatron-Core 0.15 to 0.19 shifted, unchanged.
    #[arg(hide_short_help = true, long)]
    pub(crate) allow_corrupt_optimizer: bool,
}

/// A form of the optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// As it is stored.
    Stored,
    /// As fully_reshardable has it.
    PerParameter,
}

impl CorruptOptimizer {
    /// The library's options for these.
    pub(crate) fn options(self) -> OptimizerOptions {
        OptimizerOptions::new().allow_corrupt(self.allow_corrupt_optimizer)
    }
}

impl MegatronOptimizer {
    /// The library's options for these.
    pub(crate) fn options(self) -> OptimizerOptions {
        self.corrupt
            .options()
            .form(self.optimizer.map(|form| match form {
                Form::Stored => OptimizerForm::Stored,
                Form::PerParameter => OptimizerForm::PerParameter,
            }))
            .repair(self.repair_optimizer)
    }
}
