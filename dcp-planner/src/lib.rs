//! Geometry and policy: save and load planners, flattening, sharding arithmetic, dedup and
//! validation.
//!
//! Everything here is pure: no I/O, no clock, no randomness, and no order that depends on a hash.
//! Descriptions go in, plans come out; data never passes through.
//!
//! A save: [`flatten()`] the state dict, describe it with [`index_of`], let a
//! [`DefaultSavePlanner`] make each rank's plan and the coordinator's global one. A load: either
//! the caller's state dict, flattened by the rule that [`choose_rule`] finds, or a [`Template`] of
//! what is stored; then a [`DefaultLoadPlanner`]. What several ranks could do is given to one of
//! them by [`Holdings::share_out`].
//!
//! ```
//! use dcp_core::{DType, PlanContext, PlanError, SavePlanner, StateDict, Tensor};
//! use dcp_planner::{DefaultSavePlanner, FlattenRule, flatten, index_of};
//!
//! // The plan of a rank of two, which both hold all of a tensor.
//! let plan_of = |rank: u32| {
//!     let mut model = StateDict::new();
//!     model.insert("weight", Tensor::replicated(DType::Int8, [2, 2], vec![7; 4])?);
//!     let mut state = StateDict::new();
//!     state.insert("model", model);
//!     let leaves = flatten(&state, FlattenRule::Torch24)?;
//!     let index = index_of(&leaves, |_, _| Ok::<_, PlanError>(0))?;
//!     DefaultSavePlanner::new().local_plan(&index, &PlanContext::new(rank, 2))
//! };
//! let global = DefaultSavePlanner::new().global_plan(&[plan_of(0)?, plan_of(1)?])?;
//!
//! // One of them writes it.
//! let weight = global.metadata.get("model.weight").and_then(|entry| entry.as_tensor());
//! assert_eq!(weight.map(|weight| weight.chunks.len()), Some(1));
//! # Ok::<(), PlanError>(())
//! ```

mod cache;
mod filter;
mod flatten;
mod load;
mod placement;
mod save;
mod share;
mod template;
mod unflatten;
mod validate;

pub use cache::PlanCache;
pub use filter::KeyFilter;
pub use flatten::{FlatEntry, FlattenRule, choose_rule, flatten, index_of};
pub use load::DefaultLoadPlanner;
pub use placement::{Mesh, Placement, chunk_along, local_regions, longest_axis, recorded_box};
pub use save::{DedupPolicy, DefaultSavePlanner};
pub use share::{Holdings, RankSet, ShareRule, Shares};
pub use template::{Cut, Template, TemplateLeaf};
pub use unflatten::{set_at_path, unflatten};
pub use validate::validate_metadata;
