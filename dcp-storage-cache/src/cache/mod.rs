//! Blocks of remote objects on local disk.

mod block;
mod evict;
mod folder;
mod storage;

pub use folder::{CacheFolder, CacheFolderBuilder};
pub use storage::{CacheStats, CachedStorage, cache_layer};
