//! Two deletions of one run at the same time.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use dcp_core::storage::{ObjectMeta, PutMode, ReadOutcome, ReadRequest, WholeObject};
use dcp_core::{Key, Payload, Storage, StorageError};
use dcp_jobs::run::KeepLast;

use crate::support::{FRAMEWORKS, files, run_in};

/// Every so many operations are disturbed, as a model has hundreds; no multiple of what a file takes.
const STEP: usize = 7;

/// A storage in which another deletion runs to its end before the n-th operation.
struct Disturbed {
    storage: Arc<dyn Storage>,
    left: AtomicU64,
}

impl fmt::Debug for Disturbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Disturbed")
    }
}

impl Disturbed {
    async fn count(&self) {
        let was = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if was == Ok(1) {
            run_in(&self.storage).prune().policy(KeepLast(2)).run().await.unwrap();
        }
    }
}

#[async_trait]
impl Storage for Disturbed {
    dcp_core::forward_storage!(
        storage: capabilities, list, list_folder, leftovers, remove_empty_folders, start_upload, claim
    );

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.count().await;
        self.storage.stat(key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.count().await;
        self.storage.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.count().await;
        self.storage.read_whole(key, max_bytes).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.count().await;
        self.storage.put(key, payload, mode).await
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.count().await;
        self.storage.delete(keys).await
    }
}

/// Whatever the other deletion has removed is gone, which is what both were to reach.
#[tokio::test]
async fn a_deletion_that_another_one_overtakes_has_no_failures() {
    for framework in FRAMEWORKS {
        let folder = |step| framework.naming().folder(step);
        let mut points = 0;
        for n in (1..).step_by(STEP) {
            let memory: Arc<dyn Storage> = framework.run(1..=3);
            let kept: Vec<_> = [2, 3].map(|step| files(&*memory, &folder(step))).into();
            let disturbed =
                Arc::new(Disturbed { storage: Arc::clone(&memory), left: AtomicU64::new(n) });
            let storage: Arc<dyn Storage> = Arc::clone(&disturbed) as _;
            let plan = run_in(&memory).prune().policy(KeepLast(2)).plan().await.unwrap();
            let prune = run_in(&storage).prune().policy(KeepLast(2));
            let report = prune.apply(&plan).await.unwrap();
            let when = format!("{framework:?} at operation {n}: {:?}", report.not_deleted);
            assert!(report.not_deleted.iter().all(|one| !one.failed), "{when}");
            let after: Vec<_> = [2, 3].map(|step| files(&*memory, &folder(step))).into();
            assert_eq!(after, kept, "{when}");
            if disturbed.left.load(Ordering::SeqCst) > 0 {
                break;
            }
            points += 1;
        }
        assert!(points > 3, "{framework:?}: {points}");
    }
}
