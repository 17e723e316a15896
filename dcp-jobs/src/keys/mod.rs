//! Key selection and renaming.

pub(crate) mod groups;
pub(crate) mod needed;
pub(crate) mod part;
pub(crate) mod rename;
pub(crate) mod select;
pub(crate) mod suggest;
pub(crate) mod unmatched;

pub use needed::has_needed;
pub use rename::Rename;
pub use select::{Chosen, StatePart, parse_mapping};
pub use suggest::unknown_fqn;
pub use unmatched::{UnmatchedPattern, unmatched_patterns};
