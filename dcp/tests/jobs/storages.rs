//! Checkpoints on storages that cannot list, that have no folders, and that change.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use dcp::plugins::default_formats;
use dcp_conformance::{MemoryStorage, WebStorage};
use dcp_core::error::error_chain;
use dcp_core::format::Subfolder;
use dcp_core::registry::StorageRegistry;
use dcp_core::storage::PutMode;
use dcp_core::{Key, Storage, StorageErrorKind, StorageReader as _};
use dcp_formats::dcp::DcpReader;
use dcp_jobs::ErrorKind;
use dcp_storage_fs::FsStorage;

/// Fixtures as `web://NAME`: files by name, and nothing else.
fn web() -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    storages.register("web", |request| {
        let path = dcp_testing::fixture(request.url.trim_start_matches("web://"));
        // A web server does not distinguish folders from missing names.
        let (root, folder) = match path.is_dir() {
            true => (path, None),
            false => (path.parent().unwrap().to_owned(), path.file_name()),
        };
        let storage: Arc<dyn Storage> = Arc::new(WebStorage::new(Arc::new(FsStorage::open(root)?)));
        Ok(match folder {
            Some(name) => {
                Arc::new(Subfolder::new(storage, Key::new(name.to_str().unwrap()).unwrap()))
            }
            None => storage,
        })
    });
    storages
}

fn local() -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| Ok(Arc::new(FsStorage::open(&request.url)?)));
    storages
}

#[tokio::test]
async fn what_cannot_be_listed_opens_by_the_files_that_formats_have() {
    for name in [
        "pytorch/fsdp2_adam_2r",
        "olmo/fsdp2-2rank-nested/ckpt",
        "hf/consolidated_index_4r/ckpt",
        "hf/consolidated_index_4r/ckpt/model.safetensors.index.json",
        "megatron/gpt_tp2pp2_swiglu/ckpt",
    ] {
        let path = dcp_testing::fixture(name).display().to_string();
        let expected = dcp::opener(local()).open(&path).await;
        let found = dcp::opener(web()).open(&format!("web://{name}")).await;
        match (expected, found) {
            (Ok(expected), Ok(found)) => {
                let [expected, found] =
                    [expected.source().metadata().await, found.source().metadata().await];
                let (expected, found) = (expected.unwrap(), found.unwrap());
                assert_eq!(expected.len(), found.len(), "{name}");
            }
            (expected, found) => panic!("{name}: {:?} {:?}", expected.err(), found.err()),
        }
    }
}

#[tokio::test]
async fn a_listing_of_what_cannot_be_listed_says_so() {
    let error = dcp::opener(web()).list("web://megatron/run_torch_dist_dp2").await.unwrap_err();
    let text = error_chain(&error);
    assert!(text.contains("cannot list") && text.contains("web server"), "{text}");
    let error = dcp::opener(web()).open("web://olmo").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error_chain(&error));
}

/// A bucket opens any prefix, also one that is the name of an object.
#[tokio::test]
async fn one_file_in_a_bucket_opens() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let bytes = fs::read(dcp_testing::fixture("hf/rank0/expected.safetensors")).unwrap();
    let key = Key::new("run/model.safetensors").unwrap();
    memory.put(&key, bytes.into(), PutMode::Create).await.unwrap();
    let mut storages = StorageRegistry::empty();
    storages.register("mem", move |request| {
        let folder = request.url.trim_start_matches("mem://");
        Ok(Arc::new(Subfolder::new(Arc::clone(&memory), Key::new(folder).unwrap())))
    });
    let opened = dcp::opener(storages).open("mem://run/model.safetensors").await.unwrap();
    assert!(!opened.source().metadata().await.unwrap().is_empty());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// On a file system, too, other bytes of a file are not mixed with those of before.
#[tokio::test]
async fn a_file_that_is_replaced_while_a_checkpoint_is_open_is_named() {
    let folder = tempfile::tempdir().unwrap();
    copy(&dcp_testing::fixture("pytorch/t21_plain"), folder.path());
    let data = folder.path().join("__0_0.distcp");
    let storage: Arc<dyn Storage> = Arc::new(FsStorage::open(folder.path()).unwrap());
    let place = default_formats().look(&storage).await.unwrap();
    let key = Key::new("__0_0.distcp").unwrap();
    let read = || async {
        dcp_core::storage::StorageExt::read_range(&**place.storage(), &key, 0..100).await
    };
    read().await.unwrap();
    // Another file of the same bytes.
    fs::copy(&data, folder.path().join("new")).unwrap();
    fs::rename(folder.path().join("new"), &data).unwrap();
    let error = read().await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Changed, "{error}");
    let text = error.to_string();
    assert!(text.contains("__0_0.distcp") && text.contains("open the checkpoint again"), "{text}");
    DcpReader::new(storage).metadata().await.unwrap();
}
