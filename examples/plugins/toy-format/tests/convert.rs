//! Jobs on a checkpoint of a registered format.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::PutMode;
use dcp_core::{CheckpointMetadata, DType, Key, Storage};
use dcp_jobs::{Destination, ErrorKind, Format, Opener};
use dcp_storage_fs::FsStorage;
use toy_format::ToyFormat;

fn storages() -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    storages
}

/// A checkpoint of one tensor, by the description of the format.
async fn put_checkpoint(storage: &dyn Storage) {
    let with_crc = |bytes: &[u8]| [bytes, &crc32fast::hash(bytes).to_le_bytes()].concat();
    let data = with_crc(&[1, 2, 3, 4, 5, 6]);
    let file = Key::new("rank_0.g0.toy").unwrap();
    let mut metadata = CheckpointMetadata::new();
    let placement = Placement {
        file: metadata.intern_file(&file).unwrap(),
        encoding: metadata.intern_encoding(&Encoding::new(Layout::Computed)).unwrap(),
        byte_offset: 0,
        byte_len: data.len() as u64,
    };
    let mut tensor = TensorEntry::new(DType::UInt8, [2, 3]);
    tensor.chunks.push(&[0, 0], &[2, 3], Some(placement)).unwrap();
    metadata.insert("weight", Entry::Tensor(tensor));
    let wire: Bytes = metadata.to_wire();
    let index = [&crc32fast::hash(&wire).to_le_bytes()[..], &wire].concat();
    for (key, bytes) in [(file, data), (Key::new("index.toy").unwrap(), index)] {
        storage.put(&key, bytes.into(), PutMode::Create).await.unwrap();
    }
}

#[tokio::test]
async fn a_registered_format_is_converted_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let storage = FsStorage::builder(at("toy")).create(true).open().unwrap();
    put_checkpoint(&storage).await;

    let opener = Opener::new(storages()).format(Arc::new(ToyFormat));
    let checkpoint = opener.open(&at("toy")).await.unwrap();
    checkpoint.convert(at("model")).to(Format::HuggingFace).run().await.unwrap();
    let written = std::fs::read(folder.path().join("model/model.safetensors")).unwrap();
    assert!(written.ends_with(&[1, 2, 3, 4, 5, 6]));

    let unknown = Opener::new(storages()).open(&at("toy")).await;
    assert!(unknown.is_err(), "it was opened without the format");
}

#[tokio::test]
async fn a_registered_format_is_written_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let toy = Format::Registered("toy");
    let opener = Opener::new(storages()).format(Arc::new(ToyFormat));
    let storage = FsStorage::builder(at("toy")).create(true).open().unwrap();
    put_checkpoint(&storage).await;

    // From another format, for several ranks.
    let checkpoint = opener.open(&at("toy")).await.unwrap();
    checkpoint.convert(at("dcp")).to(Format::Dcp).run().await.unwrap();
    let dcp = opener.open(&at("dcp")).await.unwrap();
    dcp.convert(Destination::new(at("copy")).to(toy).ranks(2)).run().await.unwrap();
    let copy = opener.open(&at("copy")).await.unwrap();
    assert!(copy.verify().deep(true).run().await.unwrap().ok);
    assert_eq!(std::fs::read(folder.path().join("copy/rank_0.g0.toy")).unwrap()[..3], [1, 2, 3]);
    assert_eq!(std::fs::read(folder.path().join("copy/rank_1.g0.toy")).unwrap()[..3], [4, 5, 6]);

    // Its checkpoint is replaced where that is allowed, and not by another format.
    let again = |overwrite| dcp.convert(at("copy")).to(toy).overwrite(overwrite).run();
    let error = again(false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TargetExists, "{error}");
    again(true).await.unwrap();
    for format in [Format::Dcp, Format::HuggingFace] {
        let written = checkpoint.convert(at("copy")).to(format).overwrite(true).run().await;
        let error = written.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OtherCheckpoint, "{error}");
        assert!(error.to_string().ends_with("it is a toy checkpoint"), "{error}");
    }
    // And it replaces none of theirs.
    let written = checkpoint.convert(at("dcp")).to(toy).overwrite(true).run().await;
    assert_eq!(written.unwrap_err().kind(), ErrorKind::OtherCheckpoint);

    let plain = Opener::new(storages()).open(&at("dcp")).await.unwrap();
    let error = plain.convert(at("new")).to(toy).run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    assert!(!folder.path().join("new").exists());
}

#[tokio::test]
async fn a_registered_format_is_resharded_in_its_own_format() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let opener = Opener::new(storages()).format(Arc::new(ToyFormat));
    let storage = FsStorage::builder(at("toy")).create(true).open().unwrap();
    put_checkpoint(&storage).await;
    let checkpoint = opener.open(&at("toy")).await.unwrap();
    checkpoint.reshard(at("two")).ranks(2).run().await.unwrap();
    assert!(folder.path().join("two/rank_1.g0.toy").exists());
    assert!(opener.open(&at("two")).await.unwrap().verify().deep(true).run().await.unwrap().ok);
}

#[tokio::test]
async fn a_registered_format_is_verified_by_its_own_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().display().to_string();
    let storage = FsStorage::builder(&place).create(true).open().unwrap();
    put_checkpoint(&storage).await;
    let opener = Opener::new(storages()).format(Arc::new(ToyFormat));
    let verify =
        async || opener.open(&place).await.unwrap().verify().deep(true).run().await.unwrap();
    let index_len = std::fs::metadata(folder.path().join("index.toy")).unwrap().len();
    let report = verify().await;
    assert!(report.ok && report.notes.is_empty(), "{report:?}");
    assert_eq!(report.bytes_checked, 6 + 4 + index_len);

    std::fs::write(folder.path().join("rank_3.g7.toy"), "").unwrap();
    assert_eq!(verify().await.notes, ["rank_3.g7.toy is left of another save"]);

    let data = folder.path().join("rank_0.g0.toy");
    let mut bytes = std::fs::read(&data).unwrap();
    bytes[2] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let report = verify().await;
    let [problem] = &*report.problems else { panic!("{report:?}") };
    assert_eq!(problem.key.as_deref(), Some("weight"));
    assert!(problem.message.contains("checksum"), "{problem:?}");
}
