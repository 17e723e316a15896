//! Options that several commands share.

mod compress;
mod destination;
mod global;
mod keys;
mod mapping;
mod optimizer;
mod parse;
mod torch_dist;
mod writing;

pub(crate) use compress::Compress;
pub(crate) use destination::{Destination, with_targets};
pub(crate) use global::Global;
pub(crate) use keys::{KeyOptions, OptimizerKeys, parse_rename};
pub(crate) use mapping::Arch;
pub(crate) use optimizer::{CorruptOptimizer, MegatronOptimizer};
pub(crate) use parse::{parse_bytes, parse_dtype, parse_duration};
pub(crate) use torch_dist::TorchDist;
pub(crate) use writing::{AllowCallable, Writing};
