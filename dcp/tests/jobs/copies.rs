//! Copies whose source or target is not what it seems.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::{ReadOutcome, ReadRequest};
use dcp_core::{Key, Storage, StorageError};
use dcp_jobs::copy::Comparing;
use dcp_jobs::{ErrorKind, Format};
use dcp_storage_fs::FsStorage;

/// Flips a bit of data files on the way to the reader.
#[derive(Debug)]
struct Flipping(FsStorage);

#[async_trait]
impl Storage for Flipping {
    dcp_core::forward_storage!(
        0: capabilities, stat, read_whole, put, start_upload, list, list_folder, delete, claim, leftovers,
        remove_empty_folders
    );

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let mut outcome = self.0.read(key, request).await?;
        if key.as_str().ends_with(".distcp") {
            for buffer in outcome.buffers.iter_mut().filter(|buffer| buffer.len() > 4096) {
                let middle = buffer.len() / 2;
                buffer[middle] ^= 1;
            }
        }
        Ok(outcome)
    }
}

fn storages() -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).open()?))
    });
    storages.register("flip", |request| {
        let path = request.url.trim_start_matches("flip://");
        Ok(Arc::new(Flipping(FsStorage::open(path)?)))
    });
    storages
}

#[tokio::test]
async fn a_byte_that_changes_on_the_way_is_found_by_the_checksums_of_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let opener = dcp::opener(storages());
    let fixture = dcp_testing::fixture("pytorch/fsdp2_adam_2r").display().to_string();
    let checkpoint = opener.open(&fixture).await.unwrap();
    checkpoint.convert(at("source")).to(Format::Dcp).run().await.unwrap();
    opener.copy(at("source"), at("good")).run().await.unwrap();

    let flipped = format!("flip://{}", at("source"));
    let error = opener.copy(&flipped, at("copy")).run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains("not a whole checkpoint"), "{error}");
    assert!(error.to_string().contains("__0_0.distcp"), "{error}");
    let quick = opener.copy(&flipped, at("quick")).compare(Comparing::Lengths).run().await;
    assert_eq!(quick.unwrap().kept_files, 0);
}
