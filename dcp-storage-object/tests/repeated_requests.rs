//! Requests that are made again, at a double of Google Cloud Storage behind a proxy.

#![expect(clippy::unwrap_used, reason = "panicking is how a test fails")]

use std::sync::Arc;
use std::thread::spawn;
use std::time::Duration;

use dcp_conformance::http::{FaultProxy, FaultRule, GcsDouble, HttpFault};
use dcp_core::error::error_chain;
use dcp_core::registry::{Access, OpenRequest, StorageOpener as _, StorageOptions};
use dcp_core::storage::{LeftoverAction, LeftoverKind, PutMode, StorageExt as _, UploadOptions};
use dcp_core::{Key, Storage, StorageErrorKind as Kind};
use dcp_storage_object::ObjectOpener;
use dcp_testing::key;
use futures_util::TryStreamExt as _;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// A server, and a proxy in front of it.
struct Place {
    proxy: Arc<FaultProxy>,
    server: GcsDouble,
    runtime: Runtime,
}

impl Place {
    fn new() -> Self {
        let server = GcsDouble::start(&["bucket"]).unwrap();
        let proxy = Arc::new(FaultProxy::start(&server.endpoint()).unwrap());
        Self { proxy, server, runtime: Runtime::new().unwrap() }
    }

    /// A storage that waits longer for an answer than a test takes.
    fn storage(&self, options: StorageOptions) -> Arc<dyn Storage> {
        let (server, proxy) = (self.server.endpoint(), self.proxy.endpoint());
        let account = self.server.service_account().replace(&server, &proxy);
        let options = options
            .with("google_service_account_key", account)
            .with("stall_timeout", "86400")
            .with("deadline", "86400");
        let request = OpenRequest::new("gs://bucket/run", Access::Write).with_options(options);
        self.runtime.block_on(ObjectOpener::new().open(&request)).unwrap()
    }

    fn put(&self, name: &str) {
        let storage = self.storage(StorageOptions::new());
        let key = key(name);
        let put = storage.put(&key, "0123456789".into(), PutMode::Create);
        self.runtime.block_on(put).unwrap();
        self.proxy.clear();
    }

    fn gets(&self) -> usize {
        self.proxy.exchanges().iter().filter(|exchange| exchange.method == "GET").count()
    }
}

#[test]
fn uploads_of_killed_processes_are_listed_and_removed() {
    let place = Place::new();
    let storage = place.storage(StorageOptions::new());
    let part_bytes = storage.capabilities().write_limits.part_bytes_min;
    for name in ["one/object", "two/object & more"] {
        let options = UploadOptions::new(PutMode::Overwrite, part_bytes);
        let mut upload = place.runtime.block_on(storage.start_upload(&key(name), options)).unwrap();
        place.runtime.block_on(upload.put_part("a part".into())).unwrap();
        // As if the process were killed.
        std::mem::forget(upload);
    }
    let find = |folder: Option<&Key>, age, action| {
        let found = place.runtime.block_on(storage.leftovers(folder, age, action)).unwrap();
        let paths = found.into_iter().map(|one| {
            assert_eq!(one.kind, LeftoverKind::OpenUpload);
            one.path
        });
        paths.collect::<Vec<_>>()
    };
    let (list, remove) = (LeftoverAction::List, LeftoverAction::Remove);
    let hour = Duration::from_secs(3600);
    assert_eq!(find(None, hour, remove), [""; 0], "they are too young");
    assert_eq!(find(None, Duration::ZERO, list), ["one/object", "two/object & more"]);
    assert_eq!(find(Some(&key("two")), Duration::ZERO, remove), ["two/object & more"]);
    assert_eq!(find(None, Duration::ZERO, remove), ["one/object"]);
    assert_eq!(place.server.unfinished_uploads(), 0);
}

#[test]
fn a_request_without_an_answer_is_made_again() {
    let place = Place::new();
    place.put("object");
    // It is never released: only another request brings the bytes.
    place.proxy.add(FaultRule::new(HttpFault::Stall).method("GET").times(1));
    let storage = place.storage(StorageOptions::new().with("hedge_after_ms", "1"));
    let read = place.runtime.block_on(storage.read_range(&key("object"), 2..5)).unwrap();
    assert_eq!(read, "234");
    assert!(place.gets() >= 2);
}

#[test]
fn requests_are_not_made_twice_unless_asked_for() {
    let place = Place::new();
    place.put("object");
    place.proxy.add(FaultRule::new(HttpFault::Stall).method("GET").times(1));
    let storage = place.storage(StorageOptions::new());
    let (stalled, is_stalled) = oneshot::channel();
    let proxy = Arc::clone(&place.proxy);
    let waiting = spawn(move || {
        assert!(proxy.wait_for_stall());
        let _ = stalled.send(());
    });
    let key = key("object");
    place.runtime.block_on(async {
        tokio::select! {
            _ = storage.read_range(&key, 2..5) => unreachable!("it is stalled"),
            _ = is_stalled => {}
        }
    });
    waiting.join().unwrap();
    assert_eq!(place.gets(), 1);
}

/// The body agrees with its length, and is no XML.
#[test]
fn a_listing_that_is_cut_short_is_repeated() {
    let place = Place::new();
    place.put("step1/a");
    let storage = place.storage(StorageOptions::new().with("attempts_max", "3"));
    let list = |times| {
        let cut = FaultRule::new(HttpFault::Shorten { by: 20 }).method("GET").times(times);
        place.proxy.add(cut);
        let folder = key("step1");
        let listed = place.runtime.block_on(async {
            let flat = storage.list(Some(&folder)).try_collect::<Vec<_>>().await?;
            let folder = storage.list_folder(Some(&folder)).try_collect::<Vec<_>>().await?;
            Ok::<_, dcp_core::StorageError>((flat.len(), folder.len()))
        });
        place.proxy.calm();
        listed
    };
    assert_eq!(list(2).unwrap(), (1, 1));
    let error = list(u64::MAX).unwrap_err();
    assert_eq!(error.kind(), Kind::Transient);
    let text = error_chain(&error);
    assert!(text.contains("the prefix is \"run/step1/\", after 3 attempts"), "{text}");
}
