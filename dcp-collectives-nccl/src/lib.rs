#![doc = include_str!("../README.md")]

mod bulk;
mod forming;
mod header;
mod link;
#[cfg(feature = "nccl")]
mod nccl;
mod terms;

pub use crate::bulk::BulkCollective;
pub use crate::forming::{
    BulkBuilder, DEFAULT_CHUNK_BYTES, DEFAULT_DEADLINE, DEFAULT_MAX_MESSAGE, DEFAULT_THRESHOLD,
};
pub use crate::link::{Link, LinkDeadline, LinkError, Network};
#[cfg(feature = "nccl")]
pub use crate::nccl::{NcclError, NcclLink, NcclNetwork};
