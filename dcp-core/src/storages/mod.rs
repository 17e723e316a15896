//! Places that keep bytes: the contract of storages, their URLs, and what is at a URL.

pub mod location;
pub mod registry;
pub mod storage;
pub(crate) mod streams;
