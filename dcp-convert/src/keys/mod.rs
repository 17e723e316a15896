//! Key selection and renaming.

pub(crate) mod groups;
pub(crate) mod part;
pub(crate) mod rename;
pub(crate) mod select;
pub(crate) mod suggest;
pub(crate) mod unmatched;
