//! Opens storages by URL.

#[cfg(feature = "s3")]
mod aws_profile;
#[cfg(feature = "azure")]
mod azure;
#[cfg(feature = "gcs")]
mod gcs;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "s3")]
mod ini;
mod options;
#[cfg(feature = "s3")]
mod s3;
#[cfg(feature = "net")]
mod settings;
#[cfg(any(feature = "s3", feature = "gcs"))]
mod uploads;
mod url;

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "memory")]
use std::sync::LazyLock;

use async_trait::async_trait;
use dashmap::DashMap;
use dcp_core::error::StorageOp;
use dcp_core::location::Location;
use dcp_core::registry::{Access, OpenRequest, StorageOpener, StorageOptions, StorageRegistry};
use dcp_core::{Storage, StorageError, StorageErrorKind as Kind};
use object_store::ObjectStore;

use crate::native::{Completion, OpenUploads, Replacement};
use crate::provider::Provider;
use crate::storage::{ObjectStorage, ObjectStorageBuilder};
use url::Place;

/// The URL schemes of the providers that this build has, with the provider of each.
const SCHEMES: &[(&str, Provider)] = &[
    #[cfg(feature = "s3")]
    ("s3", Provider::S3),
    #[cfg(feature = "s3")]
    ("s3a", Provider::S3),
    #[cfg(feature = "gcs")]
    ("gs", Provider::Gcs),
    #[cfg(feature = "azure")]
    ("az", Provider::Azure),
    #[cfg(feature = "azure")]
    ("abfs", Provider::Azure),
    #[cfg(feature = "azure")]
    ("abfss", Provider::Azure),
    #[cfg(feature = "http")]
    ("http", Provider::Http),
    #[cfg(feature = "http")]
    ("https", Provider::Http),
    #[cfg(feature = "memory")]
    ("memory", Provider::Memory),
];

/// Registers the URL schemes of the providers that this build has.
///
/// All have one opener, which keeps the connections of each bucket for as long as the registry
/// lives. Settings of no provider and no other crate are refused from then on.
pub fn register(storages: &mut StorageRegistry) {
    #[cfg(feature = "net")]
    crate::service::install_provider();
    storages.register_options(options::check_name);
    let opener: Arc<dyn StorageOpener> = Arc::new(ObjectOpener::new());
    for (scheme, _) in SCHEMES {
        storages.register_opener(*scheme, Arc::clone(&opener));
        storages.register_locator(*scheme, |url| locate(url).into_iter().collect());
    }
}

/// The place that a URL names, by whichever of the schemes of its provider.
fn locate(url: &str) -> Option<Location> {
    let place = Place::parse(url).ok()?;
    let names = place.prefix.split('/').filter(|name| !name.is_empty());
    let storage = format!("{:?}://{}", place.provider, place.root);
    Some(Location::new(storage, names.map(str::to_owned).collect::<Vec<_>>()))
}

/// Opens the URLs of object stores.
///
/// The settings of a store are, in this order: those of the request, the environment variables of
/// its provider, and the identity of the machine. Connections are kept for each bucket and
/// settings.
#[derive(Default)]
pub struct ObjectOpener {
    opened: DashMap<Connected, Arc<Opened>>,
}

/// The key of a connection: a bucket of a provider, and the settings.
type Connected = (Provider, String, Vec<(String, String)>);

/// A store, and its abilities beyond `ObjectStore`.
struct Opened {
    store: Arc<dyn ObjectStore>,
    completion: Option<Arc<dyn Completion>>,
    replacement: Option<Arc<dyn Replacement>>,
    open_uploads: Option<Arc<dyn OpenUploads>>,
    conditional_writes: bool,
}

impl Opened {
    #[cfg(any(feature = "gcs", feature = "http", feature = "memory"))]
    fn new(store: impl ObjectStore) -> Self {
        Self {
            store: Arc::new(store),
            completion: None,
            replacement: None,
            open_uploads: None,
            conditional_writes: true,
        }
    }
}

impl ObjectOpener {
    /// An opener without connections.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The URL schemes that it opens, by the features of this crate.
    pub fn schemes() -> impl Iterator<Item = &'static str> {
        SCHEMES.iter().map(|(scheme, _)| *scheme)
    }

    fn open_now(&self, request: &OpenRequest) -> Result<ObjectStorage, StorageError> {
        let place = Place::parse(&request.url)?;
        let settings = request.options.iter();
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let entry = self.opened.entry((place.provider, place.root.clone(), settings));
        let opened =
            entry.or_try_insert_with(|| connect(&place, &request.options).map(Arc::new))?;
        let mut builder = ObjectStorageBuilder::new(Arc::clone(&opened.store))
            .provider(place.provider)
            .prefix(place.prefix)
            .writable(request.access == Access::Write)
            .conditional_writes(opened.conditional_writes);
        builder.completion.clone_from(&opened.completion);
        builder.replacement.clone_from(&opened.replacement);
        builder.open_uploads.clone_from(&opened.open_uploads);
        options::tune(builder, &request.options)?.build()
    }
}

fn connect(place: &Place, options: &StorageOptions) -> Result<Opened, StorageError> {
    match place.provider {
        #[cfg(feature = "s3")]
        Provider::S3 => s3::connect(&place.root, options),
        #[cfg(feature = "gcs")]
        Provider::Gcs => gcs::connect(&place.root, options),
        #[cfg(feature = "azure")]
        Provider::Azure => azure::connect(&place.root, options),
        #[cfg(feature = "http")]
        Provider::Http => http::connect(&place.root, options),
        #[cfg(feature = "memory")]
        Provider::Memory => Ok(Opened::new(memory(&place.root))),
        _ => Err(invalid(format!("{:?} is not in this build", options))),
    }
}

/// The memory of a name, which all openers of the process share.
#[cfg(feature = "memory")]
fn memory(name: &str) -> Arc<object_store::memory::InMemory> {
    static MEMORIES: LazyLock<DashMap<String, Arc<object_store::memory::InMemory>>> =
        LazyLock::new(DashMap::new);
    Arc::clone(&MEMORIES.entry(name.to_owned()).or_default())
}

fn invalid(message: impl Into<String>) -> StorageError {
    StorageError::new(Kind::Invalid, StorageOp::Open, None).with_message(message)
}

#[cfg(any(feature = "s3", feature = "gcs", feature = "azure", feature = "http"))]
fn cannot_connect(error: &object_store::Error) -> StorageError {
    let mut failure = crate::error::Failure::of(StorageOp::Open, error);
    if failure.kind == Kind::Other {
        failure.kind = Kind::Invalid;
    }
    failure.into_error(StorageOp::Open, None, "")
}

impl fmt::Debug for ObjectOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectOpener").field("opened", &self.opened.len()).finish()
    }
}

#[async_trait]
impl StorageOpener for ObjectOpener {
    async fn open(&self, request: &OpenRequest) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(Arc::new(self.open_now(request)?))
    }
}

#[cfg(test)]
mod tests;
