//! Uploads of the processes of a node that take turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use dcp::cache::UploadSlots;
use dcp::collectives::LocalGroup;
use dcp::core::storage::{ObjectMeta, PartFuture, PutMode, Upload, UploadOptions};
use dcp::core::{Collective as _, Key, Payload, Storage, StorageError};
use dcp::{CheckpointError, Checkpointer, DType, Region, StateDict, StorageRegistry, Tensor};
use dcp_conformance::MemoryStorage;

const RANKS: u32 = 6;
const TURNS: u32 = 2;
/// A put of fewer bytes needs no turn.
const LARGE: u64 = 1 << 20;

#[derive(Clone, Debug, Default)]
struct Uploads {
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    all: Arc<AtomicU32>,
}

impl Uploads {
    fn begin(&self) -> Uploading {
        self.all.fetch_add(1, Ordering::SeqCst);
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        Uploading(self.clone())
    }
}

#[derive(Debug)]
struct Uploading(Uploads);

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Counts the uploads that run at once.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn Storage>,
    uploads: Uploads,
}

#[async_trait]
impl Storage for Watched {
    dcp_core::forward_storage!(
        inner: capabilities, stat, read, read_whole, list, list_folder, delete, claim,
        leftovers, remove_empty_folders
    );

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let _uploading = (payload.len() >= LARGE).then(|| self.uploads.begin());
        std::thread::yield_now();
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let uploading = self.uploads.begin();
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(WatchedUpload { inner, _uploading: uploading }))
    }
}

#[derive(Debug)]
struct WatchedUpload {
    inner: Box<dyn Upload>,
    _uploading: Uploading,
}

#[async_trait]
impl Upload for WatchedUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        std::thread::yield_now();
        self.inner.put_part(part)
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let Self { inner, _uploading } = *self;
        inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        let Self { inner, _uploading } = *self;
        inner.abort().await
    }
}

/// Slots that are opened separately are those of separate processes: their locks belong to files.
#[test]
fn at_most_as_many_processes_of_a_node_upload_as_there_are_turns() {
    let node = tempfile::tempdir().unwrap();
    let uploads = Uploads::default();
    let mut storages = StorageRegistry::empty();
    let (memory, watched) = (MemoryStorage::new(), uploads.clone());
    storages.register("node", move |_| {
        let inner = Arc::new(memory.clone());
        Ok(Arc::new(Watched { inner, uploads: watched.clone() }))
    });
    let results = LocalGroup::new(RANKS).run(|group| {
        let rank = u64::from(group.rank());
        let slots = UploadSlots::open(node.path().join("uploads"), TURNS)?;
        // The storages are set last: the order of the calls does not matter.
        let checkpointer = Checkpointer::in_group(Arc::new(group))
            .throttle_uploads(slots)
            .storages(storages.clone());
        let rows = Region::new([rank, 0], [1, LARGE])?;
        let mut state = StateDict::new();
        let whole = [u64::from(RANKS), LARGE];
        state.insert("weight", Tensor::zeros_sharded(DType::Float32, whole, [rows])?);
        for step in 0..4 {
            let save = checkpointer.save(&state, format!("node://run/{step}"));
            // Both ways to save.
            if step % 2 == 0 {
                save.blocking()?;
            } else {
                dcp::block_on(save.background()?.wait())??;
            }
        }
        Ok::<_, CheckpointError>(())
    });
    results.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
    let [all, most, now] =
        [&uploads.all, &uploads.most, &uploads.now].map(|n| n.load(Ordering::SeqCst));
    assert_eq!((all, now), (4 * RANKS, 0));
    assert!((1..=TURNS).contains(&most), "{most} uploads at once");
}
