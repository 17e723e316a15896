//! Several savers in one place, at the worst moments.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::{
    Buffer, Capabilities, DType, Key, ObjectMeta, ObjectStream, Payload, PutMode, ReadInto,
    Storage, StorageError, StorageWriter as _, Upload,
};
use dcp_formats::dcp::DcpWriter;

use crate::harness::{State, block_on, get, key, load, names, save, save_in_segments, write_all};

fn small(seed: u8) -> State {
    State::new(2).rows("w", DType::BFloat16, &[5, 3], seed).object("step", i64::from(seed))
}

/// A storage on which somebody else is at work too.
#[derive(Debug)]
struct Shared {
    inner: Arc<MemoryStorage>,
    /// Is saved, completely, when a commit has checked its files and writes its sidecar.
    rival: Mutex<Option<State>>,
    /// Replaces the `.metadata` of a commit right after it came.
    successor: Option<Bytes>,
}

#[async_trait]
impl Storage for Shared {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.inner.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        let sidecar = key.as_str().ends_with(".cbor");
        let rival = self.rival.lock().unwrap().take_if(|_| sidecar);
        if let Some(rival) = rival {
            save_in_segments(&DcpWriter::new(self.inner.clone()), &rival, 1 << 20).await.unwrap();
        }
        self.inner.put(key, payload, mode).await?;
        match &self.successor {
            Some(bytes) if key.as_str() == ".metadata" => {
                self.inner.put(key, bytes.clone().into(), PutMode::Overwrite).await
            }
            _ => Ok(()),
        }
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.inner.start_upload(key, mode).await
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        self.inner.list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.inner.delete(key).await
    }
}

#[test]
fn a_commit_that_is_overtaken_after_it_checked_its_files_fails() {
    let inner = Arc::new(MemoryStorage::new());
    let rival = Mutex::new(Some(small(2)));
    let storage = Arc::new(Shared { inner: inner.clone(), rival, successor: None });
    let error = save(&DcpWriter::new(storage), &small(1)).unwrap_err();
    assert!(error.to_string().contains("another save"), "{error}");
    assert!(load(inner.clone()).unwrap().same(&small(2).loaded()));
    let sidecars = names(&*inner).iter().filter(|name| name.ends_with(".cbor")).count();
    assert_eq!(sidecars, 1, "{:?}", names(&*inner));
}

#[test]
fn metadata_written_anew_with_the_same_bytes_is_no_other_save() {
    let storage = Arc::new(MemoryStorage::new());
    let late = DcpWriter::new(storage.clone());
    save(&late, &small(1)).unwrap();
    let whole = get(&*storage, ".metadata").to_vec();
    block_on(async {
        let session = late.begin().await.unwrap();
        let (locals, mut global, data) = small(2).plan(&late);
        let plans = late.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&late, &locals, &plans, data, u64::MAX).await.unwrap();
        // Written anew, with the same bytes: nobody else was here.
        let same = Payload::from(whole.clone());
        storage.put(&key(".metadata"), same, PutMode::Overwrite).await.unwrap();
        late.commit(session, &global.metadata, reports).await.unwrap();
    });
    assert!(load(storage).unwrap().same(&small(2).loaded()));
}

#[test]
fn files_that_the_current_metadata_refers_to_are_never_removed() {
    let inner = Arc::new(MemoryStorage::new());
    save(&DcpWriter::new(inner.clone()), &small(1)).unwrap();
    let old = get(&*inner, ".metadata");
    let rival = Mutex::default();
    let storage = Shared { inner: inner.clone(), rival, successor: Some(old) };
    save(&DcpWriter::new(Arc::new(storage)), &small(2)).unwrap();
    assert!(load(inner.clone()).unwrap().same(&small(1).loaded()));

    // What cannot be read refers to anything.
    let before = names(&*inner);
    let successor = Some(Bytes::from_static(b"another format"));
    let storage = Shared { inner: inner.clone(), rival: Mutex::default(), successor };
    save(&DcpWriter::new(Arc::new(storage)), &small(3)).unwrap();
    assert!(before.iter().all(|name| names(&*inner).contains(name)));
}
