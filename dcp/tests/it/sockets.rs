//! Blocking calls over a storage that needs a runtime with sockets.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use dcp::core::error::StorageOp;
use dcp::core::registry::{OpenRequest, StorageOpener};
use dcp::core::storage::{
    Claim, Leftover, LeftoverAction, ObjectMeta, PutMode, ReadOutcome, ReadRequest, Upload,
    UploadOptions, WholeObject,
};
use dcp::core::{Key, Payload, StorageError};
use dcp::{Checkpointer, Storage};
use dcp_conformance::MemoryStorage;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::state::{blank, state, step_of};

/// A server that answers every byte with the same byte, and counts its connections.
fn server() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            counted.fetch_add(1, Ordering::Relaxed);
            std::thread::spawn(move || {
                let mut byte = [0];
                while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
            });
        }
    });
    (address, connections)
}

/// A storage that sends a byte over one connection before each operation, as a client of an
/// object store does.
#[derive(Clone, Debug)]
struct RemoteStorage {
    inner: MemoryStorage,
    server: SocketAddr,
    connection: Arc<Mutex<Option<TcpStream>>>,
}

impl RemoteStorage {
    async fn request(&self) -> Result<(), StorageError> {
        let failed = |error| StorageError::from_io(StorageOp::Read, None, error);
        let mut connection = self.connection.lock().await;
        let stream = match &mut *connection {
            Some(stream) => stream,
            none => none.insert(TcpStream::connect(self.server).await.map_err(failed)?),
        };
        stream.write_all(b"?").await.map_err(failed)?;
        let answer = tokio::time::timeout(Duration::from_secs(120), stream.read_u8());
        assert_eq!(answer.await.unwrap().map_err(failed)?, b'?');
        Ok(())
    }
}

#[async_trait]
impl Storage for RemoteStorage {
    dcp_core::forward_storage!(inner: capabilities, list, list_folder);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.request().await?;
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.request().await?;
        self.inner.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.request().await?;
        self.inner.read_whole(key, max_bytes).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.request().await?;
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.request().await?;
        self.inner.start_upload(key, options).await
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.request().await?;
        self.inner.delete(keys).await
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        self.request().await?;
        self.inner.leftovers(folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        self.request().await?;
        self.inner.remove_empty_folders(folder).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.request().await?;
        self.inner.claim(key).await
    }
}

/// Checks on the server whether the location is usable.
struct RemoteOpener(RemoteStorage);

#[async_trait]
impl StorageOpener for RemoteOpener {
    async fn open(&self, _: &OpenRequest) -> Result<Arc<dyn Storage>, StorageError> {
        self.0.request().await?;
        Ok(Arc::new(self.0.clone()))
    }
}

fn remote() -> (Checkpointer, Arc<AtomicUsize>) {
    let (server, connections) = server();
    let inner = MemoryStorage::new();
    let storage = RemoteStorage { inner, server, connection: Arc::default() };
    let mut storages = dcp::default_storages();
    storages.register_opener("remote", Arc::new(RemoteOpener(storage)));
    (Checkpointer::new().storages(storages), connections)
}

fn save_and_load(checkpointer: &Checkpointer, step: u8) {
    checkpointer.save(&state(step, 0, 1), "remote://run").blocking().unwrap();
    let mut loaded = blank(0, 1);
    checkpointer.load(&mut loaded, "remote://run").blocking().unwrap();
    assert_eq!(step_of(&loaded), step);
}

/// A runtime for each call would leave the second one with the socket of a runtime that is gone.
#[test]
fn blocking_calls_share_a_connection() {
    let (checkpointer, connections) = remote();
    for step in 1..4 {
        save_and_load(&checkpointer, step);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| save_and_load(&checkpointer, 5));
    });
    assert_eq!(connections.load(Ordering::Relaxed), 1);
}

#[test]
fn a_blocking_call_works_on_the_threads_of_another_runtime() {
    let (checkpointer, _) = remote();
    let one = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let many = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    one.block_on(async { save_and_load(&checkpointer, 1) });
    // More operations than the budget of a task allows at once.
    let task = {
        let checkpointer = checkpointer.clone();
        many.spawn(async move { (2..40).for_each(|step| save_and_load(&checkpointer, step)) })
    };
    many.block_on(task).unwrap();
    let in_pool = many.spawn_blocking(move || save_and_load(&checkpointer, 40));
    many.block_on(in_pool).unwrap();
}

/// The storage is opened on the thread of the saves, whose runtime has sockets too.
#[test]
fn a_background_save_opens_its_storage() {
    let (checkpointer, _) = remote();
    let saving = checkpointer.save(&state(7, 0, 1), "remote://run").background().unwrap();
    dcp::block_on(saving.wait()).unwrap().unwrap();
    let mut loaded = blank(0, 1);
    checkpointer.load(&mut loaded, "remote://run").blocking().unwrap();
    assert_eq!(step_of(&loaded), 7);
}
