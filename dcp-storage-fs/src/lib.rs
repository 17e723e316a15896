#![doc = include_str!("../README.md")]
//!
//! [`FsStorage`] keeps each object in a file of its own, at the object's key below a root folder.
//! It promises more than a file system by itself:
//!
//! - **Whole or absent.** Bytes go to a temporary file in the object's folder, which is renamed to
//!   the object's name when it is complete. A process may be killed at any moment: what is
//!   visible is whole.
//! - **One creator.** Creating is decided by the file system (`renameat2` with
//!   `RENAME_NOREPLACE`, or a hard link where that is missing, as on NFS), never by an earlier check.
//! - **Durable.** When a write returns, the file, its folder, and the folders above up to the root
//!   are synced, unless [`FsStorageBuilder::sync`] is off.
//! - **One holder.** A claimed object is locked (`flock`) until its holder replaces it, releases it or
//!   dies. An NFS server passes the lock of a client that was silent for its lease time to the next
//!   one. On file systems without locks, such as Lustre mounted without `flock`, a warning is logged.
//! - **Inside the root.** No key leads out of the root, whatever symbolic links there are; see
//!   [`FsStorageBuilder::follow_links`].
//!
//! - **One version.** The version of an object is the inode, length and time of the last write of its
//!   file, the same on all machines that mount it. A read compares the version of the open file
//!   before and after. It detects a replaced file, and a file that was written in place if the file
//!   system's clock advanced meanwhile (by 4 ms on most systems).
//!
//! Reads go from the file straight into the lent memory by `preadv`, writes from the gather list by
//! `writev`, and the parts of an upload concurrently by `pwritev`, on the blocking threads of the
//! current tokio runtime. Without a runtime they block the caller.
//!
//! A writer that is killed leaves its temporary file behind. It is never listed, and
//! [`leftovers`](dcp_core::Storage::leftovers) removes it.

#![cfg(unix)]

mod blocking;
mod builder;
#[cfg(feature = "disk-log")]
pub mod disk_log;
mod error;
mod folder;
mod folder_listing;
#[cfg(test)]
mod kills;
mod leftovers;
mod lock;
mod owner;
mod read;
mod root;
mod shared;
mod storage;
mod temp;
mod upload;
mod version;
mod write;

pub use builder::FsStorageBuilder;
pub use storage::FsStorage;
