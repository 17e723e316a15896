//! A web server: what it serves is read, by ranges, and nothing else can be done.

use std::path::PathBuf;
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::{PutMode, ReadInto, ReadRequest, StorageExt};
use dcp_core::{Buffer, Key, Storage, StorageErrorKind as Kind};
use futures_util::TryStreamExt;
use libtest_mimic::Trial;

use crate::trial;

/// A folder of files that the server serves, removed at the end.
struct Served {
    folder: PathBuf,
    url: String,
    bytes: Vec<u8>,
}

impl Served {
    fn new(url: &str, root: &str, case: &str) -> Self {
        let name = format!("{case}-{:x}", std::process::id());
        let folder = PathBuf::from(root).join(&name);
        std::fs::create_dir_all(folder.join("a folder")).unwrap();
        let bytes = (0_u32..3_000_000).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8);
        let bytes = bytes.collect::<Vec<_>>();
        std::fs::write(folder.join("a folder/100% a+b.bin"), &bytes).unwrap();
        Self { folder, url: format!("{url}/{name}/"), bytes }
    }

    async fn open(&self, options: &[(&str, &str)]) -> Arc<dyn Storage> {
        let mut storages = StorageRegistry::empty();
        dcp_storage_object::register(&mut storages);
        let options = options.iter().copied().collect();
        storages.options(options).open(&self.url, Access::Read).await.unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn key() -> Key {
    Key::new("a folder/100% a+b.bin").unwrap()
}

pub(crate) fn trials(url: &str, root: &str) -> Vec<Trial> {
    let served = |case: &str| Served::new(url, root, case);
    let (ranges, whole, refused) = (served("ranges"), served("whole"), served("refused"));
    vec![
        trial("http::ranges_are_read_in_one_version".into(), || read_ranges(ranges)),
        trial("http::whole_objects_are_read_up_to_a_length".into(), || read_whole(whole)),
        trial("http::what_a_web_server_cannot_do_is_unsupported".into(), || refuse(refused)),
    ]
}

async fn read_ranges(served: Served) {
    let storage = served.open(&[("request_bytes", "100000"), ("coalesce_gap", "1000")]).await;
    let meta = storage.stat(&key()).await.unwrap();
    assert_eq!(meta.byte_len, served.bytes.len() as u64);
    let spans = [(2_999_000, 1000), (0, 1), (5, 700), (1_000_000, 1_500_000), (10, 0)];
    let ranges =
        spans.map(|(byte_offset, len)| ReadInto { byte_offset, buffer: Buffer::zeroed(len) });
    let request = ReadRequest::new(ranges.into()).with_if_version(meta.version.clone());
    let read = storage.read(&key(), request).await.unwrap();
    assert_eq!(read.version, meta.version);
    for ((start, len), buffer) in spans.into_iter().zip(&read.buffers) {
        assert_eq!(&buffer[..], &served.bytes[start as usize..][..len]);
    }
    for past in [2_999_999..3_000_001, 3_000_000..3_000_001, 9_000_000..9_000_001] {
        let error = storage.read_range(&key(), past).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Truncated, "{error}");
    }
    // A new version, of the same length.
    let mut changed = served.bytes.clone();
    changed.rotate_left(1);
    let path = served.folder.join(key().as_str());
    std::fs::write(&path, &changed).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(10);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
    let range = ReadInto { byte_offset: 0, buffer: Buffer::zeroed(8) };
    let request = ReadRequest::new(vec![range]).with_if_version(meta.version);
    let error = storage.read(&key(), request).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Changed, "{error}");
}

async fn read_whole(served: Served) {
    let storage = served.open(&[]).await;
    let whole = storage.read_whole(&key(), 3_000_000).await.unwrap();
    assert!(whole.bytes == served.bytes);
    let error = storage.read_whole(&key(), 2_999_999).await.unwrap_err();
    assert_eq!(error.kind(), Kind::TooLarge, "{error}");
    let missing = Key::new("a folder/missing").unwrap();
    assert_eq!(storage.stat(&missing).await.unwrap_err().kind(), Kind::NotFound);
    assert_eq!(storage.read_whole(&missing, 1).await.unwrap_err().kind(), Kind::NotFound);
}

async fn refuse(served: Served) {
    let storage = served.open(&[]).await;
    let put = storage.put(&key(), "x".into(), PutMode::Overwrite).await;
    let listed = storage.list(None).try_collect::<Vec<_>>().await;
    let deleted = storage.delete(&[key()]).await;
    for error in [put.unwrap_err(), listed.unwrap_err(), deleted.unwrap_err()] {
        assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    }
}
