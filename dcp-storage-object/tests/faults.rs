//! A store that fails, loses answers, and sends less or more than it said: no wrong byte is
//! returned, and no write counts twice.

#![expect(clippy::unwrap_used, reason = "panicking is how a test fails")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::storage::{
    LeftoverAction, PutMode, ReadInto, ReadRequest, StorageExt, UploadOptions,
};
use dcp_core::{Buffer, Key, Payload, Storage, StorageErrorKind as Kind};
use dcp_storage_object::{ObjectStorage, ObjectStorageBuilder, Provider};
use futures_util::future::join_all;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// A store in memory. Of each ten requests, about `rate` go wrong, as a seed decides.
#[derive(Debug)]
struct Faulty {
    store: InMemory,
    random: AtomicU64,
    rate: u64,
    gets: AtomicU64,
    /// Whether bodies come one byte a second.
    drips: AtomicBool,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl Faulty {
    fn new(seed: u64, rate: u64) -> Arc<Self> {
        let random = AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        Arc::new(Self {
            store: InMemory::new(),
            random,
            rate,
            gets: AtomicU64::new(0),
            drips: AtomicBool::new(false),
        })
    }

    fn builder(self: &Arc<Self>) -> ObjectStorageBuilder {
        let builder = ObjectStorage::builder(Arc::clone(self) as _).provider(Provider::Memory);
        builder.request_bytes(100).coalesce_gap(10).attempts_max(30)
    }

    fn storage(self: &Arc<Self>) -> ObjectStorage {
        self.builder().build().unwrap()
    }

    fn number(&self, below: u64) -> u64 {
        let next = |x: u64| x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        let old = self.random.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |x| Some(next(x)));
        (old.unwrap() >> 33) % below
    }

    fn goes_wrong(&self) -> bool {
        self.number(10) < self.rate
    }

    fn fault<T>(&self) -> Result<T> {
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        Err(Error::Generic { store: "Faulty", source: Box::new(io) })
    }

    /// A request that is refused, answered, or done without an answer.
    async fn maybe<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        if self.goes_wrong() {
            return self.fault();
        }
        let done = request.await;
        if self.goes_wrong() {
            return self.fault();
        }
        done
    }

    /// The body of an answer, which may break off, end early, stall, or have bytes of other places.
    fn body(&self, bytes: Bytes) -> BoxStream<'static, Result<Bytes>> {
        if self.drips.load(Ordering::SeqCst) {
            let bytes = stream::iter(bytes).then(|byte| async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok(Bytes::copy_from_slice(&[byte]))
            });
            return bytes.boxed();
        }
        let cut = self.number(bytes.len() as u64 + 1) as usize;
        let pieces: Vec<_> = bytes.slice(..cut).chunks(7).map(Bytes::copy_from_slice).collect();
        let start = stream::iter(pieces.into_iter().map(Ok));
        match self.number(4) {
            _ if !self.goes_wrong() => {
                stream::iter([Ok(bytes.slice(..cut)), Ok(bytes.slice(cut..))]).boxed()
            }
            0 => start.boxed(),
            1 => start.chain(stream::iter([self.fault()])).boxed(),
            2 => start.chain(stream::pending()).boxed(),
            _ => start
                .chain(stream::iter([Ok(bytes.slice(cut..)), Ok(Bytes::from_static(b"more"))]))
                .boxed(),
        }
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        path: &Path,
        bytes: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.maybe(self.store.put_opts(path, bytes, options)).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.maybe(self.store.put_multipart_opts(path, options)).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        let found = self.maybe(self.store.get_opts(path, options)).await?;
        let GetResult { meta, range, attributes, extensions, .. } = &found;
        let (meta, range) = (meta.clone(), range.clone());
        let (attributes, extensions) = (attributes.clone(), extensions.clone());
        let bytes = found.bytes().await?;
        let payload = GetResultPayload::Stream(self.body(bytes));
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        if self.goes_wrong() {
            return stream::iter([self.fault()]).boxed();
        }
        self.store.delete_stream(paths)
    }

    /// Breaks off after some objects, or goes on for ever without one.
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = self.store.list(prefix);
        let passed = self.number(5) as usize;
        match self.number(2) {
            _ if !self.goes_wrong() => listed,
            0 => listed.take(passed).chain(stream::iter([self.fault()])).boxed(),
            _ => listed.take(passed).chain(stream::pending()).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.maybe(self.store.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.maybe(self.store.copy_opts(from, to, options)).await
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at + seed * 7919).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn key() -> Key {
    Key::new("run/object").unwrap()
}

async fn put_directly(store: &InMemory, bytes: &[u8]) {
    let path = Path::parse(key().as_str()).unwrap();
    store.put_opts(&path, bytes.to_vec().into(), PutOptions::default()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn reads_return_the_right_bytes_or_an_error_that_names_the_range() {
    let mut failed = 0;
    for seed in 0..600 {
        let faulty = Faulty::new(seed, seed % 5);
        let bytes = pattern(seed, 1000);
        put_directly(&faulty.store, &bytes).await;
        // A hedge is earlier than the end of a stall, which is earlier than the deadline.
        let hedge = Duration::from_secs(1);
        let storage = match seed.is_multiple_of(2) {
            true => faulty.builder().hedge_after(hedge).build().unwrap(),
            false => faulty.storage(),
        };
        let spans = (0..5).map(|_| {
            let start = faulty.number(1000);
            (start, faulty.number(1001 - start) as usize)
        });
        let spans = spans.collect::<Vec<_>>();
        let ranges = spans
            .iter()
            .map(|(start, len)| ReadInto { byte_offset: *start, buffer: Buffer::zeroed(*len) });
        match storage.read(&key(), ReadRequest::new(ranges.collect())).await {
            Ok(read) => {
                for ((start, len), buffer) in spans.iter().zip(&read.buffers) {
                    assert_eq!(buffer[..], bytes[*start as usize..][..*len], "seed {seed}");
                }
            }
            Err(error) => {
                failed += 1;
                let shown = error.to_string();
                assert_eq!(error.kind(), Kind::Transient, "seed {seed}: {shown}");
                assert!(shown.contains("run/object") && shown.contains("attempts"), "{shown}");
                assert!(shown.contains("bytes "), "{shown}");
            }
        }
        match storage.read_whole(&key(), 1000).await {
            Ok(whole) => assert!(whole.bytes == bytes, "seed {seed}"),
            Err(error) => assert_eq!(error.kind(), Kind::Transient, "seed {seed}: {error}"),
        }
    }
    assert!(failed < 60, "{failed} of 600 reads failed");
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_a_byte_a_second_is_ended_by_the_stall_and_by_the_deadline() {
    let day = Duration::from_secs(86400);
    let seconds = Duration::from_secs;
    for (stall, deadline, max) in
        [(seconds(2), day, 600), (day, seconds(5), 20), (seconds(30), seconds(180), 300)]
    {
        let faulty = Faulty::new(1, 0);
        put_directly(&faulty.store, &pattern(1, 5000)).await;
        faulty.drips.store(true, Ordering::SeqCst);
        let builder = faulty.builder().request_bytes(10_000);
        let storage = builder.stall_timeout(stall).deadline(deadline).build().unwrap();
        let start = tokio::time::Instant::now();
        let error = storage.read_range(&key(), 0..5000).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Transient, "{error}");
        let error = storage.read_whole(&key(), 5000).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Transient, "{error}");
        assert!(start.elapsed() < 2 * seconds(max), "{:?}", start.elapsed());
    }
}

/// Of several creators one wins and gets success, though answers are lost.
#[tokio::test(start_paused = true)]
async fn a_creation_whose_answer_was_lost_is_not_refused() {
    for seed in 0..300 {
        let faulty = Faulty::new(seed, 1 + seed % 3);
        let storage = faulty.storage();
        let creators = (0..4).map(|number| {
            let (storage, bytes) = (storage.clone(), pattern(number, 50));
            async move { storage.put(&key(), bytes.into(), PutMode::Create).await }
        });
        let done = join_all(creators).await;
        let winners = done.iter().filter(|done| done.is_ok()).count();
        let unknown = done
            .iter()
            .filter(|done| done.as_ref().is_err_and(|error| error.kind() != Kind::AlreadyExists));
        let unknown = unknown.count();
        assert!(winners == 1 || (winners == 0 && unknown > 0), "seed {seed}: {done:?}");
        if let Some(winner) = done.iter().position(|done| done.is_ok()) {
            let path = Path::parse(key().as_str()).unwrap();
            let found = faulty.store.get_opts(&path, GetOptions::new()).await.unwrap();
            let stored = found.bytes().await.unwrap();
            assert!(stored == pattern(winner as u64, 50), "seed {seed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn updates_whose_answers_were_lost_are_not_conflicts() {
    for seed in 0..200 {
        let faulty = Faulty::new(seed, 1 + seed % 3);
        let storage = faulty.storage();
        put_directly(&faulty.store, b"old").await;
        let Ok(mut meta) = storage.stat(&key()).await else { continue };
        for number in 0..5 {
            let mode = PutMode::Update(meta.version.clone().unwrap());
            match storage.put(&key(), pattern(number, 20).into(), mode).await {
                Ok(replaced) => meta = replaced,
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Transient, "seed {seed}: {error}");
                    break;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn uploads_are_whole_or_absent() {
    for seed in 0..300 {
        let faulty = Faulty::new(seed, seed % 4);
        let storage = faulty.storage();
        let bytes = pattern(seed, 250);
        let upload = async {
            let options = UploadOptions::new(PutMode::Create, 100);
            let mut upload = storage.start_upload(&key(), options).await?;
            for part in bytes.chunks(100) {
                upload.put_part(Payload::from(part.to_vec())).await?;
            }
            upload.complete().await
        };
        let done = upload.await;
        let path = Path::parse(key().as_str()).unwrap();
        let found = faulty.store.get_opts(&path, GetOptions::new()).await;
        match (done, found) {
            (Ok(meta), found) => {
                assert_eq!(meta.byte_len, 250);
                assert!(found.unwrap().bytes().await.unwrap() == bytes, "seed {seed}");
            }
            (Err(_), Ok(found)) => assert!(found.bytes().await.unwrap() == bytes, "seed {seed}"),
            (Err(error), Err(_)) => assert_eq!(error.kind(), Kind::Transient, "{error}"),
        }
        let listed = storage.list(None).try_collect::<Vec<_>>().await;
        let listed = listed.unwrap_or_default();
        assert!(listed.iter().all(|meta| meta.key == key()), "{listed:?}");
        let removed = storage.leftovers(None, Duration::ZERO, LeftoverAction::Remove).await;
        if removed.is_ok() {
            let left = faulty.store.list(None).try_collect::<Vec<_>>().await.unwrap();
            assert!(left.iter().all(|object| object.location == path), "seed {seed}: {left:?}");
        }
    }
}

/// A listing is continued behind the last object, and has each once.
#[tokio::test(start_paused = true)]
async fn listings_that_break_off_are_continued() {
    let mut failed = 0;
    for seed in 0..200 {
        let faulty = Faulty::new(seed, seed % 6);
        let mut names = Vec::new();
        for number in 0..seed % 9 {
            let name = format!("run/step{}/{number}", number % 3);
            let path = Path::parse(&name).unwrap();
            faulty.store.put_opts(&path, "x".into(), PutOptions::default()).await.unwrap();
            names.push(name);
        }
        names.sort();
        let folder = Key::new("run").unwrap();
        match faulty.storage().list(Some(&folder)).try_collect::<Vec<_>>().await {
            Ok(listed) => {
                let mut listed: Vec<_> = listed.iter().map(|meta| meta.key.to_string()).collect();
                listed.sort();
                assert_eq!(listed, names, "seed {seed}");
            }
            Err(error) => {
                failed += 1;
                assert_eq!(error.kind(), Kind::Transient, "seed {seed}: {error}");
                assert!(error.to_string().contains("the prefix is \"run/\", after"), "{error}");
            }
        }
    }
    assert!(failed < 20, "{failed} of 200 listings failed");
}

/// A read that gets no answer is requested again, and one that gets a part of it for the rest.
#[tokio::test(start_paused = true)]
async fn a_hedged_read_does_not_wait_for_a_stall() {
    for seed in 0..100 {
        let faulty = Faulty::new(seed, 4);
        put_directly(&faulty.store, &pattern(seed, 1000)).await;
        let forever = Duration::from_secs(u32::MAX.into());
        let hedged = faulty.builder().stall_timeout(forever).deadline(forever);
        let storage = hedged.hedge_after(Duration::from_secs(1)).build().unwrap();
        let start = tokio::time::Instant::now();
        let read = storage.read_range(&key(), 100..200).await;
        assert!(read.is_err() || read.unwrap() == pattern(seed, 1000)[100..200]);
        assert!(start.elapsed() < forever, "seed {seed}");
    }
}

/// One request for near ranges, and none for what is not needed.
#[tokio::test]
async fn near_ranges_are_one_request() {
    let faulty = Faulty::new(1, 0);
    put_directly(&faulty.store, &pattern(1, 1000)).await;
    let storage = faulty.storage();
    let range = |byte_offset, len| ReadInto { byte_offset, buffer: Buffer::zeroed(len) };
    let request = ReadRequest::new(vec![range(0, 20), range(25, 10), range(500, 5), range(40, 0)]);
    storage.read(&key(), request).await.unwrap();
    assert_eq!(faulty.gets.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_object_that_changes_between_requests_is_changed() {
    let faulty = Faulty::new(1, 0);
    put_directly(&faulty.store, b"old bytes").await;
    let storage = faulty.storage();
    let version = storage.stat(&key()).await.unwrap().version;
    put_directly(&faulty.store, b"new bytes").await;
    let range = ReadInto { byte_offset: 0, buffer: Buffer::zeroed(3) };
    let request = ReadRequest::new(vec![range]).with_if_version(version);
    let error = storage.read(&key(), request).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Changed, "{error}");
    assert_eq!(storage.read_range(&key(), 0..3).await.unwrap(), "new");
}
