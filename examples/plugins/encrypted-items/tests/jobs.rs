//! A checkpoint whose items are encrypted, in jobs with and without the transform.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::format::{Compression, StreamTransform as _};
use dcp_core::registry::{Access, StorageRegistry};
use dcp_jobs::{Destination, Format, Opener};
use dcp_storage_fs::FsStorage;
use encrypted_items::EncryptedItems;

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    Opener::new(storages)
}

fn with_key(key: u8) -> Opener {
    let opener = opener();
    let formats = dcp_jobs::listing::formats();
    opener.formats(formats.with_transform(Arc::new(EncryptedItems::new(&[key; 32]))))
}

/// A safetensors file of one tensor, `weight`, of `len` bytes.
fn model(len: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"weight":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend((0..len).map(|at| (at % 251) as u8));
    file
}

#[tokio::test]
async fn items_are_encrypted_on_disk_and_read_with_the_key_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let plain = model(200_000);
    std::fs::write(at("plain.safetensors"), &plain).unwrap();

    let transform = Compression::Transform(Arc::new(EncryptedItems::new(&[7; 32])));
    let target = Destination::new(at("dcp")).to(Format::Dcp).ranks(2).compression(transform);
    let source = opener().open(&at("plain.safetensors")).await.unwrap();
    source.convert(target).run().await.unwrap();

    // A pattern of the plain elements is in no file.
    for entry in std::fs::read_dir(folder.path().join("dcp")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!bytes.windows(16).any(|window| window == &plain[plain.len() - 16..]));
    }

    // Without the transform, the item is refused by its name, by `verify` too.
    let unknown = opener().open(&at("dcp")).await.unwrap();
    let refused = unknown.convert(at("copy.safetensors")).run().await.unwrap_err();
    let chain =
        std::iter::successors(Some(&refused as &dyn std::error::Error), |error| error.source());
    let text = chain.fold(String::new(), |all, error| format!("{all}: {error}"));
    assert!(text.contains("stream.encrypted@dcp.example/1"), "{text}");
    assert!(!folder.path().join("copy.safetensors").exists());
    assert!(!unknown.verify().deep(true).run().await.unwrap().ok);

    // With another key, it is damaged; with the key, it is what it was.
    let other = with_key(8).open(&at("dcp")).await.unwrap();
    assert!(other.convert(at("copy.safetensors")).run().await.is_err());
    let own = with_key(7).open(&at("dcp")).await.unwrap();
    assert!(own.verify().deep(true).run().await.unwrap().ok);
    own.convert(at("copy.safetensors")).run().await.unwrap();
    let copy = std::fs::read(at("copy.safetensors")).unwrap();
    assert!(copy.ends_with(&plain[plain.len() - 200_000..]));
}

#[test]
fn every_length_comes_back_and_no_cut_or_changed_byte_does() {
    let transform = EncryptedItems::new(&[1; 32]);
    let segment = 64 << 10;
    for len in [0, 1, segment - 1, segment, segment + 1, 2 * segment, 2 * segment + 5] {
        let item: Vec<u8> = (0..len).map(|at| (at % 253) as u8).collect();
        let mut stored = Vec::new();
        let mut encoder = transform.encoder();
        encoder.begin(len as u64).unwrap();
        for part in item.chunks(10_007) {
            encoder.push(part, &mut |bytes: Bytes| stored.extend_from_slice(&bytes)).unwrap();
        }
        encoder.finish(&mut |bytes: Bytes| stored.extend_from_slice(&bytes)).unwrap();
        assert!(stored.len() as u64 <= transform.stored_max(len as u64));
        assert_eq!(transform.undo(&stored, "1", len as u64).unwrap(), item);
        if len > 0 {
            assert!(transform.undo(&stored, "1", len as u64 - 1).is_err());
        }
        assert!(transform.undo(&stored, "2", len as u64).is_err());
        for cut in [0, 5, 18, 19, 20, stored.len().saturating_sub(1), segment + 35] {
            if cut < stored.len() {
                assert!(transform.undo(&stored[..cut], "1", u64::MAX).is_err(), "{cut} of {len}");
            }
        }
        let last = stored.len() - 1;
        stored[last] ^= 1;
        assert!(transform.undo(&stored, "1", len as u64).is_err());
    }
}
