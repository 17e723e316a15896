//! The protocols end to end: real format, real collective, storage in memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod background;
mod broadcast;
mod casts;
mod copies;
mod devices;
mod differing;
mod events;
mod faults;
mod first_saves;
mod harness;
mod hugging_face;
mod modes;
mod parallel;
mod planners;
mod protocol;
mod read_sharing;
mod readers;
mod replicas;
mod reshard;
mod steady_state;
