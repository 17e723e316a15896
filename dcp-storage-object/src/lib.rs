#![doc = include_str!("../README.md")]

#[cfg(feature = "net")]
mod addresses;
#[cfg(feature = "net")]
mod answer;
#[cfg(feature = "net")]
mod client;
mod error;
mod inner;
mod leftovers;
mod list;
mod native;
mod object_read;
mod opener;
mod path;
mod provider;
mod rate;
mod read;
#[cfg(feature = "net")]
mod redirect;
#[cfg(feature = "net")]
mod refused;
mod retry;
mod runs;
#[cfg(feature = "net")]
mod service;
mod storage;
#[cfg(feature = "net")]
mod strange_keys;
mod upload;
mod write;

pub use opener::{ObjectOpener, register};
pub use provider::Provider;
pub use storage::{ObjectStorage, ObjectStorageBuilder};
