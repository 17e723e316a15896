//! Web servers, for reading.

use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;
use object_store::ClientConfigKey;
use object_store::http::HttpBuilder;

use super::{Opened, cannot_connect, options, settings};
use crate::service::Connector;

pub(super) fn connect(url: &str, given: &StorageOptions) -> Result<Opened, StorageError> {
    let mut client = options::client().with_allow_http(url.starts_with("http://"));
    for (name, value) in settings::merged("", std::iter::empty(), given, |_| None)? {
        if let Ok(key) = name.parse::<ClientConfigKey>() {
            client = client.with_config(key, value);
        }
    }
    let store = HttpBuilder::new()
        .with_url(without_last_slash(url))
        .with_client_options(client)
        .with_retry(options::retry())
        .with_http_connector(Connector)
        .build()
        .map_err(|error| cannot_connect(&error))?;
    Ok(Opened::new(store))
}

/// The URL without slashes at the end of its path, behind which keys are appended.
fn without_last_slash(url: &str) -> String {
    let (path, rest) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    format!("{}{rest}", path.trim_end_matches('/'))
}
