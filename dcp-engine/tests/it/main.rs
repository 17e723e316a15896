//! The protocols end to end: real format, real collective, storage in memory.

mod faults;
mod harness;
mod modes;
mod protocol;
mod reshard;
mod steady_state;
