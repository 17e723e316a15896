//! Reading ranges: one request for each run, whose answer goes straight to the memory.

use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{ReadOutcome, ReadRequest, Version, WholeObject};
use dcp_core::{Buffer, Key, StorageError, StorageErrorKind as Kind};
use futures_util::future::{Either, select};
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::GetResult;
use object_store::path::Path;
use tokio::time::{sleep, timeout, timeout_at};

use crate::error::Failure;
use crate::inner::{Inner, MODIFIED};
use crate::object_read::get_options;
use crate::rate::{Rate, time_for};
use crate::retry::Attempts;
use crate::runs::{Part, Run, runs};

/// The bytes before a range that are read and dropped at most when a web server ignores ranges.
const SKIPPED_MAX: u64 = 64 << 20;

/// The body of an answer.
type Pieces = BoxStream<'static, object_store::Result<Bytes>>;

/// The next event of a read.
enum Next {
    /// A piece of the answer that is being read, or its end.
    Piece(Option<object_store::Result<Bytes>>),
    /// Another answer, for the bytes that are missing.
    Answer(Box<GetResult>),
}

/// The reading of one object in one version.
struct Reading<'a> {
    inner: &'a Inner,
    key: &'a Key,
    path: &'a Path,
    /// The version of all bytes: the requested one, or that of the first answer. `None` inside if
    /// the storage has no versions.
    version: OnceLock<Option<Version>>,
}

impl Inner {
    pub(crate) async fn read(
        &self,
        key: &Key,
        request: ReadRequest,
    ) -> Result<ReadOutcome, StorageError> {
        let path = self.prefix.path(Op::Read, key)?;
        let ReadRequest { ranges, if_version, .. } = request;
        let reading = Reading::new(self, key, &path, if_version);
        let (offsets, mut buffers): (Vec<u64>, Vec<Buffer>) =
            ranges.into_iter().map(|range| (range.byte_offset, range.buffer)).unzip();
        let parts = offsets.into_iter().zip(&mut buffers);
        let parts = parts.map(|(start, memory)| Part { start, memory });
        let runs = runs(parts.collect(), self.capabilities.coalesce_gap, self.request_bytes);
        if runs.is_empty() {
            reading.check_existence().await?;
        }
        stream::iter(runs.into_iter().map(Ok))
            .try_for_each_concurrent(usize::from(self.capabilities.parallelism), |run| {
                reading.fetch(run)
            })
            .await?;
        let version = reading.version.into_inner().flatten();
        Ok(ReadOutcome::new(buffers).with_version(version))
    }

    pub(crate) async fn read_whole(
        &self,
        key: &Key,
        max_bytes: u64,
    ) -> Result<WholeObject, StorageError> {
        let path = self.prefix.path(Op::Read, key)?;
        let reading = Reading::new(self, key, &path, None);
        let mut attempts = Attempts::new(self.retry);
        let first = loop {
            let request = self.store.get_opts(&path, get_options());
            match attempts.request(Op::Read, request).await {
                Ok(found) => break found,
                Err(failure) => {
                    let paused = attempts.pause(failure).await;
                    paused.map_err(|failure| reading.error(failure, "", &attempts))?;
                }
            }
        };
        let noted = reading.answer(&first);
        noted.map_err(|failure| reading.error(failure, "", &attempts))?;
        let len = first.meta.size;
        if len > max_bytes {
            return Err(StorageError::new(Kind::TooLarge, Op::Read, Some(key.clone()))
                .with_message(format!("it has {len} bytes, at most {max_bytes} are expected")));
        }
        let meta = self.meta(key, first.meta.clone());
        let memory = usize::try_from(len).ok().and_then(Buffer::try_zeroed);
        let mut memory = memory.ok_or_else(|| {
            StorageError::new(Kind::Other, Op::Read, Some(key.clone()))
                .with_message(format!("there is no memory for {len} bytes"))
        })?;
        let part = Part { start: 0, memory: &mut memory };
        // There is a run unless the object is empty.
        if let Some(run) = runs(vec![part], 0, u64::MAX).pop() {
            let _permit = self.permit(run.len()).await;
            reading.fill(run, attempts, Some(first)).await?;
        }
        Ok(WholeObject::new(meta, memory.freeze()))
    }
}

impl<'a> Reading<'a> {
    fn new(inner: &'a Inner, key: &'a Key, path: &'a Path, version: Option<Version>) -> Self {
        let known = OnceLock::new();
        if version.is_some() {
            // The lock is new.
            let _ = known.set(version);
        }
        Self { inner, key, path, version: known }
    }

    fn error(&self, failure: Failure, doing: &str, attempts: &Attempts) -> StorageError {
        let doing = match (doing, attempts.summary()) {
            ("", summary) => summary,
            (doing, summary) if summary.is_empty() => doing.to_owned(),
            (doing, summary) => format!("{doing}, {summary}"),
        };
        failure.into_error(Op::Read, Some(self.key), &doing)
    }

    /// Checks that the object exists in the requested version, for a read of no bytes.
    async fn check_existence(&self) -> Result<(), StorageError> {
        let mut attempts = Attempts::new(self.inner.retry);
        let found = self.inner.head(Op::Read, self.path, &mut attempts).await;
        let answered = found.and_then(|found| self.answer(&found));
        answered.map_err(|failure| self.error(failure, "", &attempts))
    }

    /// Notes the version of an answer, or refuses it if it is not that of the other answers.
    fn answer(&self, answer: &GetResult) -> Result<(), Failure> {
        self.inner.bucket_seen.store(true, Ordering::Relaxed);
        let version = self.inner.version(&answer.meta);
        let known = self.version.get_or_init(|| version.clone());
        match *known == version {
            true => Ok(()),
            false => Err(Failure::new(Kind::Changed, "an answer is of another version")),
        }
    }

    /// The condition of a request. A weak ETag never matches one.
    fn condition(&self) -> Option<String> {
        let version = self.version.get()?.as_ref()?.as_str();
        let is_strong = !version.starts_with("W/") && !version.starts_with(MODIFIED);
        is_strong.then(|| version.to_owned())
    }

    async fn fetch(&self, run: Run<'_>) -> Result<(), StorageError> {
        let _permit = self.inner.permit(run.len()).await;
        self.fill(run, Attempts::new(self.inner.retry), None).await
    }

    /// Reads a run. An answer that ends early or stalls is continued by another request.
    async fn fill(
        &self,
        mut run: Run<'_>,
        mut attempts: Attempts,
        mut first: Option<GetResult>,
    ) -> Result<(), StorageError> {
        let (start, end) = (run.start, run.end);
        let mut next = start;
        loop {
            let answer = match first.take() {
                Some(answer) => Ok(answer),
                None => self.hedged_request(next, end, &mut attempts).await,
            };
            let result = match answer {
                Ok(answer) => self.consume(answer, &mut run, &mut next, &mut attempts).await,
                Err(failure) => Err(failure),
            };
            let Err(failure) = result else { return Ok(()) };
            if let Err(failure) = attempts.pause(failure).await {
                return Err(self.error(failure, &format!("bytes {start}..{end}"), &attempts));
            }
        }
    }

    /// Requests the bytes `start..end`, and again when no answer comes. The first answer counts.
    async fn hedged_request(
        &self,
        start: u64,
        end: u64,
        attempts: &mut Attempts,
    ) -> Result<GetResult, Failure> {
        let Some(hedge) = self.inner.hedge else { return self.request(start, end, attempts).await };
        let mut more = attempts.clone();
        let first = pin!(self.request(start, end, attempts));
        let first = match select(first, pin!(sleep(hedge))).await {
            Either::Left((answer, _)) => return answer,
            Either::Right(((), first)) => first,
        };
        tracing::debug!(key = %self.key, start, end, "a request is made again, as no answer came");
        match select(first, pin!(self.request(start, end, &mut more))).await {
            Either::Left((Err(_), other)) => other.await,
            Either::Right((Err(_), other)) => other.await,
            Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
        }
    }

    /// The next piece of an answer, or another answer for the bytes `start..end` where none came.
    async fn next(
        &self,
        stream: &mut Pieces,
        start: u64,
        end: u64,
        attempts: &mut Attempts,
    ) -> Next {
        let Some(hedge) = self.inner.hedge else { return Next::Piece(stream.next().await) };
        let mut piece = stream.next();
        // The caller ends this after the longest stall.
        loop {
            piece = match select(piece, pin!(sleep(hedge))).await {
                Either::Left((piece, _)) => return Next::Piece(piece),
                Either::Right(((), piece)) => piece,
            };
            tracing::debug!(key = %self.key, start, end, "a request is made again for the rest");
            piece = match select(piece, pin!(self.request(start, end, attempts))).await {
                Either::Left((piece, _)) => return Next::Piece(piece),
                Either::Right((Ok(answer), _)) => return Next::Answer(Box::new(answer)),
                Either::Right((Err(_), piece)) => piece,
            };
        }
    }

    /// Requests the bytes `start..end`.
    async fn request(
        &self,
        start: u64,
        end: u64,
        attempts: &mut Attempts,
    ) -> Result<GetResult, Failure> {
        let options = get_options().with_if_match(self.condition());
        let ranged = options.clone().with_range(Some(start..end));
        let store = &self.inner.store;
        let mut answer = attempts.request(Op::Read, store.get_opts(self.path, ranged)).await;
        if answer.as_ref().is_err_and(|failure| failure.kind == Kind::Unsupported)
            && start <= SKIPPED_MAX
        {
            // A web server without ranges. What is before the range is skipped.
            answer = attempts.request(Op::Read, store.get_opts(self.path, options)).await;
        }
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => return Err(self.explained(end, failure, attempts).await),
        };
        self.answer(&answer)?;
        self.check_end(end, answer.meta.size)?;
        if answer.range.start > start || answer.range.end < end {
            return Err(Failure::new(
                Kind::Transient,
                format!("the answer has the bytes {:?} of the object", answer.range),
            ));
        }
        Ok(answer)
    }

    fn check_end(&self, end: u64, size: u64) -> Result<(), Failure> {
        match size < end {
            true => Err(Failure::new(Kind::Truncated, format!("the object has {size} bytes"))),
            false => Ok(()),
        }
    }

    /// Finds out whether a refused request was for bytes behind the end, or for an object that is
    /// gone. Stores say so in various ways.
    async fn explained(&self, end: u64, failure: Failure, attempts: &mut Attempts) -> Failure {
        let is_clear = !matches!(failure.kind, Kind::Other | Kind::Changed);
        if is_clear && failure.status != Some(416) {
            return failure;
        }
        match self.inner.head(Op::Read, self.path, attempts).await {
            Ok(_) if failure.kind == Kind::Changed => failure,
            Ok(found) => {
                let checked = self.answer(&found);
                let checked = checked.and_then(|()| self.check_end(end, found.meta.size));
                checked.err().unwrap_or(failure)
            }
            Err(failure) => failure,
        }
    }

    /// Copies an answer into the memory, and counts the bytes in `next`.
    async fn consume(
        &self,
        answer: GetResult,
        run: &mut Run<'_>,
        next: &mut u64,
        attempts: &mut Attempts,
    ) -> Result<(), Failure> {
        let broken = |cause: String| Failure::new(Kind::Transient, cause);
        let mut at = answer.range.start;
        let mut stream = answer.into_stream();
        let mut rate = Rate::over(self.inner.stall);
        let until = attempts.deadline_with(time_for(run.end.saturating_sub(at)));
        while *next < run.end {
            let piece = self.next(&mut stream, *next, run.end, attempts);
            let piece = timeout_at(until, timeout(self.inner.stall, piece)).await;
            let piece = piece.map_err(|_| broken("the answer does not end in time".to_owned()))?;
            let piece = piece.map_err(|_| {
                broken(format!("the answer sent nothing for {:?}", self.inner.stall))
            })?;
            let piece = match piece {
                Next::Answer(answer) => {
                    at = answer.range.start;
                    stream = answer.into_stream();
                    continue;
                }
                Next::Piece(Some(Ok(piece))) => piece,
                Next::Piece(Some(Err(error))) => {
                    let mut failure = Failure::of(Op::Read, &error);
                    if failure.kind == Kind::Other {
                        failure.kind = Kind::Transient;
                    }
                    return Err(failure);
                }
                Next::Piece(None) => {
                    return Err(broken(format!("the answer ended before byte {}", run.end)));
                }
            };
            rate.count(piece.len()).map_err(|bytes| {
                broken(format!("the answer sent {bytes} bytes in {:?}", self.inner.stall))
            })?;
            // Bytes before the range come from a server without ranges.
            let skipped = next.saturating_sub(at).min(piece.len() as u64) as usize;
            at += piece.len() as u64;
            let wanted = &piece[skipped..];
            let len = (run.end - *next).min(wanted.len() as u64) as usize;
            run.fill(*next, &wanted[..len]);
            *next += len as u64;
        }
        Ok(())
    }
}
