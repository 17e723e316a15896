//! Google Cloud Storage.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Method};
use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{CopyOptions, Error, ObjectStore, Result};

use super::settings::{self, Way};
use super::uploads::{UploadRequests, XmlUploads};
use super::{Opened, cannot_connect, options};
use crate::native::Replacement;
use crate::service::{Condition, Connector, with_condition};

/// The name of the store in errors.
const STORE: &str = "GCS";

pub(super) fn connect(bucket: &str, given: &StorageOptions) -> Result<Opened, StorageError> {
    let mut builder = GoogleCloudStorageBuilder::new();
    let has_way = given.iter().any(|(name, _)| way(name).is_some_and(|way| way.is_whole));
    if let Some(path) = std::env::var("SERVICE_ACCOUNT").ok().filter(|_| !has_way) {
        builder = builder.with_service_account_path(path);
    }
    // The server that a virtual machine has its identity from has no TLS.
    let mut client = options::client().with_allow_http(true);
    options::configure!(builder, client, GoogleConfigKey, "GOOGLE_", way, given);
    let key = GoogleConfigKey::BaseUrl;
    settings::check_url(key.as_ref(), builder.get_config_value(&key))?;
    let is_anonymous = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let is_anonymous = is_anonymous.as_deref() == Some("true");
    let address = format!("{}/{}", base_url(&builder), bucket);
    let http = Connector.connect(&client).map_err(|error| cannot_connect(&error))?;
    let store = builder
        .with_bucket_name(bucket)
        .with_client_options(client)
        .with_retry(options::retry())
        .with_http_connector(Connector)
        .build()
        .map_err(|error| cannot_connect(&error))?;
    let replacement: Arc<dyn Replacement> = Arc::new(GcsReplacement(store.clone()));
    let requests = Box::new(Requests { store: store.clone(), address, is_anonymous });
    let open_uploads = XmlUploads { store: Arc::new(store.clone()), requests, http, name: STORE };
    Ok(Opened {
        replacement: Some(replacement),
        open_uploads: Some(Arc::new(open_uploads)),
        ..Opened::new(store)
    })
}

/// The ways to have credentials.
fn way(name: &str) -> Option<Way> {
    Some(match name.parse().ok()? {
        GoogleConfigKey::BearerToken => Way::whole("token"),
        GoogleConfigKey::ServiceAccount => Way::whole("file of a service account"),
        GoogleConfigKey::ServiceAccountKey => Way::whole("key of a service account"),
        GoogleConfigKey::ApplicationCredentials => Way::whole("application credentials"),
        GoogleConfigKey::SkipSignature => Way::part("none"),
        _ => return None,
    })
}

/// The address to which `object_store` sends its requests: the one that is set, that of the service
/// account, as emulators have it, or Google's.
fn base_url(builder: &GoogleCloudStorageBuilder) -> String {
    let of_account = || {
        let key = builder.get_config_value(&GoogleConfigKey::ServiceAccountKey)?;
        let key = serde_json::from_str::<serde_json::Value>(&key).ok()?;
        Some(key.get("gcs_base_url")?.as_str()?.to_owned())
    };
    let given = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    given.or_else(of_account).unwrap_or_else(|| "https://storage.googleapis.com".to_owned())
}

/// Requests for the open uploads of a bucket, with the token of the store.
#[derive(Debug)]
struct Requests {
    store: GoogleCloudStorage,
    /// Of the bucket.
    address: String,
    is_anonymous: bool,
}

#[async_trait]
impl UploadRequests for Requests {
    async fn request(&self, query: &[(&str, &str)]) -> Result<HttpRequest> {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = format!("{}?{query}", self.address)
            .parse()
            .map_err(|error| Error::Generic { store: STORE, source: Box::new(error) })?;
        if !self.is_anonymous {
            let credential = self.store.credentials().get_credential().await?;
            if !credential.bearer.is_empty() {
                let value = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
                let mut value = value
                    .map_err(|error| Error::Generic { store: STORE, source: Box::new(error) })?;
                value.set_sensitive(true);
                request.headers_mut().insert(AUTHORIZATION, value);
            }
        }
        Ok(request)
    }
}

/// A copy with `x-goog-if-generation-match`, which is about the object that is replaced.
#[derive(Debug)]
struct GcsReplacement(GoogleCloudStorage);

#[async_trait]
impl Replacement for GcsReplacement {
    async fn replace(&self, from: &Path, to: &Path, generation: &str) -> Result<()> {
        let value = HeaderValue::from_str(generation)
            .map_err(|error| Error::Generic { store: STORE, source: Box::new(error) })?;
        let name = HeaderName::from_static("x-goog-if-generation-match");
        let applies = |request: &HttpRequest| {
            request.method() == Method::PUT && request.headers().contains_key("x-goog-copy-source")
        };
        let condition = Condition { name, value, applies, sign: None };
        with_condition(condition, self.0.copy_opts(from, to, CopyOptions::new())).await
    }
}
