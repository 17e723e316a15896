//! A folder of a bucket that nobody else uses, behind a proxy of its own.

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{SystemTime, UNIX_EPOCH};

use dcp_conformance::http::FaultProxy;
use dcp_core::registry::{Access, OpenRequest, StorageOpener as _, StorageOptions};
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt as _};
use dcp_core::{Storage, StorageError};
use dcp_storage_object::ObjectOpener;
use dcp_testing::key;
use futures_util::TryStreamExt as _;
use tokio::runtime::Runtime;

const ENDPOINT: &str = "DCP_TEST_S3_ENDPOINT";
const BUCKET: &str = "DCP_TEST_S3_BUCKET";

/// Runs a future on the one runtime of this process, which its connections need.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());
    RUNTIME.block_on(future)
}

pub(crate) fn put(
    storage: &Arc<dyn Storage>,
    name: &str,
    text: &str,
    mode: PutMode,
) -> Result<ObjectMeta, StorageError> {
    block_on(storage.put(&key(name), text.to_owned().into_bytes().into(), mode))
}

pub(crate) fn read(storage: &Arc<dyn Storage>, name: &str) -> Result<String, StorageError> {
    let bytes = block_on(storage.read_all(&key(name)))?;
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

pub(crate) struct Place {
    pub(crate) proxy: FaultProxy,
    prefix: String,
}

impl Place {
    /// Whether there is an emulator.
    pub(crate) fn has_store() -> bool {
        [ENDPOINT, BUCKET].iter().all(|name| std::env::var(name).is_ok())
    }

    /// A folder whose name no other has.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        Self::named(format!("faults-{now:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// An empty folder whose name is the same in every run: faults follow from the names of objects.
    pub(crate) fn of_seed(seed: u64) -> Self {
        let place = Self::named(format!("faults-of-seed-{seed}"));
        let keys: Vec<_> = place.names().iter().map(|name| key(name)).collect();
        block_on(place.storage().delete(&keys)).unwrap();
        place
    }

    fn named(prefix: String) -> Self {
        let proxy = FaultProxy::start(&std::env::var(ENDPOINT).unwrap()).unwrap();
        Self { proxy, prefix }
    }

    /// The URL that [`open`] takes, and the address of the proxy.
    pub(crate) fn address(&self) -> (String, String) {
        let bucket = std::env::var(BUCKET).unwrap();
        (format!("s3://{bucket}/{}", self.prefix), self.proxy.endpoint())
    }

    /// A storage with connections of its own, as a process has them.
    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        let (url, endpoint) = self.address();
        open(&url, &endpoint)
    }

    pub(crate) fn in_bucket(&self, bucket: &str) -> Arc<dyn Storage> {
        open(&format!("s3://{bucket}/{}", self.prefix), &self.proxy.endpoint())
    }

    /// The names of all objects, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let storage = self.storage();
        let listed = block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
        let mut names: Vec<_> = listed.into_iter().map(|meta| meta.key.to_string()).collect();
        names.sort();
        names
    }

    /// Whether a message has the name of an object of a checkpoint, or of the listing of all.
    pub(crate) fn is_named_in(&self, message: &str) -> bool {
        [".metadata", ".distcp", ".dcp", "cannot list"].iter().any(|name| message.contains(name))
    }
}

/// A storage that gives up early, so that stalled requests cost little.
pub(crate) fn open(url: &str, endpoint: &str) -> Arc<dyn Storage> {
    let options = StorageOptions::new()
        .with("aws_endpoint", endpoint)
        .with("aws_region", "us-east-1")
        .with("aws_access_key_id", "test")
        .with("aws_secret_access_key", "test")
        .with("timeout", "1 second")
        .with("stall_timeout", "1")
        .with("deadline", "20");
    let request = OpenRequest::new(url, Access::Write).with_options(options);
    block_on(ObjectOpener::new().open(&request)).unwrap()
}
