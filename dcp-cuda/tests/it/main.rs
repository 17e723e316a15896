//! Staging over a device that is a thread.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

mod copies;
#[cfg(feature = "cuda")]
mod cuda;
mod fake;
mod saves;
