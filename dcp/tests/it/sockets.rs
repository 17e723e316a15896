//! Blocking calls over a storage that needs a runtime with sockets.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use dcp::core::error::StorageOp;
use dcp::core::storage::{
    Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload,
};
use dcp::core::{Buffer, Key, Payload, StorageError};
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
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.request().await?;
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.request().await?;
        self.inner.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        self.request().await?;
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.request().await?;
        self.inner.start_upload(key, mode).await
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        self.inner.list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.request().await?;
        self.inner.delete(key).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.request().await?;
        self.inner.claim(key).await
    }
}

fn remote() -> (Checkpointer, Arc<AtomicUsize>) {
    let (server, connections) = server();
    let inner = MemoryStorage::new();
    let storage = RemoteStorage { inner, server, connection: Arc::default() };
    let mut storages = dcp::default_storages();
    storages.register("remote", move |_, _| Ok(Arc::new(storage.clone())));
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
