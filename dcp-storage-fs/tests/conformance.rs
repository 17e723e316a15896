//! The suite for storages, on a temporary folder.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::{run, storage};
use dcp_storage_fs::FsStorage;

fn main() -> ExitCode {
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => panic!("cannot make a temporary folder: {error}"),
    };
    let subject = |name: &str| FsStorage::builder(folder.path().join(name)).create(true);
    let mut trials = Vec::new();
    for (name, builder) in [
        ("fs", subject("fs")),
        ("fs_without_sync", subject("fs_without_sync").sync(false)),
        ("fs_following_links", subject("fs_following_links").follow_links(true).sync(false)),
    ] {
        trials.extend(storage::trials(name, || async move {
            match builder.open() {
                Ok(storage) => Arc::new(storage) as _,
                Err(error) => panic!("{error}"),
            }
        }));
    }
    run(trials)
}
