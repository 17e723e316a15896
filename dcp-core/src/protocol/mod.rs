//! The steps of a save and a load: what ranks send, and which calls a format gets in which order.

pub mod checkpoint;
pub(crate) mod collective;
pub mod digest;
pub mod save_run;
pub mod wire;
