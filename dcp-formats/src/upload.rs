//! Streams items into a file, in bounded memory, without copying tensor data, with CRCs computed on
//! the way.

mod assembly;
mod lanes;
mod parts;
mod send;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use self::lanes::Lanes;
use self::parts::Parts;
use self::send::{PartLens, send};
use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PutMode, Upload, UploadOptions};
use dcp_core::{
    CheckpointError, FormatError, Key, Payload, Storage, StorageError, StorageErrorKind,
};

/// Receives the number of bytes after each read or write.
pub type ByteProgress = Arc<dyn Fn(u64) + Send + Sync>;

/// The default of [`FileOptions::upload_bytes`]: four parts of the default length.
const UPLOAD_BYTES: u64 = 64 << 20;
/// The maximum bytes of parts that are being written, of a save.
const UPLOAD_BYTES_MAX: u64 = 256 << 20;

/// The bytes of a file around each item.
pub(crate) trait Framing: fmt::Debug + Send + Sync {
    /// The bytes before the item at `position`.
    fn before(&self, position: usize) -> Result<Bytes, FormatError>;

    /// The bytes after it, given the CRC-32 of the item's bytes.
    fn after(&self, position: usize, crc32: u32) -> Result<Bytes, FormatError>;

    /// Whether [`after`](Self::after) uses the CRC.
    fn needs_crc(&self, position: usize) -> bool;

    /// The item's name, for errors.
    fn name(&self, position: usize) -> &str;

    /// The encoder of items, with the bytes around them, on their way into the file. The length of the
    /// file is then only a limit, and [`stored`](Self::stored) receives where items are.
    fn encoder(&self) -> Option<Box<dyn ItemEncoder>> {
        None
    }

    /// Receives the range of the file that the encoded item at `position` takes.
    fn stored(&self, _position: usize, _range: Range<u64>) {}
}

/// Changes the bytes of one item after the other.
pub(crate) trait ItemEncoder: Send {
    /// Begins the item at `position`.
    fn begin(&mut self, position: usize) -> Result<(), FormatError>;

    /// Encodes the next bytes of the item.
    fn push(&mut self, bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError>;

    /// Ends the item.
    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError>;
}

/// An item of a file: its position in the [`DataSource`], and its length in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileItem {
    pub(crate) item: usize,
    pub(crate) byte_len: u64,
}

/// A file of `byte_len` bytes to write, or of at most as many if its framing has an encoder.
#[derive(Debug)]
pub(crate) struct FileSpec<'a> {
    pub(crate) key: &'a Key,
    pub(crate) byte_len: u64,
    pub(crate) items: Arc<[FileItem]>,
    pub(crate) framing: Arc<dyn Framing>,
}

/// Writes a file that does not exist yet. Nothing remains of it on failure.
pub(crate) async fn write_file(
    storage: &dyn Storage,
    file: FileSpec<'_>,
    data: &Arc<dyn DataSource>,
    options: FileOptions,
    progress: Option<&ByteProgress>,
) -> Result<ObjectMeta, CheckpointError> {
    let pending = prepare_file(storage, file, options, data, progress).await?;
    Ok(pending.publish().await?)
}

/// Options of writing a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileOptions {
    /// Whether an existing file is replaced.
    pub mode: PutMode,
    /// Data segments in flight, of [`DataSource::segment_bytes`] each, in file order.
    pub in_flight: usize,
    /// Bytes of parts that are being written, and of the next one. Two parts are the minimum.
    pub upload_bytes: u64,
}

impl FileOptions {
    /// One segment at a time, and 64 MiB of parts.
    #[must_use]
    pub fn new(mode: PutMode) -> Self {
        Self { mode, in_flight: 1, upload_bytes: UPLOAD_BYTES }
    }

    /// Sets the number of bytes in flight to the storage.
    #[must_use]
    pub fn with_upload_bytes(mut self, bytes: u64) -> Self {
        self.upload_bytes = bytes;
        self
    }

    /// Sets the number of segments in flight.
    #[must_use]
    pub fn with_in_flight(mut self, segments: usize) -> Self {
        self.in_flight = segments.max(1);
        self
    }
}

/// A complete file without its name: in memory if it is small, uploaded otherwise.
#[derive(Debug)]
#[must_use = "it is not a file until it is published"]
pub struct PendingFile<'a> {
    storage: &'a dyn Storage,
    key: Key,
    byte_len: u64,
    mode: PutMode,
    bytes: PendingBytes,
}

#[derive(Debug)]
enum PendingBytes {
    InMemory(Payload),
    Sent(Box<dyn Upload>),
}

impl PendingFile<'_> {
    /// The size of the file in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// Gives the file its name.
    ///
    /// # Errors
    ///
    /// When the storage fails, or the name is taken and the file may not be replaced.
    pub async fn publish(self) -> Result<ObjectMeta, StorageError> {
        let meta = match self.bytes {
            PendingBytes::InMemory(whole) => self.storage.put(&self.key, whole, self.mode).await,
            PendingBytes::Sent(upload) => upload.complete().await,
        }?;
        check_stored(&self.key, self.byte_len, &meta)?;
        Ok(meta)
    }

    /// Discards the file.
    pub async fn abort(self) {
        if let PendingBytes::Sent(upload) = self.bytes {
            abort(&self.key, upload).await;
        }
    }
}

/// The bytes of parts that a save of lent memory keeps in flight to a storage: as many parts as the
/// storage handles concurrently, in 64 to 256 MiB, and the next one, which needs no memory.
pub(crate) fn upload_bytes(storage: &dyn Storage) -> u64 {
    let capabilities = storage.capabilities();
    let part_bytes = capabilities.write_limits.part_bytes;
    part_bytes
        .saturating_mul(u64::from(capabilities.parallelism))
        .clamp(UPLOAD_BYTES, UPLOAD_BYTES_MAX)
        .saturating_add(part_bytes)
}

/// Fails unless the storage has as many bytes as were written.
fn check_stored(key: &Key, byte_len: u64, meta: &ObjectMeta) -> Result<(), StorageError> {
    if meta.byte_len == byte_len {
        return Ok(());
    }
    Err(StorageError::new(StorageErrorKind::Truncated, StorageOp::Upload, Some(key.clone()))
        .with_message(format!("the storage has {} bytes, {byte_len} were written", meta.byte_len)))
}

/// The options of uploading an object of `byte_len` bytes.
///
/// # Errors
///
/// [`TooLarge`](StorageErrorKind::TooLarge) when the storage takes no object of that length.
pub(crate) fn upload_options(
    storage: &dyn Storage,
    key: &Key,
    mode: PutMode,
    byte_len: u64,
) -> Result<UploadOptions, StorageError> {
    let limits = storage.capabilities().write_limits;
    let part_bytes = limits.part_bytes_for(byte_len).ok_or_else(|| {
        let longest = limits.object_bytes_max;
        StorageError::new(StorageErrorKind::TooLarge, StorageOp::Upload, Some(key.clone()))
            .with_message(format!(
                "it has {byte_len} bytes; an object of this storage has at most {longest}, in at \
                 most {} parts of at most {} bytes. Write more files, or smaller ones",
                limits.parts_max, limits.part_bytes_max
            ))
    })?;
    Ok(UploadOptions::new(mode, part_bytes).with_byte_len(byte_len))
}

async fn abort(key: &Key, upload: Box<dyn Upload>) {
    if let Err(error) = upload.abort().await {
        tracing::debug!(file = %key, %error, "cannot abort an upload");
    }
}

/// Writes a file without its name. Nothing remains of it on failure.
pub(crate) async fn prepare_file<'a>(
    storage: &'a dyn Storage,
    file: FileSpec<'_>,
    options: FileOptions,
    data: &Arc<dyn DataSource>,
    progress: Option<&ByteProgress>,
) -> Result<PendingFile<'a>, CheckpointError> {
    let mode = options.mode.clone();
    let (key, byte_len) = (file.key.clone(), file.byte_len);
    let report = |written: u64| {
        if let Some(progress) = progress {
            progress(written);
        }
    };
    upload_options(storage, &key, mode.clone(), byte_len)?;
    let limits = storage.capabilities().write_limits;
    if byte_len <= limits.part_bytes.min(limits.put_bytes_max) {
        let mut parts = Parts::new(&file, data, options.in_flight);
        let whole = parts.next(u64::MAX).await?.unwrap_or_default();
        let byte_len = check_len(&file, parts.has_exact_len(), whole.len())?;
        report(byte_len);
        let bytes = PendingBytes::InMemory(whole);
        return Ok(PendingFile { storage, key, byte_len, mode, bytes });
    }
    let how = Sending { options, hashed: false };
    let sent = send_file(storage, file, data, how, progress).await?;
    let byte_len = sent.byte_len;
    let bytes = PendingBytes::Sent(sent.upload);
    Ok(PendingFile { storage, key, byte_len, mode, bytes })
}

/// An uploaded file that has no name yet.
#[derive(Debug)]
pub(crate) struct SentFile {
    pub(crate) key: Key,
    pub(crate) byte_len: u64,
    /// The CRC-32 of all bytes, if requested.
    pub(crate) crc32: u32,
    pub(crate) upload: Box<dyn Upload>,
}

/// Options of an upload.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) options: FileOptions,
    /// Whether to compute the file's CRC-32.
    pub(crate) hashed: bool,
}

impl SentFile {
    /// Gives the file its name.
    pub(crate) async fn publish(self) -> Result<ObjectMeta, StorageError> {
        let meta = self.upload.complete().await?;
        check_stored(&self.key, self.byte_len, &meta)?;
        Ok(meta)
    }

    /// Discards the file.
    pub(crate) async fn abort(self) {
        abort(&self.key, self.upload).await;
    }
}

/// Uploads a file, which gets its name when the upload completes. Nothing remains of it on failure.
pub(crate) async fn send_file(
    storage: &dyn Storage,
    file: FileSpec<'_>,
    data: &Arc<dyn DataSource>,
    how: Sending,
    progress: Option<&ByteProgress>,
) -> Result<SentFile, CheckpointError> {
    let report = |written: u64| {
        if let Some(progress) = progress {
            progress(written);
        }
    };
    let mut parts = Parts::new(&file, data, how.options.in_flight);
    let (key, byte_len) = (file.key.clone(), file.byte_len);
    let mut options = upload_options(storage, &key, how.options.mode, byte_len)?;
    let has_exact_len = parts.has_exact_len();
    if !has_exact_len {
        options.byte_len = None;
    } else if let Some(lanes) = Lanes::of(storage, &file, data, how.options.in_flight) {
        options.part_bytes = lanes.part_bytes;
        let upload = storage.start_upload(&key, options).await?;
        let (upload, sent) = lanes.send(&file, data, upload, how.hashed, progress).await;
        let sent = sent.and_then(|sent| Ok((check_len(&file, true, sent.byte_len)?, sent.crc32)));
        return match (upload, sent) {
            (Some(upload), Ok((byte_len, crc32))) => {
                Ok(SentFile { key, byte_len, crc32: crc32.unwrap_or(0), upload })
            }
            (Some(upload), Err(error)) => {
                abort(&key, upload).await;
                Err(error)
            }
            (None, sent) => Err(sent.err().unwrap_or(CheckpointError::Canceled)),
        };
    }
    // A part may be 1/64 longer than the storage's preferred length.
    let in_flight = how.options.upload_bytes.saturating_add(how.options.upload_bytes / 64);
    let lens = PartLens { part_bytes: options.part_bytes, in_flight };
    let upload = storage.start_upload(&key, options).await?;
    let mut sent = SentFile { key, byte_len, crc32: 0, upload };
    let mut hasher = how.hashed.then(crc32fast::Hasher::new);
    let mut hashed = |part: &Payload| {
        if let Some(hasher) = &mut hasher {
            part.pieces().iter().for_each(|piece| hasher.update(piece));
        }
    };
    let done = send(&mut *sent.upload, &mut parts, lens, &mut hashed, &report).await;
    match done.and_then(|len| check_len(&file, has_exact_len, len)) {
        Ok(byte_len) => {
            let crc32 = hasher.map_or(0, crc32fast::Hasher::finalize);
            Ok(SentFile { crc32, byte_len, ..sent })
        }
        Err(error) => {
            sent.abort().await;
            Err(error)
        }
    }
}

/// The length of a file of which `len` bytes were made.
fn check_len(file: &FileSpec<'_>, exact: bool, len: u64) -> Result<u64, CheckpointError> {
    if len == file.byte_len || (!exact && len < file.byte_len) {
        return Ok(len);
    }
    let problem = format!("{len} bytes were made of the {} planned", file.byte_len);
    Err(FormatError::new("file to write", problem).in_file(file.key.as_str(), len).into())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};

    use async_trait::async_trait;
    use dcp_core::StorageError;
    use dcp_core::storage::{OwnThreads, PartFuture};
    use dcp_testing::block_on;
    use tokio::sync::Notify;

    use super::*;

    const LEN: u64 = 40;

    /// Bytes that count up, ten at a time, as many as the limit allows.
    #[derive(Debug)]
    struct Counting {
        given: AtomicU64,
        good: u64,
    }

    #[async_trait]
    impl DataSource for Counting {
        async fn resolve(&self, _: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
            tokio::task::yield_now().await;
            if range.end > self.good {
                return Err(FormatError::new("item", "is damaged").into());
            }
            self.given.store(range.end, Ordering::Relaxed);
            Ok(Payload::from(Bytes::from_iter(range.map(|byte| byte as u8))))
        }

        fn segment_bytes(&self) -> u64 {
            10
        }

        fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
            None
        }
    }

    #[derive(Debug)]
    struct NoFraming;

    impl Framing for NoFraming {
        fn before(&self, _: usize) -> Result<Bytes, FormatError> {
            Ok(Bytes::new())
        }

        fn after(&self, _: usize, _: u32) -> Result<Bytes, FormatError> {
            Ok(Bytes::new())
        }

        fn needs_crc(&self, _: usize) -> bool {
            false
        }

        fn name(&self, _: usize) -> &'static str {
            "counting"
        }
    }

    /// Takes a part when the test releases it.
    #[derive(Debug, Default)]
    struct Slow {
        taken: Arc<Mutex<Vec<u8>>>,
        /// Bytes of parts so far.
        begun: usize,
        go_on: Option<Arc<Notify>>,
    }

    #[async_trait]
    impl Upload for Slow {
        fn put_part(&mut self, part: Payload) -> PartFuture {
            let (go_on, taken) = (self.go_on.clone(), Arc::clone(&self.taken));
            let begun = self.begun;
            self.begun += part.len() as usize;
            Box::pin(async move {
                if let Some(go_on) = &go_on {
                    go_on.notified().await;
                }
                tokio::task::yield_now().await;
                let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
                let end = begun + part.len() as usize;
                let len = taken.len().max(end);
                taken.resize(len, 0);
                taken[begun..end].copy_from_slice(&part.to_bytes());
                Ok(())
            })
        }

        async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
            Ok(ObjectMeta::new(Key::new("file").unwrap(), self.begun as u64))
        }

        async fn abort(self: Box<Self>) -> Result<(), StorageError> {
            Ok(())
        }
    }

    async fn sent(
        upload: &mut Slow,
        data: &Arc<Counting>,
        in_flight: u64,
    ) -> Result<u64, CheckpointError> {
        let key = Key::new("file").unwrap();
        let items = Arc::new([FileItem { item: 0, byte_len: LEN }]);
        let file = FileSpec { key: &key, byte_len: LEN, items, framing: Arc::new(NoFraming) };
        let lens = PartLens { part_bytes: 10, in_flight };
        let data: Arc<dyn DataSource> = Arc::clone(data) as _;
        send(upload, &mut Parts::new(&file, &data, 1), lens, &mut |_| (), &|_| ()).await
    }

    #[test]
    fn as_many_bytes_as_allowed_are_on_their_way_and_the_next_part_is_ready() {
        for (in_flight, expected) in [(0, 20), (10, 20), (20, 20), (30, 30), (35, 30), (99, 40)] {
            check_in_flight(in_flight, expected);
        }
    }

    fn check_in_flight(in_flight: u64, expected: u64) {
        let data = Arc::new(Counting { given: AtomicU64::new(0), good: LEN });
        let go_on = Arc::new(Notify::new());
        let mut upload = Slow { go_on: Some(Arc::clone(&go_on)), ..Slow::default() };
        let taken = Arc::clone(&upload.taken);
        block_on(async {
            let watch = async {
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
                let ahead = data.given.load(Ordering::Relaxed);
                assert_eq!(ahead, expected, "{in_flight} bytes may be in flight");
                for _ in 0..LEN / 10 {
                    go_on.notify_one();
                    for _ in 0..100 {
                        tokio::task::yield_now().await;
                    }
                }
            };
            let (sent, ()) =
                futures_util::future::join(sent(&mut upload, &data, in_flight), watch).await;
            assert_eq!(sent.unwrap(), LEN);
        });
        let expected: Vec<u8> = (0..LEN as u8).collect();
        assert_eq!(*taken.lock().unwrap(), expected);
    }

    #[test]
    fn a_part_that_cannot_be_made_does_not_cut_off_the_one_on_its_way() {
        let data = Arc::new(Counting { given: AtomicU64::new(0), good: 20 });
        let mut upload = Slow::default();
        let error = block_on(sent(&mut upload, &data, 0)).unwrap_err();
        assert!(dcp_core::error::error_chain(&error).contains("is damaged"), "{error}");
        assert_eq!(upload.taken.lock().unwrap().len(), 20);
    }

    /// Notes how many segments are requested at once.
    #[derive(Debug, Default)]
    struct Crowded {
        now: AtomicU64,
        most: AtomicU64,
    }

    #[async_trait]
    impl DataSource for Crowded {
        async fn resolve(&self, _: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
            let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
            self.most.fetch_max(now, Ordering::Relaxed);
            // The later a segment, the sooner it is there.
            for _ in range.start..LEN {
                tokio::task::yield_now().await;
            }
            self.now.fetch_sub(1, Ordering::Relaxed);
            Ok(Payload::from(Bytes::from_iter(range.map(|byte| byte as u8))))
        }

        fn segment_bytes(&self) -> u64 {
            4
        }

        fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
            None
        }
    }

    #[test]
    fn as_many_segments_as_allowed_are_asked_for_at_once_and_taken_in_order() {
        for in_flight in [1, 3, 100] {
            let data = Arc::new(Crowded::default());
            let key = Key::new("file").unwrap();
            let items = [0, 18, 0, LEN - 18].map(|byte_len| FileItem { item: 0, byte_len });
            let (items, framing) = (Arc::new(items), Arc::new(NoFraming));
            let file = FileSpec { key: &key, byte_len: LEN, items, framing };
            let source: Arc<dyn DataSource> = Arc::clone(&data) as _;
            let whole = block_on(Parts::new(&file, &source, in_flight).next(u64::MAX)).unwrap();
            let expected: Vec<u8> = (0..18).chain(0..LEN as u8 - 18).collect();
            assert_eq!(whole.unwrap().to_bytes(), expected);
            assert_eq!(data.most.load(Ordering::Relaxed), in_flight.min(11) as u64);
        }
    }
}
