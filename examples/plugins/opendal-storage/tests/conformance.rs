//! The suite for storages on two services.

use std::process::ExitCode;

use dcp_conformance::storage;
use dcp_core::Storage;
use dcp_core::registry::{Access, StorageRegistry};
use std::sync::Arc;

async fn open(url: String) -> Arc<dyn Storage> {
    let mut storages = StorageRegistry::empty();
    opendal_storage::register(&mut storages);
    storages.open(&url, Access::Write).await.unwrap()
}

fn main() -> ExitCode {
    // OpenDAL makes a client for every service. In one build with dcp's object stores, whose crate does
    // this when its schemes are registered, the client needs cryptography that the program chooses.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let on_disk = format!("opendal-fs://{}", folder.path().join("objects").display());
    let mut trials = storage::trials("opendal-memory", || open("opendal-memory://runs".to_owned()));
    trials.extend(storage::trials("opendal-fs", || open(on_disk)));
    dcp_conformance::run(trials)
}
