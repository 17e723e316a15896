//! Amazon S3 and stores that speak its protocol.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;
use dcp_core::storage::PutMode;
use http::header::{IF_MATCH, IF_NONE_MATCH};
use http::{HeaderValue, Method};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey as S3Key};
use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{Error, MultipartUpload, PutResult, Result};

use super::aws_profile::{self, Profile, Surroundings};
use super::settings::{self, Way};
use super::uploads::{UploadRequests, XmlUploads};
use super::{Opened, cannot_connect, invalid, options};
use crate::native::Completion;
use crate::service::{Condition, Connector, with_condition};

pub(super) fn connect(bucket: &str, given: &StorageOptions) -> Result<Opened, StorageError> {
    let mut builder = AmazonS3Builder::new();
    let mut client = options::client();
    options::configure!(builder, client, S3Key, "AWS_", way, given);
    let builder = with_profile(builder, given, &Surroundings::of_process())?;
    check(&builder)?;
    let endpoint = [S3Key::S3Endpoint, S3Key::Endpoint];
    let endpoint = endpoint.iter().find_map(|key| builder.get_config_value(key));
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        client = client.with_allow_http(true);
    }
    let conditional = builder.get_config_value(&S3Key::ConditionalPut);
    let conditional_writes = conditional.is_none_or(|mode| mode != "disabled");
    let store = builder
        .with_bucket_name(bucket)
        .with_client_options(client.clone())
        .with_retry(options::retry())
        .with_http_connector(Connector)
        .build()
        .map_err(|error| cannot_connect(&error))?;
    let http = Connector.connect(&client).map_err(|error| cannot_connect(&error))?;
    let completion: Option<Arc<dyn Completion>> = match conditional_writes {
        true => Some(Arc::new(S3Completion)),
        false => None,
    };
    let requests = Box::new(SignedRequests(store.clone()));
    let open_uploads = XmlUploads { store: Arc::new(store.clone()), requests, http, name: "S3" };
    Ok(Opened {
        store: Arc::new(store),
        completion,
        replacement: None,
        open_uploads: Some(Arc::new(open_uploads)),
        conditional_writes,
    })
}

/// The ways to have credentials. A session token belongs to the keys beside it.
fn way(name: &str) -> Option<Way> {
    Some(match name.parse().ok()? {
        S3Key::AccessKeyId | S3Key::SecretAccessKey => Way::whole("keys"),
        S3Key::Token => Way::part("session"),
        S3Key::WebIdentityTokenFile | S3Key::RoleArn => Way::whole("web identity"),
        S3Key::ContainerCredentialsRelativeUri => Way::whole("task"),
        S3Key::ContainerCredentialsFullUri | S3Key::ContainerAuthorizationTokenFile => {
            Way::whole("pod")
        }
        S3Key::SkipSignature => Way::part("none"),
        _ => return None,
    })
}

/// Checks the settings that addresses of requests are made of.
fn check(builder: &AmazonS3Builder) -> Result<(), StorageError> {
    for key in [
        S3Key::Endpoint,
        S3Key::S3Endpoint,
        S3Key::StsEndpoint,
        S3Key::MetadataEndpoint,
        S3Key::ContainerCredentialsFullUri,
    ] {
        settings::check_url(key.as_ref(), builder.get_config_value(&key))?;
    }
    let key = S3Key::ContainerCredentialsRelativeUri;
    let task = builder.get_config_value(&key).map(|path| format!("http://169.254.170.2{path}"));
    settings::check_url(key.as_ref(), task)?;
    for key in [S3Key::Region, S3Key::DefaultRegion] {
        let region = builder.get_config_value(&key).unwrap_or_default();
        if !region.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')) {
            return Err(invalid(format!(
                "the setting {} is no name of a region, which has letters, digits and hyphens",
                key.as_ref()
            )));
        }
    }
    Ok(())
}

/// Adds what variables and settings do not say from the profile of AWS's programs. A profile that a
/// setting names has precedence over keys in variables.
fn with_profile(
    mut builder: AmazonS3Builder,
    settings: &StorageOptions,
    around: &Surroundings<'_>,
) -> Result<AmazonS3Builder, StorageError> {
    let named = settings.get(aws_profile::OPTION);
    let has = |builder: &AmazonS3Builder, keys: &[S3Key]| {
        keys.iter().any(|key| builder.get_config_value(key).is_some())
    };
    let is_anonymous = builder.get_config_value(&S3Key::SkipSignature);
    let is_anonymous = is_anonymous.is_some_and(|skip| skip.eq_ignore_ascii_case("true"));
    let is_key = |name: &str| {
        matches!(name.parse(), Ok(S3Key::AccessKeyId | S3Key::SecretAccessKey | S3Key::Token))
    };
    let by_settings = settings.iter().any(|(name, _)| is_key(name));
    let has_keys = by_settings
        || is_anonymous
        || (named.is_none() && has(&builder, &[S3Key::AccessKeyId, S3Key::SecretAccessKey]));
    let has_region = has(&builder, &[S3Key::Region, S3Key::DefaultRegion]);
    let has_endpoint = has(&builder, &[S3Key::Endpoint, S3Key::S3Endpoint]);
    if has_keys && has_region && has_endpoint {
        return Ok(builder);
    }
    let Some(profile) = Profile::find(named, around)? else { return Ok(builder) };
    let checked = |name: &'static str, value: String| {
        settings::checked(name, value, || format!("the property {name} of the AWS profile"))
    };
    if let Some(keys) = (!has_keys).then(|| profile.keys()).transpose()?.flatten() {
        builder = builder
            .with_access_key_id(checked("aws_access_key_id", keys.id)?)
            .with_secret_access_key(checked("aws_secret_access_key", keys.secret)?);
        builder = match keys.token {
            Some(token) => builder.with_token(checked("aws_session_token", token)?),
            None if has(&builder, &[S3Key::Token]) => {
                let message =
                    "AWS_SESSION_TOKEN does not belong to the keys of the profile: unset it";
                return Err(invalid(message));
            }
            None => builder,
        };
    }
    if let Some(region) = profile.region().filter(|_| !has_region) {
        builder = builder.with_region(checked("region", region.to_owned())?);
    }
    let ignored = (around.variable)("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");
    let is_ignored = ignored.is_some_and(|ignored| ignored.eq_ignore_ascii_case("true"));
    if let Some(endpoint) = profile.endpoint().filter(|_| !has_endpoint && !is_ignored) {
        builder = builder.with_endpoint(checked("endpoint_url", endpoint.to_owned())?);
    }
    Ok(builder)
}

/// The completion of a multipart upload with `If-None-Match` or `If-Match`, which the signature
/// does not cover.
#[derive(Debug)]
struct S3Completion;

#[async_trait]
impl Completion for S3Completion {
    async fn complete(
        &self,
        upload: &mut dyn MultipartUpload,
        mode: &PutMode,
    ) -> Result<PutResult> {
        let (name, value) = match mode {
            PutMode::Update(version) => (IF_MATCH, HeaderValue::from_str(version.as_str())),
            _ => (IF_NONE_MATCH, Ok(HeaderValue::from_static("*"))),
        };
        let value = value.map_err(|error| failed(error.to_string()))?;
        let applies = |request: &HttpRequest| {
            let query = request.uri().query().unwrap_or_default();
            request.method() == Method::POST && query.contains("uploadId=")
        };
        let condition = Condition { name, value, applies, sign: None };
        with_condition(condition, upload.complete()).await
    }
}

/// Requests for the open uploads of a bucket, whose address has the signature.
#[derive(Debug)]
struct SignedRequests(AmazonS3);

#[async_trait]
impl UploadRequests for SignedRequests {
    async fn request(&self, query: &[(&str, &str)]) -> Result<HttpRequest> {
        let signed = SignedUrlOptions::new().with_query(query.iter().copied());
        let expires = Duration::from_secs(300);
        let url = self.0.signed_url_opts(Method::GET, &Path::ROOT, expires, &signed).await?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() =
            String::from(url).parse().map_err(|_| failed("the address of the bucket is no URI"))?;
        Ok(request)
    }
}

fn failed(message: impl Into<String>) -> Error {
    Error::Generic { store: "S3", source: message.into().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_adds_what_nothing_else_says() {
        let file = b"[default]\naws_access_key_id=ID\naws_secret_access_key=5ec7e7\nregion=r\n\
            [x]\naws_access_key_id=X\naws_secret_access_key=5ec7e7\nendpoint_url=http://x\n";
        let variable = |name: &str| (name == "HOME").then(|| "/home".to_owned());
        let around = Surroundings { variable: &variable, file: &|_| Ok(Some(file.to_vec())) };
        let with = |builder: AmazonS3Builder, options: StorageOptions| {
            let found = with_profile(builder, &options, &around).unwrap();
            [S3Key::AccessKeyId, S3Key::Region, S3Key::Endpoint]
                .map(|key| found.get_config_value(&key).unwrap_or_default())
        };
        let none = StorageOptions::new;
        let keys = |builder: AmazonS3Builder| {
            builder.with_access_key_id("ENV").with_secret_access_key("5ec7e7")
        };
        let new = AmazonS3Builder::new;
        assert_eq!(with(new(), none()), ["ID", "r", ""]);
        assert_eq!(with(keys(new()), none()), ["ENV", "r", ""]);
        let named = none().with("aws_profile", "x");
        assert_eq!(with(keys(new()).with_region("e"), named.clone()), ["X", "e", "http://x"]);
        let given = named.with("aws_access_key_id", "ENV").with("aws_secret_access_key", "5ec7e7");
        assert_eq!(with(keys(new()).with_endpoint("http://e"), given), ["ENV", "", "http://e"]);
        assert_eq!(with(new().with_skip_signature(true), none()), ["", "r", ""]);
        let named = none().with("aws_profile", "x");
        let error = with_profile(new().with_token("5ec7e7"), &named, &around).unwrap_err();
        assert!(error.to_string().contains("AWS_SESSION_TOKEN"), "{error}");
    }

    #[test]
    fn a_property_of_a_profile_that_no_request_can_have_is_refused_by_name() {
        for (name, bad) in [
            ("aws_access_key_id", "5ec7\u{1}e7"),
            ("aws_secret_access_key", "5ec7\u{7f}e7"),
            ("aws_session_token", "5ec7\u{e9}"),
            ("region", "5ec7\u{1}"),
            ("endpoint_url", "http://5ec7\u{1}"),
        ] {
            let file =
                format!("[default]\naws_access_key_id=ID\naws_secret_access_key=s\n{name}={bad}\n");
            let variable = |name: &str| (name == "HOME").then(|| "/home".to_owned());
            let file = move |_: &std::path::Path| Ok(Some(file.clone().into_bytes()));
            let around = Surroundings { variable: &variable, file: &file };
            let made = with_profile(AmazonS3Builder::new(), &StorageOptions::new(), &around);
            let error = made.unwrap_err().to_string();
            assert!(error.contains(name) && !error.contains("5ec7"), "{error}");
        }
    }

    #[test]
    fn settings_that_make_no_address_are_refused_by_name() {
        for (key, bad) in [
            (S3Key::Region, "a b"),
            (S3Key::DefaultRegion, "a/b"),
            (S3Key::Endpoint, "localhost:9000"),
            (S3Key::S3Endpoint, "http://a b"),
            (S3Key::StsEndpoint, "ftp://a"),
            (S3Key::MetadataEndpoint, "http://%zz/"),
            (S3Key::ContainerCredentialsRelativeUri, "@<>"),
        ] {
            let error = check(&AmazonS3Builder::new().with_config(key, bad)).unwrap_err();
            // The default region is that of the builder.
            let name = if key == S3Key::DefaultRegion { "region" } else { key.as_ref() };
            assert!(error.to_string().contains(name), "{error}");
        }
        check(&AmazonS3Builder::new().with_region("eu-west-1")).unwrap();
    }

    #[test]
    fn an_option_of_keys_replaces_a_session_and_an_identity_of_variables() {
        let variables = ["AWS_SESSION_TOKEN", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"];
        let variables = variables.map(|name| (name.to_owned(), "x".to_owned()));
        let options = StorageOptions::new()
            .with("aws_access_key_id", "ID")
            .with("aws_secret_access_key", "5ec7e7");
        let merged = settings::merged("AWS_", variables.into_iter(), &options, way).unwrap();
        assert_eq!(merged.len(), 2, "{merged:?}");
    }
}
