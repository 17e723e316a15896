//! Conversions of Megatron-Core's checkpoints on a disk that is full, or must not be written.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use dcp::convert::{DiffOptions, JobOptions, Source, diff, to_hf, verify};
use dcp::core::{CheckpointError, StorageErrorKind};
use dcp::formats::hf::HfLayout;
use dcp::megatron::{
    MegatronCheckpoint, MegatronError, MegatronWriter, OpenOptions, ParallelLayout, to_torch_dist,
};
use dcp::{Access, Storage, StorageRegistry};

use crate::Mount;

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(work)
}

fn open(place: &Path, access: Access) -> Arc<dyn Storage> {
    StorageRegistry::with_defaults().open(&place.display().to_string(), access).unwrap()
}

fn megatron(place: &Path) -> MegatronCheckpoint {
    let storage = open(place, Access::Read);
    block_on(MegatronCheckpoint::open(&storage, &OpenOptions::default())).unwrap()
}

fn fixture(name: &str) -> Source {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/megatron").join(name);
    megatron(&folder).source().clone()
}

fn write(source: &Source, place: &Path, tp: u32) -> Result<(), MegatronError> {
    let writer = MegatronWriter::builder(open(place, Access::Write)).overwrite(true);
    let (layout, options) = (ParallelLayout::new(tp, 1), JobOptions::default());
    block_on(to_torch_dist(source, writer, layout, &options)).map(|_| ())
}

/// That of the storage, whatever is around it.
fn kind(error: &(dyn std::error::Error + 'static)) -> Option<StorageErrorKind> {
    let mut error = Some(error);
    while let Some(one) = error {
        if let Some(storage) = one.downcast_ref::<dcp::core::StorageError>() {
            return Some(storage.kind());
        }
        if let Some(CheckpointError::Storage(storage)) = one.downcast_ref() {
            return Some(storage.kind());
        }
        if let Some(dcp::convert::ConvertError::Checkpoint(CheckpointError::Storage(storage))) =
            one.downcast_ref()
        {
            return Some(storage.kind());
        }
        if let Some(MegatronError::Checkpoint(CheckpointError::Storage(storage))) =
            one.downcast_ref()
        {
            return Some(storage.kind());
        }
        if let Some(MegatronError::Convert(dcp::convert::ConvertError::Checkpoint(
            CheckpointError::Storage(storage),
        ))) = one.downcast_ref()
        {
            return Some(storage.kind());
        }
        error = one.source();
    }
    None
}

fn assert_is(place: &Path, source: &Source) {
    let options = JobOptions::default();
    let stored = megatron(place);
    let report = block_on(verify(stored.raw().unwrap(), true, &options)).unwrap();
    assert!(report.ok, "{report:?}");
    let report =
        block_on(diff(source, stored.source(), &DiffOptions::default(), &options)).unwrap();
    assert!(report.equal, "{report:?}");
}

/// Bytes of all files below a folder, rounded up to pages.
fn pages(folder: &Path) -> u64 {
    let lens = fs::read_dir(folder).unwrap().map(|entry| {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => pages(&entry.path()),
            false => entry.metadata().unwrap().len().next_multiple_of(4096),
        }
    });
    lens.sum::<u64>() + 4096
}

pub(crate) fn a_full_or_read_only_disk_keeps_the_old_checkpoint_of_megatron() {
    let (old, new) = (fixture("gpt_tp2pp2_swiglu/ckpt"), fixture("tp2_basic/ckpt"));
    let mount = Mount::new("size=8m").unwrap();
    let place = mount.path().join("run/iter_0000001");
    write(&old, &place, 2).unwrap();
    let used = pages(mount.path());
    // From hardly a byte to nearly enough.
    for free in [1_u64, 2, 4, 8] {
        mount.remount(&format!("size={}k", (used >> 10) + 4 * free));
        let error = write(&new, &place, 1).unwrap_err();
        assert_eq!(kind(&error), Some(StorageErrorKind::Full), "{free}: {error}");
        assert_is(&place, &old);
        let folder = mount.path().join("run/iter_0000002");
        let error = write(&new, &folder, 1).unwrap_err();
        assert_eq!(kind(&error), Some(StorageErrorKind::Full), "{free}: {error}");
        assert!(!folder.join("metadata.json").exists());
        let hf = open(&mount.path().join("hf"), Access::Write);
        let error = block_on(to_hf(
            &old,
            &hf,
            &HfLayout::MaxFileBytes(1 << 14),
            true,
            &JobOptions::default(),
        ))
        .map(|_| ());
        let error = error.unwrap_err();
        assert_eq!(kind(&error), Some(StorageErrorKind::Full), "{free}: {error}");
        assert!(!mount.path().join("hf/model.safetensors.index.json").exists());
    }
    mount.remount("size=8m");
    write(&new, &place, 1).unwrap();
    assert_is(&place, &new);
    mount.remount("ro");
    let error = write(&old, &place, 1).unwrap_err();
    assert_eq!(kind(&error), Some(StorageErrorKind::Denied), "{error}");
    assert_is(&place, &new);
}
