//! The whole stack on a real file system: real processes, real kills, real TCP.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[cfg(feature = "jobs")]
mod any_format;
mod background;
#[cfg(feature = "jobs")]
mod book;
mod borrowed;
mod broadcast;
mod child;
#[cfg(feature = "jobs")]
mod crashes;
#[cfg(feature = "jobs")]
mod disturbed;
mod kills;
mod manager;
#[cfg(all(feature = "megatron", feature = "mapping"))]
mod mapping;
#[cfg(feature = "megatron")]
mod megatron;
mod ranks;
mod replicas;
mod sockets;
#[path = "../support/state.rs"]
mod state;
#[cfg(all(feature = "cache", unix))]
mod throttled;
mod urls;
