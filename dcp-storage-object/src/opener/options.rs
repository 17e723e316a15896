//! Settings by name: those of this crate, and those of `object_store`.

use std::time::Duration;

use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;

use super::invalid;
use crate::storage::ObjectStorageBuilder;

/// A setting of [`ObjectStorageBuilder`], which is a number.
type Tune = fn(ObjectStorageBuilder, u64) -> ObjectStorageBuilder;

/// The settings of this crate. Lengths are in bytes, times in seconds unless their name says
/// otherwise.
const TUNES: &[(&str, Tune)] = &[
    ("coalesce_gap", ObjectStorageBuilder::coalesce_gap),
    ("request_bytes", ObjectStorageBuilder::request_bytes),
    ("parallelism", |builder, number| {
        builder.parallelism(u16::try_from(number).unwrap_or(u16::MAX))
    }),
    ("bytes_in_flight", ObjectStorageBuilder::bytes_in_flight),
    ("part_bytes", ObjectStorageBuilder::part_bytes),
    ("deadline", |builder, seconds| builder.deadline(Duration::from_secs(seconds))),
    ("attempts_max", |builder, number| {
        builder.attempts_max(u32::try_from(number).unwrap_or(u32::MAX))
    }),
    ("hedge_after_ms", |builder, time| builder.hedge_after(Duration::from_millis(time))),
    ("stall_timeout", |builder, seconds| builder.stall_timeout(Duration::from_secs(seconds))),
];

/// Names of `object_store`, to suggest. Each provider has more, which it accepts too.
const NAMES: &[&str] = &[
    "allow_http",
    "connect_timeout",
    "pool_max_idle_per_host",
    "proxy_url",
    "read_timeout",
    "timeout",
    "user_agent",
    #[cfg(feature = "s3")]
    super::aws_profile::OPTION,
    #[cfg(feature = "s3")]
    "aws_access_key_id",
    #[cfg(feature = "s3")]
    "aws_secret_access_key",
    #[cfg(feature = "s3")]
    "aws_session_token",
    #[cfg(feature = "s3")]
    "aws_region",
    #[cfg(feature = "s3")]
    "aws_endpoint",
    #[cfg(feature = "s3")]
    "aws_virtual_hosted_style_request",
    #[cfg(feature = "s3")]
    "aws_conditional_put",
    #[cfg(feature = "s3")]
    "aws_skip_signature",
    #[cfg(feature = "s3")]
    "aws_unsigned_payload",
    #[cfg(feature = "s3")]
    "aws_checksum_algorithm",
    #[cfg(feature = "s3")]
    "aws_request_payer",
    #[cfg(feature = "s3")]
    "aws_disable_bulk_delete",
    #[cfg(feature = "s3")]
    "aws_server_side_encryption",
    #[cfg(feature = "gcs")]
    "google_service_account",
    #[cfg(feature = "gcs")]
    "google_service_account_key",
    #[cfg(feature = "gcs")]
    "google_application_credentials",
    #[cfg(feature = "gcs")]
    "google_bearer_token",
    #[cfg(feature = "gcs")]
    "google_base_url",
    #[cfg(feature = "gcs")]
    "google_skip_signature",
    #[cfg(feature = "azure")]
    "azure_storage_account_name",
    #[cfg(feature = "azure")]
    "azure_storage_account_key",
    #[cfg(feature = "azure")]
    "azure_storage_sas_token",
    #[cfg(feature = "azure")]
    "azure_client_id",
    #[cfg(feature = "azure")]
    "azure_client_secret",
    #[cfg(feature = "azure")]
    "azure_tenant_id",
    #[cfg(feature = "azure")]
    "azure_endpoint",
    #[cfg(feature = "azure")]
    "azure_use_azure_cli",
    #[cfg(feature = "azure")]
    "azure_skip_signature",
];

/// Checks that a provider of this build has a setting, or returns similar names. A setting of
/// another provider is right: a job reads from one and writes to another.
pub(super) fn check_name(name: &str) -> Result<(), Vec<&'static str>> {
    if is_known(name) { Ok(()) } else { Err(near(name)) }
}

fn is_known(name: &str) -> bool {
    let known = TUNES.iter().any(|(tune, _)| *tune == name);
    #[cfg(feature = "net")]
    let known = known || name.parse::<object_store::ClientConfigKey>().is_ok();
    #[cfg(feature = "s3")]
    let known = known
        || name == super::aws_profile::OPTION
        || name.parse::<object_store::aws::AmazonS3ConfigKey>().is_ok();
    #[cfg(feature = "gcs")]
    let known = known || name.parse::<object_store::gcp::GoogleConfigKey>().is_ok();
    #[cfg(feature = "azure")]
    let known = known || name.parse::<object_store::azure::AzureConfigKey>().is_ok();
    known
}

/// Applies the settings of this crate.
pub(super) fn tune(
    mut builder: ObjectStorageBuilder,
    options: &StorageOptions,
) -> Result<ObjectStorageBuilder, StorageError> {
    for (name, tune) in TUNES {
        let Some(value) = options.get(name) else { continue };
        let number = value.parse().map_err(|_| {
            invalid(format!("the storage option {name} is a number of bytes, seconds or requests"))
        })?;
        builder = tune(builder, number);
    }
    Ok(builder)
}

/// Known names that a mistyped one may mean, the nearest first.
fn near(name: &str) -> Vec<&'static str> {
    let known = TUNES.iter().map(|(name, _)| *name).chain(NAMES.iter().copied());
    let mut near = known
        .map(|known| (distance(name, known), known))
        .filter(|(distance, known)| *distance <= 3 || (name.len() > 3 && known.contains(name)))
        .collect::<Vec<_>>();
    near.sort_unstable();
    near.into_iter().map(|(_, known)| known).take(4).collect()
}

/// The number of characters to insert, remove or replace; the maximum for a long name, which is no typo.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 { usize::MAX } else { strsim::levenshtein(a, b) }
}

/// Options of connections that suit long transfers: no limit to the time of a whole request, which
/// has a deadline by its length.
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure", feature = "http"))]
pub(super) fn client() -> object_store::ClientOptions {
    object_store::ClientOptions::new().with_timeout_disabled().with_pool_max_idle_per_host(64)
}

/// The retries that `object_store` makes itself.
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure", feature = "http"))]
pub(super) fn retry() -> object_store::RetryConfig {
    object_store::RetryConfig::default()
}

/// Applies the environment variables with a prefix, and then the options, to the builder of a
/// provider and to the options of its connections. Those that the provider does not know are
/// skipped.
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
macro_rules! configure {
    ($builder:ident, $client:ident, $key:ident, $prefix:literal, $way:expr, $options:expr) => {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        for (name, value) in super::settings::merged($prefix, variables, $options, $way)? {
            match name.parse() {
                Ok($key::Client(key)) => $client = $client.with_config(key, value),
                Ok(key) => $builder = $builder.with_config(key, value),
                Err(_) => {}
            }
        }
    };
}
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
pub(super) use configure;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_of_a_mistyped_option_are_known() {
        assert_eq!(check_name("coalesce_gab").unwrap_err(), ["coalesce_gap"]);
        #[cfg(feature = "s3")]
        {
            assert!(check_name("aws_endpont").unwrap_err().contains(&"aws_endpoint"));
            check_name("aws_region").unwrap();
            check_name("aws_profile").unwrap();
        }
    }

    #[test]
    fn the_distance_counts_edits() {
        for (a, b, expected) in
            [("", "abc", 3), ("abc", "abc", 0), ("abd", "abc", 1), ("b", "abc", 2)]
        {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }
}
