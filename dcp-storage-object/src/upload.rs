//! Objects that are written in parts.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{ObjectMeta, PartFuture, PutMode, Upload, UploadOptions};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind as Kind};
use futures_util::future::{join, ready};
use object_store::path::Path;
use object_store::{CopyMode, CopyOptions, MultipartUpload, PutResult};
use tokio::runtime::Handle;

use crate::error::Failure;
use crate::inner::Inner;
use crate::native::Completion;
use crate::object_read::get_options;
use crate::path::upload_path;
use crate::retry::Attempts;
use crate::write::{Mark, missing_is_conflict};

/// The step by which the object gets its key.
enum Step {
    /// The upload is to the key, and replaces an object that is there.
    Replace,
    /// The upload is to the key, and is completed with the condition of the mode.
    Condition(Arc<dyn Completion>),
    /// The upload is to another path, from which the object is copied if the condition holds.
    Copy(Path),
}

/// An upload that has begun.
struct ObjectUpload {
    inner: Arc<Inner>,
    key: Key,
    path: Path,
    options: UploadOptions,
    mark: Mark,
    step: Step,
    /// `None` once it has ended. The lock is never contended: the type behind it is not `Sync`.
    upload: Mutex<Option<Box<dyn MultipartUpload>>>,
    /// Of each part, whether it was written.
    parts: Vec<Arc<AtomicBool>>,
    len: u64,
    /// A part was shorter than the others, so it has to be the last.
    is_last: bool,
    refused: bool,
}

impl fmt::Debug for ObjectUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectUpload")
            .field("key", &self.key)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}

/// Begins an upload.
pub(crate) async fn start(
    inner: &Arc<Inner>,
    key: &Key,
    options: UploadOptions,
) -> Result<Box<dyn Upload>, StorageError> {
    let path = inner.prefix.path(Op::Upload, key)?;
    inner.check_writable(Op::Upload, Some(key))?;
    let mark = Mark::new();
    let mut attempts = Attempts::new(inner.retry);
    let begun = async {
        let step = step(inner, &path, &options, &mark)?;
        let to = if let Step::Copy(path) = &step { path } else { &path };
        if options.mode != PutMode::Create {
            let upload = inner.begin(to, &mark, &mut attempts).await?;
            return Ok((step, upload));
        }
        // Early, before parts are sent for nothing.
        let mut of_look = attempts.clone();
        let look = inner.refuse_taken(Op::Upload, &path, &mut of_look);
        let (free, upload) = join(look, inner.begin(to, &mark, &mut attempts)).await;
        match (free, upload) {
            (Ok(()), upload) => Ok((step, upload?)),
            (Err(taken), upload) => {
                if let Ok(upload) = upload {
                    discard(inner, upload, key).await;
                }
                Err(taken)
            }
        }
    };
    match begun.await {
        Ok((step, upload)) => Ok(Box::new(ObjectUpload {
            inner: Arc::clone(inner),
            key: key.clone(),
            path,
            options,
            mark,
            step,
            upload: Mutex::new(Some(upload)),
            parts: Vec::new(),
            len: 0,
            is_last: false,
            refused: false,
        })),
        Err(failure) => {
            let failure: Failure = failure;
            Err(failure.into_error(Op::Upload, Some(key), &attempts.summary()))
        }
    }
}

fn step(inner: &Inner, path: &Path, options: &UploadOptions, mark: &Mark) -> Result<Step, Failure> {
    let limits = &inner.capabilities.write_limits;
    let allowed = limits.part_bytes_min..=limits.part_bytes_max;
    if !allowed.contains(&options.part_bytes) {
        let cause = format!("parts of {} bytes; allowed are {allowed:?}", options.part_bytes);
        return Err(Failure::new(Kind::Invalid, cause));
    }
    if options.byte_len.is_some_and(|len| len > limits.object_bytes_max) {
        let cause = format!("an object has at most {} bytes", limits.object_bytes_max);
        return Err(Failure::new(Kind::TooLarge, cause));
    }
    match (&options.mode, &inner.completion) {
        (PutMode::Overwrite, _) => Ok(Step::Replace),
        (PutMode::Create, _) if !inner.capabilities.atomic_create => Ok(Step::Replace),
        _ if !inner.capabilities.conditional_put => {
            Err(Failure::new(Kind::Unsupported, "the store checks no versions"))
        }
        (_, Some(completion)) => Ok(Step::Condition(Arc::clone(completion))),
        (_, None) => Ok(Step::Copy(upload_path(path, &mark.0))),
    }
}

impl ObjectUpload {
    fn open(&mut self) -> &mut Option<Box<dyn MultipartUpload>> {
        self.upload.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse(&mut self, cause: String) -> PartFuture {
        self.refused = true;
        let error = StorageError::new(Kind::Invalid, Op::Upload, Some(self.key.clone()));
        Box::pin(ready(Err(error.with_message(cause))))
    }

    /// The reason why the upload cannot be completed, if it cannot.
    fn missing(&self) -> Option<Failure> {
        if self.refused {
            return Some(Failure::new(Kind::Invalid, "a part was refused"));
        }
        let missing = self.parts.iter().position(|part| !part.load(Ordering::Acquire))?;
        Some(Failure::new(Kind::Other, format!("part {missing} was not written")))
    }

    async fn finish(&mut self, attempts: &mut Attempts) -> Result<ObjectMeta, Failure> {
        let checked = match self.missing() {
            Some(failure) => Err(failure),
            None => self.check_condition(attempts).await,
        };
        if let Err(failure) = checked {
            self.discard().await;
            return Err(failure);
        }
        let Some(mut upload) = self.open().take() else {
            return Err(Failure::new(Kind::Invalid, "the upload has ended"));
        };
        let result = match &self.step {
            Step::Replace => {
                let request = upload.complete();
                let done = attempts.request(Op::Upload, request).await;
                self.recognized(&self.path, done, attempts).await
            }
            Step::Condition(completion) => {
                let request = completion.complete(upload.as_mut(), &self.options.mode);
                let done = attempts.request(Op::Upload, request).await;
                let done = done.map_err(|failure| self.refusal(failure));
                self.recognized(&self.path, done, attempts).await
            }
            Step::Copy(from) => {
                let request = upload.complete();
                let done = attempts.request(Op::Upload, request).await;
                match self.recognized(from, done, attempts).await {
                    Ok(_) => self.publish(from, attempts).await,
                    Err(failure) => Err(failure),
                }
            }
        };
        if result.is_err() {
            *self.open() = Some(upload);
            self.discard().await;
        }
        result
    }

    /// Looks whether the condition of the mode holds, where the request of the completion may not
    /// check it: some stores that speak the protocol of S3 ignore `If-Match` in it.
    async fn check_condition(&self, attempts: &mut Attempts) -> Result<(), Failure> {
        match (&self.options.mode, &self.step) {
            (PutMode::Create, Step::Replace) => {
                self.inner.refuse_taken(Op::Upload, &self.path, attempts).await
            }
            (PutMode::Update(version), _) => {
                let path = &self.path;
                self.inner.check_version(Op::Upload, path, version, attempts).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// The meaning of a failed condition in the mode of the upload.
    fn refusal(&self, failure: Failure) -> Failure {
        match (&self.options.mode, failure.kind) {
            (PutMode::Create, Kind::Conflict) => failure.with_kind(Kind::AlreadyExists),
            (PutMode::Update(_), Kind::AlreadyExists) => failure.with_kind(Kind::Conflict),
            (PutMode::Update(_), _) => missing_is_conflict(failure, true),
            _ => failure,
        }
    }

    /// The object that a completion made, also if its answer was lost.
    async fn recognized(
        &self,
        path: &Path,
        done: Result<PutResult, Failure>,
        attempts: &mut Attempts,
    ) -> Result<ObjectMeta, Failure> {
        match done {
            Ok(done) => {
                let version = self.inner.version_of_tag(done.e_tag);
                Ok(ObjectMeta::new(self.key.clone(), self.len).with_version(version))
            }
            // A repeated completion finds the key taken, or no upload.
            Err(failure) => match self.inner.marked(Op::Upload, path, &self.mark, attempts).await {
                Some(found) if found.meta.size == self.len => {
                    Ok(self.inner.meta(&self.key, found.meta))
                }
                _ => Err(failure),
            },
        }
    }

    /// Copies the object to its key, and deletes it where it was.
    async fn publish(&self, from: &Path, attempts: &mut Attempts) -> Result<ObjectMeta, Failure> {
        let copied = loop {
            let failure = match self.copy(from, attempts).await {
                Ok(()) => break Ok(()),
                Err(failure) => self.refusal(failure),
            };
            // A repeated copy finds its own object.
            if failure.is_condition()
                && self.inner.marked(Op::Upload, &self.path, &self.mark, attempts).await.is_some()
            {
                break Ok(());
            }
            if let Err(failure) = attempts.pause(failure).await {
                break Err(failure);
            }
        };
        // What is left of it is removed with the leftovers.
        let mut attempts_at_delete = Attempts::new(self.inner.retry);
        let from = std::slice::from_ref(from);
        if let Err(failure) = self.inner.delete_once(from, &mut attempts_at_delete).await {
            tracing::warn!(key = %self.key, %failure, "an uploaded object was not deleted");
        }
        copied?;
        let found = self.inner.head(Op::Upload, &self.path, attempts).await?;
        Ok(self.inner.meta(&self.key, found.meta))
    }

    /// Copies the object to its key under the condition of the mode.
    async fn copy(&self, from: &Path, attempts: &mut Attempts) -> Result<(), Failure> {
        let (inner, to) = (&self.inner, &self.path);
        let PutMode::Update(version) = &self.options.mode else {
            let options = CopyOptions::new().with_mode(CopyMode::Create);
            return attempts.request(Op::Upload, inner.store.copy_opts(from, to, options)).await;
        };
        let found = inner.check_version(Op::Upload, to, version, attempts).await?;
        if let Some(replacement) = &inner.replacement {
            let generation = found.meta.version.ok_or_else(|| {
                Failure::new(Kind::Unsupported, "the store returned no generation of the object")
            })?;
            let request = replacement.replace(from, to, &generation);
            return attempts.request(Op::Upload, request).await;
        }
        // A store of which nothing is known takes a condition only with the bytes.
        let read = async {
            let found = inner.store.get_opts(from, get_options()).await?;
            found.bytes().await
        };
        let bytes = attempts.request(Op::Upload, read).await?;
        if bytes.len() as u64 != self.len {
            return Err(Failure::new(Kind::Transient, "the answer ended early"));
        }
        let payload = bytes.into();
        let put = inner.put_once(to, &payload, &self.options.mode, &self.mark, attempts);
        put.await.map(drop)
    }

    /// Aborts the upload in the store, which may have ended it already.
    async fn discard(&mut self) {
        if let Some(upload) = self.open().take() {
            discard(&self.inner, upload, &self.key).await;
        }
    }
}

async fn discard(inner: &Inner, mut upload: Box<dyn MultipartUpload>, key: &Key) {
    let mut attempts = Attempts::new(inner.retry);
    match attempts.request(Op::Upload, upload.abort()).await {
        Err(failure) if failure.kind != Kind::NotFound => {
            tracing::warn!(%key, %failure, "an upload was not aborted");
        }
        _ => {}
    }
}

#[async_trait]
impl Upload for ObjectUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let limits = &self.inner.capabilities.write_limits;
        let (len, part_bytes) = (part.len(), self.options.part_bytes);
        if len == 0 {
            return Box::pin(ready(Ok(())));
        }
        if len > part_bytes || self.is_last {
            return self.refuse(format!("all parts but the last have {part_bytes} bytes"));
        }
        if self.parts.len() as u64 >= u64::from(limits.parts_max) {
            return self.refuse(format!("an object has at most {} parts", limits.parts_max));
        }
        let payload = self.inner.pieces(&part);
        let Some(upload) = self.open().as_mut() else {
            return self.refuse("the upload has ended".to_owned());
        };
        let request = upload.put_part(payload);
        let written = Arc::new(AtomicBool::new(false));
        let number = self.parts.len();
        self.parts.push(Arc::clone(&written));
        self.is_last = len < part_bytes;
        self.len += len;
        let mut attempts = self.inner.write_attempts(len);
        let key = self.key.clone();
        Box::pin(async move {
            // The store repeats the request by itself.
            let sent = attempts.request(Op::Upload, request).await;
            sent.map_err(|failure| {
                failure.into_error(Op::Upload, Some(&key), &format!("part {number}"))
            })?;
            written.store(true, Ordering::Release);
            Ok(())
        })
    }

    async fn complete(mut self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let mut attempts = Attempts::new(self.inner.retry);
        let done = self.finish(&mut attempts).await;
        done.map_err(|failure| failure.into_error(Op::Upload, Some(&self.key), &attempts.summary()))
    }

    async fn abort(mut self: Box<Self>) -> Result<(), StorageError> {
        if let Some(mut upload) = self.open().take() {
            let mut attempts = Attempts::new(self.inner.retry);
            match attempts.request(Op::Upload, upload.abort()).await {
                Err(failure) if failure.kind != Kind::NotFound => {
                    return Err(failure.into_error(Op::Upload, Some(&self.key), "abort"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Drop for ObjectUpload {
    fn drop(&mut self) {
        let (Some(upload), Ok(runtime)) = (self.open().take(), Handle::try_current()) else {
            return;
        };
        let (inner, key) = (Arc::clone(&self.inner), self.key.clone());
        runtime.spawn(async move { discard(&inner, upload, &key).await });
    }
}
