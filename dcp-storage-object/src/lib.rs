#![doc = include_str!("../README.md")]

mod error;
mod inner;
mod leftovers;
mod list;
mod native;
mod opener;
mod path;
mod provider;
mod read;
mod retry;
mod runs;
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure", feature = "http"))]
mod service;
mod storage;
mod upload;
mod write;

pub use opener::{ObjectOpener, register};
pub use provider::Provider;
pub use storage::{ObjectStorage, ObjectStorageBuilder};
