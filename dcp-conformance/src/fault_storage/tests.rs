//! Faults strike where they are set, and only there.

use dcp_core::storage::{PutMode, StorageExt, UploadOptions};
use futures_util::TryStreamExt;

use super::*;
use crate::MemoryStorage;
use crate::case::runtime;

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn memory() -> (Arc<MemoryStorage>, FaultStorage) {
    let memory = Arc::new(MemoryStorage::new());
    (Arc::clone(&memory), FaultStorage::new(memory))
}

fn upload_options() -> UploadOptions {
    UploadOptions::new(PutMode::Create, 4)
}

/// Every method once: ten operations.
async fn everything(storage: &FaultStorage) -> Vec<Option<StorageErrorKind>> {
    let mut outcomes = Vec::new();
    let mut note =
        |outcome: Result<(), StorageError>| outcomes.push(outcome.err().map(|e| e.kind()));
    note(storage.put(&key("a"), "abcd".into(), PutMode::Create).await.map(drop));
    note(storage.stat(&key("a")).await.map(drop));
    note(storage.read_range(&key("a"), 0..4).await.map(drop));
    note(storage.list(None).try_collect::<Vec<_>>().await.map(drop));
    note(match storage.start_upload(&key("b"), upload_options()).await {
        Ok(mut upload) => {
            let part = upload.put_part("efgh".into()).await;
            let completion = upload.complete().await;
            part.and(completion.map(drop))
        }
        Err(error) => Err(error),
    });
    note(match storage.start_upload(&key("c"), upload_options()).await {
        Ok(upload) => upload.abort().await,
        Err(error) => Err(error),
    });
    note(storage.delete(&[key("a")]).await);
    outcomes
}

#[test]
fn the_chosen_operation_fails_with_the_chosen_kind() {
    let (_, healthy) = memory();
    let outcomes = runtime().block_on(everything(&healthy));
    assert!(outcomes.iter().all(Option::is_none), "{outcomes:?}");
    assert_eq!(healthy.operations(), 10);
    for number in 1..=10 {
        let (_, storage) = memory();
        let storage = storage.fault(number, Fault::Fail(StorageErrorKind::Denied));
        let outcomes = runtime().block_on(everything(&storage));
        assert!(outcomes.contains(&Some(StorageErrorKind::Denied)), "{number}: {outcomes:?}");
        assert!(!storage.is_dead());
    }
}

#[test]
fn after_its_death_every_operation_fails() {
    for last in 0..10 {
        let (memory, storage) = memory();
        let storage = storage.dying_after(last);
        let outcomes = runtime().block_on(everything(&storage));
        assert!(storage.is_dead());
        assert_eq!(outcomes[6], Some(StorageErrorKind::Other));
        let a = runtime().block_on(memory.contains(&key("a"))).unwrap();
        let b = runtime().block_on(memory.contains(&key("b"))).unwrap();
        assert_eq!((a, b), (last >= 1, last >= 7), "after {last} operations");
    }
}

#[test]
fn a_lost_reply_is_of_an_operation_that_took_place() {
    let (memory, storage) = memory();
    let storage = storage.fault(1, Fault::LoseReply);
    runtime().block_on(async {
        let error = storage.put(&key("a"), "x".into(), PutMode::Create).await.unwrap_err();
        assert!(error.is_retryable());
        assert_eq!(memory.read_all(&key("a")).await.unwrap(), "x");
        let again = storage.put(&key("a"), "x".into(), PutMode::Create).await.unwrap_err();
        assert_eq!(again.kind(), StorageErrorKind::AlreadyExists);
    });
}

#[test]
fn a_short_read_is_truncated() {
    let (_, storage) = memory();
    let storage = storage.fault(2, Fault::ShortRead);
    runtime().block_on(async {
        storage.put(&key("a"), "xyz".into(), PutMode::Create).await.unwrap();
        let error = storage.read_range(&key("a"), 0..3).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Truncated);
        assert_eq!(storage.read_range(&key("a"), 0..3).await.unwrap(), "xyz");
    });
}

/// A storage that shows what was sent to uploads that nobody ended.
#[derive(Debug, Default)]
struct Sent(Arc<Mutex<(Vec<u8>, bool)>>);

#[async_trait]
impl Upload for Sent {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let sent = Arc::clone(&self.0);
        Box::pin(async move {
            sent.lock().unwrap().0.extend_from_slice(&part.to_bytes());
            Ok(())
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        Ok(ObjectMeta::new(key("a"), 0))
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.lock().unwrap().1 = true;
    }
}

#[test]
fn a_torn_part_is_half_sent_and_nobody_cleans_up() {
    let sent = Sent::default();
    let seen = Arc::clone(&sent.0);
    let (_, storage) = memory();
    let storage = storage.fault(2, Fault::Tear);
    let mut upload =
        FaultUpload { inner: Some(Box::new(sent)), storage: storage.clone(), key: key("a") };
    runtime().block_on(async {
        upload.put_part("abc".into()).await.unwrap();
        let pieces = vec![Bytes::from("de"), Bytes::from("fghi")];
        upload.put_part(pieces.into()).await.unwrap_err();
        upload.put_part("never".into()).await.unwrap_err();
    });
    assert!(storage.is_dead());
    drop(upload);
    let (bytes, dropped) = &*seen.lock().unwrap();
    assert_eq!(bytes, b"abcdef");
    assert!(!dropped, "a dead process dropped its upload");
}

#[test]
fn a_full_storage_takes_nothing_more_and_lets_go() {
    let (memory, storage) = memory();
    let storage = storage.full_after(0);
    let full = Some(StorageErrorKind::Full);
    runtime().block_on(async {
        let put = memory.put(&key("a"), "abcd".into(), PutMode::Create).await;
        put.unwrap();
        let outcomes = everything(&storage).await;
        assert_eq!(outcomes, [full, None, None, None, full, full, None]);
        assert!(!memory.contains(&key("a")).await.unwrap());
    });
}

#[test]
fn an_upload_whose_bytes_have_their_space_completes_on_a_full_storage() {
    let (memory, storage) = memory();
    let storage = storage.full_after(2);
    runtime().block_on(async {
        let mut upload = storage.start_upload(&key("a"), upload_options()).await.unwrap();
        upload.put_part("abcd".into()).await.unwrap();
        upload.complete().await.unwrap();
        assert_eq!(&memory.read_all(&key("a")).await.unwrap()[..], b"abcd");
    });
}

#[test]
fn a_read_only_storage_stays_as_it_is() {
    let (memory, storage) = memory();
    let storage = storage.read_only_after(0);
    let denied = Some(StorageErrorKind::Denied);
    runtime().block_on(async {
        memory.put(&key("a"), "abcd".into(), PutMode::Create).await.unwrap();
        let outcomes = everything(&storage).await;
        assert_eq!(outcomes, [denied, None, None, None, denied, denied, denied]);
        assert!(memory.contains(&key("a")).await.unwrap());
    });
}
