//! A storage that an object of Python serves: for schemes that Rust does not have.
//!
//! Every call takes the GIL, on a thread for calls that block, and bytes are copied on their way. An upload keeps its
//! object in memory, as Python's side takes whole objects. So it is slow, and honest about it: it has no claims, so
//! that two savers are not kept apart.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use dcp::core::error::StorageOp as Op;
use dcp::core::storage::{
    BufferedUpload, Capabilities, Claim, FolderEntry, FolderStream, Leftover, LeftoverAction,
    ObjectMeta, ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions,
    WholeObject,
};
use dcp::core::{Key, Payload, Storage, StorageError, StorageErrorKind as Kind};
use futures_util::{StreamExt, TryStreamExt, stream};
use pyo3::exceptions::{
    PyConnectionError, PyFileExistsError, PyFileNotFoundError, PyNotImplementedError,
    PyPermissionError, PyTimeoutError,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

type Result<T> = std::result::Result<T, StorageError>;

/// The object of Python, which clones share.
#[derive(Clone)]
pub(crate) struct PythonStorage(Arc<Py<PyAny>>);

impl fmt::Debug for PythonStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PythonStorage")
    }
}

impl PythonStorage {
    /// The storage that a function of Python returns for a URL.
    pub(crate) fn open(open: &Py<PyAny>, url: &str) -> Result<Self> {
        let object = Python::attach(|py| open.call1(py, (url,)));
        Ok(Self(Arc::new(object.map_err(|error| storage_error(Op::Open, None, &error))?)))
    }

    /// Calls the object on a thread for calls that block.
    async fn call<T: Send + 'static>(
        &self,
        op: Op,
        key: Option<&Key>,
        body: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        let (object, of) = (Arc::clone(&self.0), key.cloned());
        let called = tokio::task::spawn_blocking(move || {
            Python::attach(|py| {
                body(object.bind(py)).map_err(|error| storage_error(op, of, &error))
            })
        });
        let ended = |error: tokio::task::JoinError| {
            StorageError::new(Kind::Other, op, key.cloned()).with_message(error.to_string())
        };
        called.await.map_err(ended)?
    }

    async fn read_range(&self, key: &Key, byte_offset: u64, byte_len: u64) -> Result<Bytes> {
        let name = key.to_string();
        let read = self.call(Op::Read, Some(key), move |object| {
            let bytes = object.call_method1("read_range", (name, byte_offset, byte_len))?;
            Ok(Bytes::copy_from_slice(bytes.extract::<&[u8]>()?))
        });
        let bytes = read.await?;
        if bytes.len() as u64 == byte_len {
            return Ok(bytes);
        }
        let (found, error) =
            (bytes.len(), StorageError::new(Kind::Truncated, Op::Read, Some(key.clone())));
        Err(error.with_message(format!(
            "{byte_len} bytes at {byte_offset} were requested, and {found} returned"
        )))
    }

    /// All objects in a folder, at any depth.
    async fn objects(&self, folder: Option<Key>) -> Result<Vec<ObjectMeta>> {
        let prefix = folder.as_ref().map_or_else(String::new, |folder| format!("{folder}/"));
        let below = prefix.clone();
        let listed = self.call(Op::List, folder.as_ref(), move |object| {
            let all = object.call_method1("list", (prefix,))?;
            all.try_iter()?.map(|one| one?.extract::<(String, u64)>()).collect::<PyResult<Vec<_>>>()
        });
        // What is no key of dcp, such as a name with an empty part, is no file of a checkpoint.
        let objects = listed.await?.into_iter().filter(|(name, _)| name.starts_with(&below));
        Ok(objects
            .filter_map(|(name, byte_len)| Some(ObjectMeta::new(Key::new(&name).ok()?, byte_len)))
            .collect())
    }
}

#[async_trait]
impl Storage for PythonStorage {
    fn capabilities(&self) -> Capabilities {
        let mut all = Capabilities::none();
        (all.writable, all.listable, all.ranged_reads, all.complete_listing) =
            (true, true, true, true);
        (all.parallelism, all.coalesce_gap) = (8, 1 << 20);
        all
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta> {
        let name = key.to_string();
        let found = self.call(Op::Stat, Some(key), move |object| {
            object.call_method1("stat", (name,))?.extract()
        });
        Ok(ObjectMeta::new(key.clone(), found.await?))
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome> {
        let mut buffers = Vec::with_capacity(request.ranges.len());
        for mut range in request.ranges {
            if !range.buffer.is_empty() {
                let bytes =
                    self.read_range(key, range.byte_offset, range.buffer.len() as u64).await?;
                range.buffer.copy_from_slice(&bytes);
            }
            buffers.push(range.buffer);
        }
        Ok(ReadOutcome::new(buffers))
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject> {
        let meta = self.stat(key).await?;
        if meta.byte_len > max_bytes {
            let error = StorageError::new(Kind::TooLarge, Op::Read, Some(key.clone()));
            return Err(error
                .with_message(format!("it has {} bytes, of {max_bytes} at most", meta.byte_len)));
        }
        let bytes = self.read_range(key, 0, meta.byte_len).await?;
        Ok(WholeObject::new(meta, bytes))
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<ObjectMeta> {
        let only_if_absent = match mode {
            PutMode::Overwrite => false,
            PutMode::Create => true,
            _ => return Err(StorageError::new(Kind::Unsupported, Op::Put, Some(key.clone()))),
        };
        let (name, byte_len) = (key.to_string(), payload.len());
        let put = self.call(Op::Put, Some(key), move |object| {
            let mut at = 0;
            let fill = |to: &mut [u8]| {
                for piece in payload.pieces() {
                    to[at..at + piece.len()].copy_from_slice(piece);
                    at += piece.len();
                }
                Ok(())
            };
            let length = usize::try_from(payload.len())?;
            let bytes = PyBytes::new_with(object.py(), length, fill)?;
            object.call_method1("put", (name, bytes, only_if_absent)).map(|_| ())
        });
        put.await?;
        Ok(ObjectMeta::new(key.clone(), byte_len))
    }

    async fn start_upload(&self, key: &Key, options: UploadOptions) -> Result<Box<dyn Upload>> {
        Ok(Box::new(BufferedUpload::new(self.clone(), key.clone(), options.mode)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let (storage, folder) = (self.clone(), folder.cloned());
        let objects = async move {
            Ok::<_, StorageError>(stream::iter(storage.objects(folder).await?).map(Ok))
        };
        Box::pin(stream::once(objects).try_flatten())
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let (storage, folder) = (self.clone(), folder.cloned());
        let entries = async move {
            let objects = storage.objects(folder.clone()).await?;
            Ok::<_, StorageError>(
                stream::iter(FolderEntry::of_objects(objects, folder.as_ref())).map(Ok),
            )
        };
        Box::pin(stream::once(entries).try_flatten())
    }

    async fn delete(&self, keys: &[Key]) -> Result<()> {
        let names: Vec<String> = keys.iter().map(Key::to_string).collect();
        let delete =
            move |object: &Bound<'_, PyAny>| object.call_method1("delete", (names,)).map(|_| ());
        self.call(Op::Delete, keys.first(), delete).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>> {
        Err(StorageError::new(Kind::Unsupported, Op::Claim, Some(key.clone())))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        _: LeftoverAction,
    ) -> Result<Vec<Leftover>> {
        Ok(Vec::new())
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<()> {
        Ok(())
    }
}

/// The storage's error of an exception.
fn storage_error(op: Op, key: Option<Key>, error: &PyErr) -> StorageError {
    let kind = Python::attach(|py| {
        if error.is_instance_of::<PyFileNotFoundError>(py) {
            Kind::NotFound
        } else if error.is_instance_of::<PyFileExistsError>(py) {
            Kind::AlreadyExists
        } else if error.is_instance_of::<PyPermissionError>(py) {
            Kind::Denied
        } else if error.is_instance_of::<PyConnectionError>(py)
            || error.is_instance_of::<PyTimeoutError>(py)
        {
            Kind::Transient
        } else if error.is_instance_of::<PyNotImplementedError>(py) {
            Kind::Unsupported
        } else {
            Kind::Other
        }
    });
    StorageError::new(kind, op, key).with_message(error.to_string())
}
