//! A storage as a plug-in: checkpoints in the services of [OpenDAL](opendal).
//!
//! [`OpendalStorage`] takes any [`Operator`](opendal::Operator). [`register`] adds the URL schemes
//! `opendal-fs://PATH` and `opendal-memory://NAME` of the two services in this crate's features; a
//! service more is a feature of `opendal` and a few lines in `register.rs`.

mod error;
mod list;
mod register;
mod storage;
mod upload;

pub use register::register;
pub use storage::OpendalStorage;
