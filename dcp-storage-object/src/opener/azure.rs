//! Azure Blob Storage.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;
use dcp_core::storage::PutMode;
use http::header::{AUTHORIZATION, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderValue, Method};
use object_store::azure::{
    AzureAuthorizer, AzureConfigKey, AzureCredential, MicrosoftAzure, MicrosoftAzureBuilder,
};
use object_store::client::HttpRequest;
use object_store::{Error, MultipartUpload, PutResult, Result};

use super::settings::{self, Way};
use super::{Opened, cannot_connect, options};
use crate::native::Completion;
use crate::service::{Condition, Connector, with_condition};

/// Variables by which a machine with an identity says where to get it.
const IDENTITY_ENDPOINT: &str = "IDENTITY_ENDPOINT";

pub(super) fn connect(container: &str, given: &StorageOptions) -> Result<Opened, StorageError> {
    let mut builder = MicrosoftAzureBuilder::new();
    if let Ok(endpoint) = std::env::var(IDENTITY_ENDPOINT) {
        builder = builder.with_msi_endpoint(endpoint);
    }
    let mut client = options::client();
    options::configure!(builder, client, AzureConfigKey, "AZURE_", way, given);
    for key in
        [AzureConfigKey::Endpoint, AzureConfigKey::MsiEndpoint, AzureConfigKey::AuthorityHost]
    {
        settings::check_url(key.as_ref(), builder.get_config_value(&key))?;
    }
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        client = client.with_allow_http(true);
    }
    builder = match container.split_once('@') {
        Some((_, host)) => {
            let account = host.split('.').next().unwrap_or_default();
            builder.with_account(account).with_url(format!("abfss://{container}/"))
        }
        None => builder.with_container_name(container),
    };
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let skip = builder.get_config_value(&AzureConfigKey::SkipSignature);
    let store = builder
        .with_client_options(client)
        .with_retry(options::retry())
        .with_http_connector(Connector)
        .build()
        .map_err(|error| cannot_connect(&error))?;
    let is_signed = skip.as_deref() != Some("true");
    let completion = AzureCompletion { store: store.clone(), account, is_signed };
    Ok(Opened {
        store: Arc::new(store),
        completion: Some(Arc::new(completion)),
        replacement: None,
        open_uploads: None,
        conditional_writes: true,
    })
}

/// The ways to have credentials. The client of an application has its identifier in most of them.
fn way(name: &str) -> Option<Way> {
    Some(match name.parse().ok()? {
        AzureConfigKey::Token => Way::whole("token"),
        AzureConfigKey::AccessKey => Way::whole("account key"),
        AzureConfigKey::FederatedTokenFile => Way::whole("workload identity"),
        AzureConfigKey::ClientSecret => Way::whole("client secret"),
        AzureConfigKey::SasKey => Way::whole("shared access signature"),
        AzureConfigKey::UseAzureCli => Way::part("Azure CLI"),
        AzureConfigKey::SkipSignature => Way::part("none"),
        _ => return None,
    })
}

/// The writing of a block list with `If-None-Match` or `If-Match`, which the signature of an
/// account key covers.
#[derive(Debug)]
struct AzureCompletion {
    store: MicrosoftAzure,
    account: String,
    is_signed: bool,
}

#[async_trait]
impl Completion for AzureCompletion {
    async fn complete(
        &self,
        upload: &mut dyn MultipartUpload,
        mode: &PutMode,
    ) -> Result<PutResult> {
        let (name, value) = match mode {
            PutMode::Update(version) => (IF_MATCH, HeaderValue::from_str(version.as_str())),
            _ => (IF_NONE_MATCH, Ok(HeaderValue::from_static("*"))),
        };
        let value = value
            .map_err(|error| Error::Generic { store: "MicrosoftAzure", source: Box::new(error) })?;
        let applies = |request: &HttpRequest| {
            let query = request.uri().query().unwrap_or_default();
            request.method() == Method::PUT && query.contains("comp=blocklist")
        };
        let mut condition = Condition { name, value, applies, sign: None };
        if self.is_signed {
            let credential = self.store.credentials().get_credential().await?;
            if matches!(*credential, AzureCredential::AccessKey(_)) {
                let account = self.account.clone();
                condition.sign = Some(Box::new(move |request| {
                    request.headers_mut().remove(AUTHORIZATION);
                    AzureAuthorizer::new(&credential, &account).try_authorize(request)
                }));
            }
        }
        with_condition(condition, upload.complete()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `object_store` takes an account key before a signature.
    #[test]
    fn every_way_to_have_credentials_replaces_those_of_variables() {
        let secrets = [
            "azure_storage_token",
            "azure_storage_account_key",
            "azure_federated_token_file",
            "azure_client_secret",
            "azure_storage_sas_token",
        ];
        for option in secrets {
            let variables =
                secrets.map(|name| (name.to_ascii_uppercase(), "of a variable".to_owned()));
            let options = StorageOptions::new().with(option, "of the option");
            let merged = settings::merged("AZURE_", variables.into_iter(), &options, way).unwrap();
            let names = merged.iter().map(|(name, _)| name.as_str());
            assert!(
                names.clone().all(|name| name == option),
                "{option}: {:?}",
                names.collect::<Vec<_>>()
            );
            assert_eq!(merged.last().unwrap().1, "of the option");
        }
    }
}
