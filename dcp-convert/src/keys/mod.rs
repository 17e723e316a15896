//! Which keys are taken, and under which names.

pub(crate) mod groups;
pub(crate) mod part;
pub(crate) mod rename;
pub(crate) mod select;
pub(crate) mod suggest;
pub(crate) mod unmatched;
