//! Jobs on storages in which folders are only prefixes of names, as in an object store, and on one
//! without a listing, as a web server is.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::error::StorageOp;
use dcp_core::format::Subfolder;
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PutMode,
    Upload, UploadOptions,
};
use dcp_core::{DType, Key, Payload, Storage, StorageError, StorageErrorKind};
use dcp_jobs::{ErrorKind, Format, Opener};
use dcp_storage_fs::FsStorage;
use futures_util::stream;

/// `bucket://PATH` in memory, of which every path opens, whatever is there; `web://PATH` for what is
/// in it, without a listing.
fn opener() -> Opener {
    let bucket: Arc<dyn Storage> = Arc::new(MemoryStorage::default().conditional_claims());
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).open()?))
    });
    let folder = |bucket: &Arc<dyn Storage>, url: &str| -> Result<Arc<dyn Storage>, StorageError> {
        let path = url.split_once("://").map_or("", |(_, path)| path).trim_matches('/');
        Ok(match path {
            "" => Arc::clone(bucket),
            path => Arc::new(Subfolder::new(Arc::clone(bucket), Key::new(path)?)),
        })
    };
    let served = Arc::clone(&bucket);
    storages.register("bucket", move |request| folder(&bucket, &request.url));
    storages.register("web", move |request| Ok(Arc::new(Web(folder(&served, &request.url)?))));
    dcp::opener(storages)
}

fn fixture(name: &str) -> String {
    dcp_testing::fixture(name).display().to_string()
}

const SOURCES: [(&str, &str); 5] = [
    ("pytorch", "pytorch/fsdp2_adam_2r"),
    ("olmo", "olmo/fsdp2-2rank-nested/ckpt"),
    ("hf", "hf/consolidated_index_4r/ckpt"),
    ("megatron", "megatron/gpt_tp2pp2_swiglu/ckpt"),
    ("run", "megatron/run_legacy_torch_tp2"),
];

#[tokio::test]
async fn checkpoints_of_every_format_are_opened_and_written_in_a_bucket() {
    let opener = opener();
    for (name, source) in SOURCES {
        let url = format!("bucket://b/{name}/source");
        opener.copy(fixture(source), &url).run().await.unwrap();
        let local = opener.open(&fixture(source)).await.unwrap();
        let checkpoint = opener.open(&url).await.unwrap();
        let wanted = local.source().metadata().await.unwrap().len();
        assert_eq!(checkpoint.source().metadata().await.unwrap().len(), wanted, "{name}");
        assert!(checkpoint.verify().deep(true).run().await.unwrap().ok, "{name}");
        for (to, target) in [
            (Format::Dcp, "dcp"),
            (Format::Safetensors, "model.safetensors"),
            (Format::TorchSave, "model.pt"),
        ] {
            let target = format!("bucket://b/{name}/{target}");
            let convert = || checkpoint.convert(&target).to(to).dtype(DType::BFloat16);
            convert().run().await.unwrap();
            let copy = opener.open(&target).await.unwrap();
            assert!(copy.verify().deep(true).run().await.unwrap().ok, "{target}");
            let error = convert().run().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TargetExists, "{target}");
            convert().overwrite(true).run().await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_is_not_in_a_bucket_is_named() {
    let opener = opener();
    opener.copy(fixture("pytorch/t21_plain"), "bucket://b/run/step1").run().await.unwrap();
    for url in ["bucket://b/none", "bucket://b/run/step2", "bucket://b/run/step1/x.safetensors"] {
        let error = opener.open(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{url}: {error}");
        assert!(error.to_string().contains(url), "{error}");
    }
    let error = opener.open("bucket://b/run/step1/__0_0.distcp").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotACheckpoint);
    let listing = opener.list("bucket://b/run").await.unwrap();
    assert_eq!(listing.latest.as_deref(), Some("step1"));

    // A folder takes no name of a file, and a file none of a folder.
    let checkpoint = opener.open("bucket://b/run/step1").await.unwrap();
    checkpoint.convert("bucket://b/file.pt").run().await.unwrap();
    for (target, to) in [("bucket://b/run", Format::TorchSave), ("bucket://b/file.pt", Format::Dcp)]
    {
        let error = checkpoint.convert(target).to(to).run().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidPlace, "{target}: {error}");
    }
}

#[tokio::test]
async fn a_web_server_without_a_listing_serves_checkpoints() {
    let opener = opener();
    for (name, source) in SOURCES.into_iter().filter(|(name, _)| *name != "run") {
        let url = format!("bucket://b/{name}");
        opener.copy(fixture(source), &url).run().await.unwrap();
        let checkpoint = opener.open(&format!("web://b/{name}")).await.unwrap();
        assert!(checkpoint.verify().deep(true).run().await.unwrap().ok, "{name}");
    }
    let checkpoint = opener.open("bucket://b/pytorch").await.unwrap();
    checkpoint.convert("bucket://b/file.pt").run().await.unwrap();
    opener.open("web://b/file.pt").await.unwrap();
    let error = opener.open("web://b/none").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let error = opener.list("web://b/pytorch").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    for name in ["pytorch", "megatron"] {
        let (from, to) = (format!("web://b/{name}"), format!("bucket://b/{name}-copy"));
        opener.copy(from, &to).run().await.unwrap();
        assert!(opener.open(&to).await.unwrap().verify().deep(true).run().await.unwrap().ok);
    }
}

/// A storage to read, which cannot list.
#[derive(Debug)]
struct Web(Arc<dyn Storage>);

fn unsupported(op: StorageOp) -> StorageError {
    StorageError::new(StorageErrorKind::Unsupported, op, None)
}

#[async_trait]
impl Storage for Web {
    dcp_core::forward_storage!(0: stat, read, read_whole);

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.writable = false;
        capabilities.listable = false;
        capabilities.complete_listing = false;
        capabilities
    }

    async fn put(&self, _: &Key, _: Payload, _: PutMode) -> Result<ObjectMeta, StorageError> {
        Err(unsupported(StorageOp::Put))
    }

    async fn start_upload(
        &self,
        _: &Key,
        _: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(unsupported(StorageOp::Upload))
    }

    fn list(&self, _: Option<&Key>) -> ObjectStream {
        Box::pin(stream::iter([Err(unsupported(StorageOp::List))]))
    }

    fn list_folder(&self, _: Option<&Key>) -> FolderStream {
        Box::pin(stream::iter([Err(unsupported(StorageOp::List))]))
    }

    async fn delete(&self, _: &[Key]) -> Result<(), StorageError> {
        Err(unsupported(StorageOp::Delete))
    }

    async fn claim(&self, _: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(unsupported(StorageOp::Claim))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Err(unsupported(action.op()))
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}
