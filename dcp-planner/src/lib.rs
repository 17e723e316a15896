#![doc = include_str!("../README.md")]
//!
//! Everything here is pure: no I/O, no clock, no randomness, and no order that depends on a hash.
//! Descriptions go in, plans come out; data never passes through.
//!
//! A save: [`flatten()`] the state dict, describe it with [`index_of`], let a
//! [`DefaultSavePlanner`] make each rank's plan and the coordinator's global one. A load: either
//! the caller's state dict, flattened by the rule that [`choose_rule`] finds, or a [`Template`] of
//! what is stored; then a [`DefaultLoadPlanner`]. [`Holdings::share_out`] assigns work that several
//! ranks could do to one of them.

mod cache;
mod filter;
mod flatten;
mod load;
pub mod mesh;
mod save;
mod share;
mod template;
mod unflatten;
mod validate;

pub use cache::PlanCache;
pub use filter::KeyFilter;
pub use flatten::{FlatEntry, FlattenRule, choose_rule, flatten, index_of};
pub use load::DefaultLoadPlanner;
pub use save::{DedupPolicy, DefaultSavePlanner};
pub use share::{Holdings, RankSet, ShareRule, Shares};
pub use template::{ShardAxis, Template, TemplateLeaf};
pub use unflatten::{set_at_path, unflatten};
pub use validate::validate_metadata;
