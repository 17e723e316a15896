//! A storage decorator that fails at a chosen operation.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PartFuture, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::stream;

/// The fault of a [`FaultStorage`]'s operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Fails with an error of this kind, without effect.
    Fail(StorageErrorKind),
    /// Takes effect, but the reply is lost: the caller sees
    /// [`Transient`](StorageErrorKind::Transient).
    LoseReply,
    /// Takes effect and still fails, with [`Other`](StorageErrorKind::Other), as when a file has
    /// its name and the folder cannot be synced.
    FailAfterwards,
    /// A read returns fewer bytes than requested, which a storage must report as
    /// [`Truncated`](StorageErrorKind::Truncated). Other operations fail as with [`Fault::Fail`] of
    /// that kind.
    ShortRead,
    /// The process dies during the operation: half of an upload's part is sent, other operations
    /// have no effect, and all later operations fail.
    Tear,
}

/// Passes operations to another storage, counts them, and makes chosen ones fail.
///
/// Every call of a method of [`Storage`] but `capabilities`, of [`Upload`] and of [`Claim`] is an
/// operation. Operations count from 1 when they begin, parts when [`Upload::put_part`] is called, over
/// all clones. A test with sequential
/// operations fails at the same place each time and can try every place: until
/// [`operations`](Self::operations) stays below the number of the fault.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
/// use dcp_core::{Key, Storage, StorageErrorKind};
/// use dcp_core::storage::PutMode;
/// use futures_util::FutureExt;
///
/// let memory = Arc::new(MemoryStorage::new());
/// let storage = FaultStorage::new(memory.clone()).fault(2, Fault::Fail(StorageErrorKind::Full));
/// let put = |name| {
///     let key = Key::new(name).unwrap();
///     storage.put(&key, "x".into(), PutMode::Create).now_or_never().unwrap()
/// };
/// put("a")?;
/// assert_eq!(put("b").unwrap_err().kind(), StorageErrorKind::Full);
/// put("b")?;
/// # Ok::<(), dcp_core::StorageError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FaultStorage {
    inner: Arc<dyn Storage>,
    faults: Arc<BTreeMap<u64, Fault>>,
    last: u64,
    full_after: u64,
    read_only_after: u64,
    begun: Arc<Mutex<Vec<Effect>>>,
}

impl FaultStorage {
    /// Wraps `inner` without faults.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Self {
            inner,
            faults: Arc::default(),
            last: u64::MAX,
            full_after: u64::MAX,
            read_only_after: u64::MAX,
            begun: Arc::default(),
        }
    }

    /// Sets the fault of operation number `operation`, counted from 1.
    #[must_use]
    pub fn fault(mut self, operation: u64, fault: Fault) -> Self {
        Arc::make_mut(&mut self.faults).insert(operation, fault);
        self
    }

    /// Makes all operations after the first `operations` fail without effect, as if the process had
    /// died. Unfinished uploads are then neither aborted nor dropped: what they sent stays, as
    /// after a `kill -9`.
    #[must_use]
    pub fn dying_after(mut self, operations: u64) -> Self {
        self.last = self.last.min(operations);
        self
    }

    /// Fills the storage after `operations` operations: later ones that need space fail with
    /// [`Full`](StorageErrorKind::Full). Reads and deletions succeed, and so does the completion of
    /// an upload, whose bytes have their space.
    #[must_use]
    pub fn full_after(mut self, operations: u64) -> Self {
        self.full_after = self.full_after.min(operations);
        self
    }

    /// Makes the storage read-only after `operations` operations: later ones that change anything
    /// fail with [`Denied`](StorageErrorKind::Denied).
    #[must_use]
    pub fn read_only_after(mut self, operations: u64) -> Self {
        self.read_only_after = self.read_only_after.min(operations);
        self
    }

    /// The number of operations begun, including failed ones.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// The effects of the operations begun, in order.
    ///
    /// A process that dies, or a storage that becomes full or read-only, leaves the same state for
    /// all operations between two that change something. A test that tries every operation can skip
    /// those.
    #[must_use]
    pub fn effects(&self) -> Vec<Effect> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether all further operations fail.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.dead_at(self.operations().saturating_add(1))
    }

    fn dead_at(&self, operation: u64) -> bool {
        let torn = self.faults.range(..operation).any(|(_, &fault)| fault == Fault::Tear);
        torn || operation > self.last
    }

    /// Counts an operation, and returns its fault.
    fn begin(&self, effect: Effect) -> Verdict {
        let number = {
            let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
            begun.push(effect);
            begun.len() as u64
        };
        match self.faults.get(&number) {
            _ if self.dead_at(number) => Verdict::Die { number, torn: false },
            _ if number > self.read_only_after && effect != Effect::None => {
                Verdict::Fail { number, kind: StorageErrorKind::Denied }
            }
            _ if number > self.full_after && effect == Effect::TakesSpace => {
                Verdict::Fail { number, kind: StorageErrorKind::Full }
            }
            Some(Fault::Fail(kind)) => Verdict::Fail { number, kind: *kind },
            Some(Fault::ShortRead) => Verdict::Fail { number, kind: StorageErrorKind::Truncated },
            Some(Fault::LoseReply) => Verdict::LoseReply { number },
            Some(Fault::FailAfterwards) => Verdict::FailAfterwards { number },
            Some(Fault::Tear) => Verdict::Die { number, torn: true },
            None => Verdict::Pass,
        }
    }

    /// Runs an operation without an intermediate state.
    async fn run<T>(
        &self,
        (op, effect): (StorageOp, Effect),
        key: impl Into<Option<&Key>>,
        operation: impl Future<Output = Result<T, StorageError>>,
    ) -> Result<T, StorageError> {
        let key = key.into();
        let verdict = self.begin(effect);
        match verdict {
            Verdict::Pass => operation.await,
            Verdict::LoseReply { .. } | Verdict::FailAfterwards { .. } => {
                operation.await?;
                Err(verdict.error(op, key))
            }
            Verdict::Fail { .. } | Verdict::Die { .. } => Err(verdict.error(op, key)),
        }
    }
}

/// The effect of an operation on the stored data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// It reads.
    None,
    /// Writes, and fails without space.
    TakesSpace,
    /// Changes something without needing space: a deletion, a claim, the end of an upload.
    TakesNoSpace,
}

/// The fault of an operation, and its number.
#[derive(Clone, Copy)]
enum Verdict {
    Pass,
    Fail { number: u64, kind: StorageErrorKind },
    LoseReply { number: u64 },
    FailAfterwards { number: u64 },
    Die { number: u64, torn: bool },
}

impl Verdict {
    fn error(self, op: StorageOp, key: Option<&Key>) -> StorageError {
        let (kind, message) = match self {
            Self::Pass => (StorageErrorKind::Other, "no fault".to_owned()),
            Self::Fail { number, kind } => (kind, format!("injected into operation {number}")),
            Self::LoseReply { number } => {
                let message = format!("injected: the reply of operation {number} is lost");
                (StorageErrorKind::Transient, message)
            }
            Self::FailAfterwards { number } => {
                let message = format!("injected: operation {number} took effect and failed");
                (StorageErrorKind::Other, message)
            }
            Self::Die { number, .. } => {
                let message = format!("injected: the process is gone at operation {number}");
                (StorageErrorKind::Other, message)
            }
        };
        StorageError::new(kind, op, key.cloned()).with_message(message)
    }
}

#[async_trait]
impl Storage for FaultStorage {
    dcp_core::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.run((StorageOp::Stat, Effect::None), key, self.inner.stat(key)).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.run((StorageOp::Read, Effect::None), key, self.inner.read(key, request)).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.run((StorageOp::Read, Effect::None), key, self.inner.read_whole(key, max_bytes)).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let op = (StorageOp::Put, Effect::TakesSpace);
        self.run(op, key, self.inner.put(key, payload, mode)).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let op = (StorageOp::Upload, Effect::TakesSpace);
        let inner = self.run(op, key, self.inner.start_upload(key, options)).await?;
        let upload = FaultUpload { inner: Some(inner), storage: self.clone(), key: key.clone() };
        Ok(Box::new(upload))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        match self.begin(Effect::None) {
            Verdict::Pass => self.inner.list(folder),
            verdict => {
                let error = verdict.error(StorageOp::List, folder);
                Box::pin(stream::once(async { Err(error) }))
            }
        }
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        match self.begin(Effect::None) {
            Verdict::Pass => self.inner.list_folder(folder),
            verdict => {
                let error = verdict.error(StorageOp::List, folder);
                Box::pin(stream::once(async { Err(error) }))
            }
        }
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let op = (StorageOp::Delete, Effect::TakesNoSpace);
        self.run(op, keys.first(), self.inner.delete(keys)).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let op = (StorageOp::Claim, Effect::TakesNoSpace);
        let inner = self.run(op, key, self.inner.claim(key)).await?;
        Ok(Arc::new(FaultClaim { inner, storage: self.clone(), key: key.clone() }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        let effect = match action {
            LeftoverAction::List => Effect::None,
            LeftoverAction::Remove => Effect::TakesNoSpace,
        };
        self.run((action.op(), effect), folder, self.inner.leftovers(folder, min_age, action)).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        let op = (StorageOp::RemoveFolders, Effect::TakesNoSpace);
        self.run(op, Some(folder), self.inner.remove_empty_folders(folder)).await
    }
}

/// Ends with the process, regardless of the outcome.
#[derive(Debug)]
struct FaultClaim {
    inner: Arc<dyn Claim>,
    storage: FaultStorage,
    key: Key,
}

#[async_trait]
impl Claim for FaultClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        let op = (StorageOp::Put, Effect::TakesSpace);
        self.storage.run(op, &self.key, self.inner.replace(payload)).await
    }
}

#[derive(Debug)]
struct FaultUpload {
    /// `None` after completion or abort.
    inner: Option<Box<dyn Upload>>,
    storage: FaultStorage,
    key: Key,
}

impl FaultUpload {
    fn gone(&self) -> StorageError {
        StorageError::new(StorageErrorKind::Invalid, StorageOp::Upload, Some(self.key.clone()))
            .with_message("the upload has ended")
    }
}

#[async_trait]
impl Upload for FaultUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let gone = self.gone();
        let Some(inner) = self.inner.as_mut() else {
            return Box::pin(async { Err(gone) });
        };
        let verdict = self.storage.begin(Effect::TakesSpace);
        let sent = match verdict {
            Verdict::Pass | Verdict::LoseReply { .. } | Verdict::FailAfterwards { .. } => {
                Some(inner.put_part(part))
            }
            Verdict::Die { torn: true, .. } => Some(inner.put_part(first_half(&part))),
            Verdict::Fail { .. } | Verdict::Die { .. } => {
                // Dropped, the part makes the upload fail at its end.
                drop(inner.put_part(part));
                None
            }
        };
        let key = self.key.clone();
        Box::pin(async move {
            match sent {
                Some(sent) => sent.await?,
                None => return Err(verdict.error(StorageOp::Upload, Some(&key))),
            }
            match verdict {
                Verdict::Pass => Ok(()),
                _ => Err(verdict.error(StorageOp::Upload, Some(&key))),
            }
        })
    }

    async fn complete(mut self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let storage = self.storage.clone();
        let key = self.key.clone();
        let completion = async {
            let inner = self.inner.take().ok_or_else(|| self.gone())?;
            inner.complete().await
        };
        storage.run((StorageOp::Upload, Effect::TakesNoSpace), &key, completion).await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), StorageError> {
        let storage = self.storage.clone();
        let key = self.key.clone();
        let abortion = async {
            let inner = self.inner.take().ok_or_else(|| self.gone())?;
            inner.abort().await
        };
        storage.run((StorageOp::Upload, Effect::None), &key, abortion).await
    }
}

impl Drop for FaultUpload {
    fn drop(&mut self) {
        if self.storage.is_dead() {
            // A dead process does not clean up either.
            std::mem::forget(self.inner.take());
        }
    }
}

fn first_half(part: &Payload) -> Payload {
    let mut left = part.len() / 2;
    part.pieces()
        .iter()
        .map(|piece| {
            let taken = left.min(piece.len() as u64);
            left -= taken;
            piece.get(..taken as usize).map_or_else(Bytes::new, |half| piece.slice_ref(half))
        })
        .collect()
}

#[cfg(test)]
mod tests;
