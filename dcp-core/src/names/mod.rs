//! Names of stored objects and of ranks, which every other floor uses.

pub mod key;
pub(crate) mod rank;
