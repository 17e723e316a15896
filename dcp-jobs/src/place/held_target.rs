//! A place that one job writes, and no other one meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dcp_core::storage::Claim;
use dcp_core::{Key, Storage, StorageError};

use crate::error::Error;

#[cfg(doc)]
use crate::error::ErrorKind;

/// The object whose claim a writer of any folder holds: that of saves.
pub(crate) const CLAIMED: &str = ".metadata";

/// Whether a claim of this storage is a lock: a second one fails while the first is held.
pub(crate) fn has_locks(storage: &dyn Storage) -> bool {
    let capabilities = storage.capabilities();
    capabilities.claims && !capabilities.conditional_put
}

/// The error of a place that another process writes.
pub(crate) fn not_claimed(target: &str, error: StorageError) -> Error {
    Error::from(error).context(format!("cannot write to {target:?}"))
}

/// A storage in which the job holds a claim, which a writer of the job gets as well. The claim ends
/// with the storage, or with [`release`](Self::release).
#[derive(Debug)]
pub(crate) struct HeldTarget {
    storage: Arc<dyn Storage>,
    key: Key,
    claim: Mutex<Option<Arc<dyn Claim>>>,
}

impl HeldTarget {
    /// Claims `key` where claims are locks.
    ///
    /// # Errors
    ///
    /// [`InUse`](ErrorKind::InUse) when another process holds it.
    pub(crate) async fn take(
        storage: Arc<dyn Storage>,
        key: Key,
        target: &str,
    ) -> Result<Arc<Self>, Error> {
        let claim = match has_locks(&*storage) {
            true => Some(storage.claim(&key).await.map_err(|error| not_claimed(target, error))?),
            false => None,
        };
        Ok(Arc::new(Self { storage, key, claim: Mutex::new(claim) }))
    }

    fn held(&self) -> MutexGuard<'_, Option<Arc<dyn Claim>>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the claim, although there may be users of the storage.
    pub(crate) fn release(&self) {
        *self.held() = None;
    }
}

#[async_trait]
impl Storage for HeldTarget {
    dcp_core::forward_storage!(
        storage: capabilities, stat, read, read_whole, put, start_upload, list, list_folder, delete,
        leftovers, remove_empty_folders
    );

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let held = self.held().clone().filter(|_| *key == self.key);
        match held {
            Some(claim) => Ok(claim),
            None => self.storage.claim(key).await,
        }
    }
}
