//! The place that a job writes: the target behind a URL, who holds it, and whether all ranks see the
//! same one.

pub(crate) mod absent_storage;
pub(crate) mod held_target;
pub(crate) mod new_folders;
pub(crate) mod same_place;
pub(crate) mod target;
