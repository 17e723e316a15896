//! Options that several commands have.

pub(crate) mod destination;
pub(crate) mod keys;
pub(crate) mod mapping;
pub(crate) mod optimizer;
pub(crate) mod torch_dist;
