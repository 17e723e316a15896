//! Opens storages by URL.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::storages::location::Location;
use crate::storages::storage::Storage;
use crate::text::Quoted;

/// The purpose of opening a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Reading; the location must exist.
    Read,
    /// Writing; the location is created if needed.
    Write,
}

type Locate = dyn Fn(&str) -> Vec<Location> + Send + Sync;
type KnowsOption = dyn Fn(&str) -> Result<(), Vec<&'static str>> + Send + Sync;
type Layer = dyn Fn(Arc<dyn Storage>, &OpenRequest) -> Arc<dyn Storage> + Send + Sync;

/// Settings of storages, such as credentials and endpoints, by name.
///
/// The names are those of the storage, for example `aws_region`. Values may be secrets: they are
/// not shown by `Debug`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StorageOptions(BTreeMap<String, String>);

impl StorageOptions {
    /// No settings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting, replacing an earlier one of that name.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.insert(name.into(), value.into());
        self
    }

    /// The value of a setting.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All settings, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl fmt::Debug for StorageOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for StorageOptions {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(options: I) -> Self {
        Self(options.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// A storage to open.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenRequest {
    /// The URL, or a plain path.
    pub url: String,
    /// The purpose.
    pub access: Access,
    /// Settings, of which an opener uses its own.
    pub options: StorageOptions,
}

impl OpenRequest {
    /// A storage with the settings of its environment.
    #[must_use]
    pub fn new(url: impl Into<String>, access: Access) -> Self {
        Self { url: url.into(), access, options: StorageOptions::new() }
    }

    /// The scheme of the URL; `file` for a plain path.
    #[must_use]
    pub fn scheme(&self) -> &str {
        self.url.split_once("://").map_or("file", |(scheme, _)| scheme)
    }

    /// Adds settings.
    #[must_use]
    pub fn with_options(mut self, options: StorageOptions) -> Self {
        self.options = options;
        self
    }
}

/// Opens the storages of a URL scheme. It lives as long as the registry, and may keep connections.
#[async_trait]
pub trait StorageOpener: Send + Sync + 'static {
    /// Opens a storage whose root is the location of the URL. Does no I/O beyond checking that the
    /// location is usable.
    ///
    /// # Errors
    ///
    /// [`Invalid`](StorageErrorKind::Invalid) for a URL that names no location, or a setting with
    /// an impossible value; those of the check.
    async fn open(&self, request: &OpenRequest) -> Result<Arc<dyn Storage>, StorageError>;
}

/// An opener that needs no I/O.
struct Immediate<F>(F);

#[async_trait]
impl<F> StorageOpener for Immediate<F>
where
    F: Fn(&OpenRequest) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync + 'static,
{
    async fn open(&self, request: &OpenRequest) -> Result<Arc<dyn Storage>, StorageError> {
        (self.0)(request)
    }
}

/// The storage of each URL scheme.
///
/// A plug-in registers its scheme; its URLs then work wherever the registry is used:
///
/// ```
/// # use dcp_core::{StorageError, StorageErrorKind};
/// # use dcp_core::error::StorageOp;
/// # use dcp_core::registry::{Access, StorageRegistry};
/// # async fn example() {
/// let mut storages = StorageRegistry::empty();
/// storages.register("tape", |request| {
///     Err(StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None)
///         .with_message(format!("no tape drive for {}", request.url)))
/// });
/// assert!(storages.open("tape://7/run", Access::Read).await.is_err());
/// # }
/// ```
#[derive(Clone)]
pub struct StorageRegistry {
    openers: BTreeMap<String, Arc<dyn StorageOpener>>,
    locators: BTreeMap<String, Arc<Locate>>,
    options: StorageOptions,
    known_options: Vec<Arc<KnowsOption>>,
    /// Layers, innermost first.
    layers: Vec<Arc<Layer>>,
}

impl StorageRegistry {
    /// A registry without schemes.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            openers: BTreeMap::new(),
            locators: BTreeMap::new(),
            options: StorageOptions::new(),
            known_options: Vec::new(),
            layers: Vec::new(),
        }
    }

    /// Registers a function that opens URLs of `scheme` without I/O, replacing an earlier opener.
    pub fn register<F>(&mut self, scheme: impl Into<String>, opener: F)
    where
        F: Fn(&OpenRequest) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync + 'static,
    {
        self.register_opener(scheme, Arc::new(Immediate(opener)));
    }

    /// Registers the opener of URLs of `scheme`, replacing an earlier one. One opener may serve
    /// several schemes.
    pub fn register_opener(&mut self, scheme: impl Into<String>, opener: Arc<dyn StorageOpener>) {
        self.openers.insert(scheme.into(), opener);
    }

    /// Sets the options that every opener receives.
    #[must_use]
    pub fn options(mut self, options: StorageOptions) -> Self {
        self.options = options;
        self
    }

    /// Registers the settings of the openers of a crate. `check` returns, for any other name, names of
    /// its own that a mistyped one may mean. From then on, [`open`](Self::open) refuses a setting that
    /// no crate has, whatever the URL.
    ///
    /// ```
    /// # use dcp_core::registry::StorageRegistry;
    /// # let mut storages = StorageRegistry::empty();
    /// storages.register_options(|name| match name {
    ///     "tape_drive" => Ok(()),
    ///     _ => Err(vec!["tape_drive"]),
    /// });
    /// ```
    pub fn register_options<F>(&mut self, check: F)
    where
        F: Fn(&str) -> Result<(), Vec<&'static str>> + Send + Sync + 'static,
    {
        self.known_options.push(Arc::new(check));
    }

    /// Refuses a setting of no opener, as [`open`](Self::open) does.
    ///
    /// # Errors
    ///
    /// [`Invalid`](StorageErrorKind::Invalid) for such a setting.
    pub fn check_options(&self) -> Result<(), StorageError> {
        if self.known_options.is_empty() {
            return Ok(());
        }
        for (name, _) in self.options.iter() {
            let known: Result<Vec<_>, ()> =
                self.known_options.iter().map(|check| check(name).err().ok_or(())).collect();
            let Ok(near) = known else { continue };
            let near = near.concat().join(", ");
            let near = if near.is_empty() { near } else { format!("; near names: {near}") };
            let message = format!("there is no storage option {}{near}", Quoted(name));
            return Err(StorageError::new(StorageErrorKind::Invalid, StorageOp::Open, None)
                .with_message(message));
        }
        Ok(())
    }

    /// Lets `locator` say which places a URL of `scheme` names, so that a job refuses to write into
    /// what it reads. Without one, URLs of the scheme are places of their own: equal where their
    /// segments are. A scheme whose URLs name a place in several ways, such as by an endpoint or a
    /// link, needs one.
    ///
    /// ```
    /// # use dcp_core::registry::StorageRegistry;
    /// # use dcp_core::location::Location;
    /// let mut storages = StorageRegistry::empty();
    /// // `backup://x` is the bucket that `s3://backup/x` names.
    /// storages.register_locator("backup", |url| {
    ///     let path = url.trim_start_matches("backup://");
    ///     Location::of_url(&format!("s3://backup/{path}")).into_iter().collect()
    /// });
    /// let found = storages.locate("backup://run/step1").unwrap();
    /// assert!(found[0].is_in(&Location::of_url("s3://backup/run/").unwrap()));
    /// ```
    pub fn register_locator<F>(&mut self, scheme: impl Into<String>, locator: F)
    where
        F: Fn(&str) -> Vec<Location> + Send + Sync + 'static,
    {
        self.locators.insert(scheme.into(), Arc::new(locator));
    }

    /// The places that a URL names, where a locator is registered for its scheme; several where the
    /// storage has links.
    #[must_use]
    pub fn locate(&self, url: &str) -> Option<Vec<Location>> {
        let scheme = url.split_once("://").map_or("file", |(scheme, _)| scheme);
        self.locators.get(scheme).map(|locate| locate(url))
    }

    /// Wraps every storage that the registry opens with `layer`: a cache, a counter, or the faults
    /// of a test.
    #[must_use]
    pub fn layer<F>(mut self, layer: F) -> Self
    where
        F: Fn(Arc<dyn Storage>, &OpenRequest) -> Arc<dyn Storage> + Send + Sync + 'static,
    {
        self.layers.push(Arc::new(layer));
        self
    }

    /// Opens the storage of a URL; a plain path has the scheme `file`.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](StorageErrorKind::Unsupported) for an unregistered scheme;
    /// [`Invalid`](StorageErrorKind::Invalid) for a setting of no opener, where openers
    /// have said what they know; errors of the opener.
    pub async fn open(&self, url: &str, access: Access) -> Result<Arc<dyn Storage>, StorageError> {
        self.check_options()?;
        let scheme = url.split_once("://").map_or("file", |(scheme, _)| scheme);
        let opener = self.openers.get(scheme).ok_or_else(|| {
            let known = self.openers.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None).with_message(
                format!("{scheme:?} is not one of the schemes of this build: {known}"),
            )
        })?;
        let request = OpenRequest::new(url, access).with_options(self.options.clone());
        let storage = opener.open(&request).await?;
        Ok(self.layers.iter().fold(storage, |storage, layer| layer(storage, &request)))
    }
}

impl fmt::Debug for StorageRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.openers.keys()).finish()
    }
}
