//! Groups of threads and of processes.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail loudly")]

mod groups;
mod local;
mod model;
#[cfg(unix)]
mod network;
mod processes;
mod rendezvous;
mod secrets;
#[cfg(feature = "tls")]
mod tls;
