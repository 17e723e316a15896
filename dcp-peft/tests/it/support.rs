//! Opens, merges and reads checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::{DType, Region};
use dcp_jobs::framework::Frameworks;
use dcp_jobs::read::TensorReader;
use dcp_jobs::{Checkpoint, Error, Format, Opener};
use dcp_peft::{AdapterOptions, Peft, PeftFormat};
use dcp_storage_fs::FsStorage;

pub(crate) type Tensors = BTreeMap<String, (DType, Vec<u8>)>;

pub(crate) fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    Opener::new(storages)
        .formats(dcp_jobs::listing::formats().with(Arc::new(PeftFormat)))
        .frameworks(Frameworks::none().with(Arc::new(Peft)))
}

pub(crate) async fn open(path: &Path) -> Result<Checkpoint, Error> {
    opener().open(path.to_str().unwrap()).await
}

pub(crate) async fn tensors(path: &Path) -> Tensors {
    let checkpoint = open(path).await.unwrap();
    let metadata = checkpoint.source().metadata().await.unwrap();
    let mut found = Tensors::new();
    for (position, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor() else { continue };
        let reader = Arc::clone(&checkpoint.source().reader);
        let reader = TensorReader::new(reader, Arc::clone(&metadata), position).unwrap();
        let whole = Region::full(tensor.shape.clone()).unwrap();
        let bytes = reader.read(&[whole]).await.unwrap();
        found.insert(fqn.to_string(), (tensor.dtype, bytes.to_vec()));
    }
    found
}

/// Merges the adapter in `adapter` into `base`, as a folder of Hugging Face.
pub(crate) async fn merge(
    base: &Path,
    adapter: &Path,
    target: &Path,
) -> Result<Vec<String>, Error> {
    let adapter = AdapterOptions::new(open(adapter).await?);
    let target = target.to_str().unwrap();
    let base = open(base).await?;
    let written = base.convert(target).to(Format::HuggingFace).with(adapter).run().await?;
    Ok(written.notes)
}
