//! Options that select and rename keys.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use dcp::jobs::keys::{Rename, StatePart, parse_mapping};
use dcp::jobs::{Keys, read_at_most};
use dcp::olmo::OptimizerLayout;

use crate::failure::{Exit, Failure};

/// Bytes of a mapping that are read at most.
const MAPPING_MAX: u64 = 64 << 20;

/// Selects and renames keys.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Keys")]
pub(crate) struct KeyOptions {
    /// Select only keys that match or are below this name; may be given again for more.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,

    /// Leave out keys that match or are below this name; may be given again.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,

    /// Select only the model, and drop the name of its dict.
    #[arg(long)]
    pub(crate) model_only: bool,

    /// Leave out the optimizer.
    #[arg(hide_short_help = true, long, conflicts_with = "model_only")]
    pub(crate) no_optimizer: bool,

    /// Select everything, also for formats that get only the model by default.
    #[arg(long, conflicts_with_all = ["model_only", "no_optimizer"])]
    pub(crate) everything: bool,

    /// Rename keys as sed does: s/PATTERN/REPLACEMENT/ or with g at the end; may be given again.
    #[arg(long, value_name = "SUBSTITUTION", value_parser = parse_rename)]
    pub(crate) rename: Vec<Rename>,

    /// Rename keys by a file: a JSON object, or lines of an old and a new name (- to leave out).
    #[arg(hide_short_help = true, long, value_name = "FILE")]
    pub(crate) map: Option<PathBuf>,
}

/// How the optimizer's state is divided into keys.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Keys")]
pub(crate) struct OptimizerKeys {
    /// Divide the optimizer's state as OLMo-core does: nested as in PyTorch, or by parameter.
    #[arg(hide_short_help = true, long, value_name = "LAYOUT")]
    optimizer_layout: Option<Layout>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Layout {
    /// state.FQN.field, and a list of param_groups.
    Nested,
    /// Settings for every parameter, flatten_optimizer_state=True.
    Flat,
}

impl OptimizerKeys {
    /// The layout of the library.
    pub(crate) fn layout(self) -> Option<OptimizerLayout> {
        self.optimizer_layout.map(|layout| match layout {
            Layout::Nested => OptimizerLayout::Nested,
            Layout::Flat => OptimizerLayout::Flat,
        })
    }
}

pub(crate) fn parse_rename(text: &str) -> Result<Rename, String> {
    Rename::parse(text).map_err(|error| error.to_string())
}

impl KeyOptions {
    /// The library's choice of keys for these.
    pub(crate) fn keys(&self) -> Result<Keys, Failure> {
        let mut keys = Keys::all().part(match () {
            () if self.model_only => Some(StatePart::Model),
            () if self.no_optimizer => Some(StatePart::WithoutOptimizer),
            () if self.everything => Some(StatePart::Everything),
            () => None,
        });
        for pattern in &self.include {
            keys = keys.include(pattern);
        }
        for pattern in &self.exclude {
            keys = keys.exclude(pattern);
        }
        if let Some(file) = &self.map {
            let text = read_at_most(file, MAPPING_MAX).and_then(|bytes| {
                String::from_utf8(bytes).map_err(|_| std::io::ErrorKind::InvalidData.into())
            });
            let text = text.map_err(|error| {
                let file = file.display().to_string();
                Failure::new(Exit::Io, format!("cannot read the mapping {file:?}"))
                    .because(vec![error.to_string()])
            })?;
            keys = keys.map(parse_mapping(&text)?);
        }
        Ok(self.rename.iter().cloned().fold(keys, Keys::rename))
    }
}
