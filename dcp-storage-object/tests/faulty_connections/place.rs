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

/// Seconds after which a request hangs, on any machine.
const HANG: u64 = 900;

/// What a storage expects of the answers to its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// Each comes, or its connection breaks: a slow one is waited for.
    All,
    /// Some never come: a request is repeated after a second, and costs a repetition where the machine
    /// was only slow.
    SomeStall,
}

/// An object store on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    S3,
    Azure,
    Gcs,
}

impl Store {
    pub(crate) const ALL: [Self; 3] = [Self::S3, Self::Azure, Self::Gcs];

    pub(crate) fn name(self) -> &'static str {
        ["s3", "azure", "gcs"][self as usize]
    }

    pub(crate) fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|store| store.name() == name).unwrap()
    }

    fn variable(self, name: &str) -> Option<String> {
        let name = format!("DCP_TEST_{}_{name}", self.name().to_uppercase());
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn bucket(self) -> Option<String> {
        self.variable(if self == Self::Azure { "CONTAINER" } else { "BUCKET" })
    }

    /// Whether it runs.
    pub(crate) fn is_there(self) -> bool {
        self.variable("ENDPOINT").is_some() && self.bucket().is_some()
    }

    fn url(self, bucket: &str, prefix: &str) -> String {
        let scheme = ["s3", "az", "gs"][self as usize];
        format!("{scheme}://{bucket}/{prefix}")
    }

    fn options(self, endpoint: &str) -> StorageOptions {
        let variable = |name: &str| std::env::var(name).unwrap();
        let options = StorageOptions::new();
        match self {
            Self::S3 => options
                .with("aws_endpoint", endpoint)
                .with("aws_region", "us-east-1")
                .with("aws_access_key_id", "test")
                .with("aws_secret_access_key", "test"),
            Self::Azure => {
                let account = variable("AZURE_STORAGE_ACCOUNT_NAME");
                options
                    .with("azure_endpoint", format!("{endpoint}/{account}"))
                    .with("azure_storage_account_key", variable("AZURE_STORAGE_ACCOUNT_KEY"))
                    .with("azure_storage_account_name", account)
            }
            Self::Gcs => {
                options.with("google_base_url", endpoint).with("google_skip_signature", "true")
            }
        }
    }

    /// A storage that repeats requests, as often as it takes, until a time that nothing but a hang
    /// reaches.
    pub(crate) fn open(self, url: &str, endpoint: &str, answers: Answers) -> Arc<dyn Storage> {
        let seconds = match answers {
            Answers::All => HANG,
            Answers::SomeStall => 1,
        };
        let options = self
            .options(endpoint)
            .with("timeout", format!("{seconds} seconds"))
            .with("stall_timeout", seconds.to_string())
            .with("attempts_max", u32::MAX.to_string())
            .with("deadline", HANG.to_string());
        let request = OpenRequest::new(url, Access::Write).with_options(options);
        block_on(ObjectOpener::new().open(&request)).unwrap()
    }
}

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
    pub(crate) store: Store,
    prefix: String,
    answers: Answers,
}

impl Place {
    /// A folder whose name no other has.
    pub(crate) fn new(store: Store) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        Self::named(store, format!("faults-{now:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// The same, in which seeded faults leave requests without an answer.
    pub(crate) fn with_stalls(self) -> Self {
        Self { answers: Answers::SomeStall, ..self }
    }

    /// An empty folder whose name is the same in every run: faults follow from the names of objects.
    pub(crate) fn of_seed(store: Store, seed: u64) -> Self {
        let place = Self::named(store, format!("faults-of-seed-{seed}")).with_stalls();
        let keys: Vec<_> = place.names().iter().map(|name| key(name)).collect();
        block_on(place.storage().delete(&keys)).unwrap();
        place
    }

    fn named(store: Store, prefix: String) -> Self {
        let proxy = FaultProxy::start(&store.variable("ENDPOINT").unwrap()).unwrap();
        Self { proxy, store, prefix, answers: Answers::All }
    }

    /// The URL that [`Store::open`] takes, and the address of the proxy.
    pub(crate) fn address(&self) -> (String, String) {
        (self.store.url(&self.store.bucket().unwrap(), &self.prefix), self.proxy.endpoint())
    }

    /// A storage with connections of its own, as a process has them.
    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        let (url, endpoint) = self.address();
        self.store.open(&url, &endpoint, self.answers)
    }

    pub(crate) fn in_bucket(&self, bucket: &str) -> Arc<dyn Storage> {
        let url = self.store.url(bucket, &self.prefix);
        self.store.open(&url, &self.proxy.endpoint(), self.answers)
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
