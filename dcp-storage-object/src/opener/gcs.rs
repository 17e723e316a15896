//! Google Cloud Storage.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;
use http::{HeaderName, HeaderValue, Method};
use object_store::client::HttpRequest;
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{CopyOptions, Error, ObjectStore, Result};

use super::{Opened, cannot_connect, options};
use crate::native::Replacement;
use crate::service::{Condition, Connector, with_condition};

pub(super) fn connect(bucket: &str, settings: &StorageOptions) -> Result<Opened, StorageError> {
    let mut builder = GoogleCloudStorageBuilder::new();
    if let Ok(path) = std::env::var("SERVICE_ACCOUNT") {
        builder = builder.with_service_account_path(path);
    }
    // The server that a virtual machine has its identity from has no TLS.
    let mut client = options::client().with_allow_http(true);
    options::configure!(builder, client, GoogleConfigKey, "GOOGLE_", settings);
    let store = builder
        .with_bucket_name(bucket)
        .with_client_options(client)
        .with_retry(options::retry())
        .with_http_connector(Connector)
        .build()
        .map_err(|error| cannot_connect(&error))?;
    let replacement: Arc<dyn Replacement> = Arc::new(GcsReplacement(store.clone()));
    Ok(Opened { replacement: Some(replacement), ..Opened::new(store) })
}

/// A copy with `x-goog-if-generation-match`, which is about the object that is replaced.
#[derive(Debug)]
struct GcsReplacement(GoogleCloudStorage);

#[async_trait]
impl Replacement for GcsReplacement {
    async fn replace(&self, from: &Path, to: &Path, generation: &str) -> Result<()> {
        let value = HeaderValue::from_str(generation)
            .map_err(|error| Error::Generic { store: "GCS", source: Box::new(error) })?;
        let name = HeaderName::from_static("x-goog-if-generation-match");
        let applies = |request: &HttpRequest| {
            request.method() == Method::PUT && request.headers().contains_key("x-goog-copy-source")
        };
        let condition = Condition { name, value, applies, sign: None };
        with_condition(condition, self.0.copy_opts(from, to, CopyOptions::new())).await
    }
}
