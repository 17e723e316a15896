#![doc = include_str!("../README.md")]
//!
//! # Reading
//!
//! [`CachedStorage`] wraps a storage that has versions ([`Capabilities::versions`]). Reads are
//! served in blocks, which are files of a [`CacheFolder`]:
//!
//! - **Never stale.** The name of a block has the URL of the storage, the key, the version of the
//!   object and the number of the block. An object that is replaced has another version, so its old
//!   blocks are not found any more. A read that names no version costs one `stat`. A read of a
//!   version that was seen before gets the bytes of that version, also from blocks.
//! - **Fetched once.** A process that fetches a block holds a lock (`flock`) meanwhile; the others
//!   wait for it, and then read the file. A process that dies gives up its locks.
//! - **Never wrong.** A block has a checksum, which each read compares. A damaged block is removed
//!   and fetched again.
//! - **Bounded.** When the folder exceeds its limit, the blocks that were not used for longest are
//!   removed. Each process scans the folder after it has added a 32nd of the limit, so the limit can
//!   be exceeded by that much per process.
//! - **Private.** The folder belongs to one user. A folder that another user owns or can write to is
//!   refused, because its blocks could be forged.
//! - **Optional.** When the disk is full or a block cannot be written, reads go to the storage.
//!
//! A read has as many blocks in memory as the storage takes requests at a time
//! ([`Capabilities::parallelism`]): 128 MiB with 16 blocks of 8 MiB, besides the caller's buffers.
//! Writes and listings pass through. Objects of a storage without versions are not cached.
//!
//! # Writing
//!
//! [`ThrottledStorage`] lets only some processes of a node upload at a time, as OLMo-core's
//! `throttle_uploads` does, but without a barrier: a process that is done lets the next one begin.
//! The turns are locks on the files of a folder ([`UploadSlots`]), which a process that dies gives
//! up. Writes below 1 MiB, such as the commit of a save, need no turn.
//!
//! [`Capabilities::parallelism`]: dcp_core::storage::Capabilities::parallelism
//! [`Capabilities::versions`]: dcp_core::storage::Capabilities::versions

#![cfg(unix)]

mod blocking;
mod cache;
mod private_folder;
mod throttle;

pub use cache::{CacheFolder, CacheFolderBuilder, CacheStats, CachedStorage, cache_layer};
pub use throttle::{ThrottledStorage, UploadSlots};
