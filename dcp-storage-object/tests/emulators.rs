//! Every clause of `Storage`, on each object store that is on this machine. `cargo xtask emulators`
//! starts them; one that is not there is reported as ignored.

#![expect(clippy::unwrap_used, reason = "panicking is how a trial fails")]

#[path = "emulators/http.rs"]
mod http;
#[path = "emulators/leftovers.rs"]
mod leftovers;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp_conformance::storage::trials;
use dcp_core::Storage;
use dcp_core::registry::{Access, StorageOptions, StorageRegistry};
use libtest_mimic::{Completion, Trial};

/// The value of a variable that an emulator sets.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// An emulator: a URL in it that nobody uses, and the settings to reach it.
#[derive(Clone)]
struct Emulator {
    name: &'static str,
    url: String,
    options: StorageOptions,
}

impl Emulator {
    fn new(name: &'static str, scheme: &str, bucket: &str, options: StorageOptions) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let url = format!("{scheme}://{bucket}/test-{:x}-{now:x}", std::process::id());
        Self { name, url, options }
    }

    fn s3() -> Option<Self> {
        let options = StorageOptions::new()
            .with("aws_endpoint", variable("DCP_TEST_S3_ENDPOINT")?)
            .with("aws_region", "us-east-1")
            .with("aws_access_key_id", "test")
            .with("aws_secret_access_key", "test");
        Some(Self::new("s3", "s3", &variable("DCP_TEST_S3_BUCKET")?, options))
    }

    fn azure() -> Option<Self> {
        let account = variable("AZURE_STORAGE_ACCOUNT_NAME")?;
        let endpoint = format!("{}/{account}", variable("DCP_TEST_AZURE_ENDPOINT")?);
        let options = StorageOptions::new()
            .with("azure_endpoint", endpoint)
            .with("azure_storage_account_key", variable("AZURE_STORAGE_ACCOUNT_KEY")?)
            .with("azure_storage_account_name", account);
        Some(Self::new("azure", "az", &variable("DCP_TEST_AZURE_CONTAINER")?, options))
    }

    fn gcs() -> Option<Self> {
        let options = StorageOptions::new()
            .with("google_base_url", variable("DCP_TEST_GCS_ENDPOINT")?)
            .with("google_skip_signature", "true");
        Some(Self::new("gcs", "gs", &variable("DCP_TEST_GCS_BUCKET")?, options))
    }

    async fn open(&self) -> Arc<dyn Storage> {
        self.open_at(&self.url, self.options.clone()).await
    }

    async fn open_at(&self, url: &str, options: StorageOptions) -> Arc<dyn Storage> {
        let mut storages = StorageRegistry::empty();
        dcp_storage_object::register(&mut storages);
        storages.options(options).open(url, Access::Write).await.unwrap()
    }
}

/// A trial on a runtime of its own.
fn trial<F>(name: String, run: impl FnOnce() -> F + Send + 'static) -> Trial
where
    F: Future<Output = ()>,
{
    Trial::test(name, move || {
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(run());
        Ok(())
    })
}

/// What is reported of an emulator that is not there.
fn absent(name: &str) -> Trial {
    ignored(&format!("{name}::is_there"), "start it with: cargo xtask emulators run")
}

fn ignored(name: &str, reason: &'static str) -> Trial {
    Trial::ignorable_test(name, move || Ok(Completion::ignored_with(reason)))
}

/// Why an emulator cannot hold a clause that its original holds.
fn cannot_show(clause: &str) -> Option<&'static str> {
    match clause {
        "s3::leftovers_spare_objects_and_uploads" => Some("every upload of moto began in 2010"),
        _ => None,
    }
}

fn main() -> ExitCode {
    let mut all = Vec::new();
    let emulators =
        [("s3", Emulator::s3()), ("azure", Emulator::azure()), ("gcs", Emulator::gcs())];
    for (name, emulator) in emulators {
        let Some(emulator) = emulator else {
            all.push(absent(name));
            continue;
        };
        let opened = emulator.clone();
        let trials = trials(name, || async move { opened.open().await });
        all.extend(trials.into_iter().map(|trial| match cannot_show(trial.name()) {
            Some(reason) => ignored(trial.name(), reason),
            None => trial,
        }));
        all.extend(leftovers::trials(&emulator));
    }
    match (variable("DCP_TEST_HTTP_URL"), variable("DCP_TEST_HTTP_ROOT")) {
        (Some(url), Some(root)) => all.extend(http::trials(&url, &root)),
        _ => all.push(absent("http")),
    }
    dcp_conformance::run(all)
}
