//! Where a job writes one file, and the refusal to replace what is there.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    Buffer, Capabilities, Key, ObjectMeta, ObjectStream, Payload, PutMode, ReadInto, Storage,
    StorageError, StorageExt, Upload,
};

use crate::error::ConvertError;

/// Bytes that are copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// A file to write.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it goes.
    pub storage: Arc<dyn Storage>,
    /// Its name there.
    pub key: Key,
    /// Whether a file of that name is replaced; otherwise it is an error.
    pub overwrite: bool,
}

impl Target {
    /// A file of a name that must be free.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { storage, key, overwrite: false }
    }

    /// The same, replacing a file of that name or not.
    #[must_use]
    pub fn overwriting(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Refuses a name that is taken, before any work is done.
    pub(crate) async fn check(&self) -> Result<(), ConvertError> {
        if !self.overwrite && self.storage.contains(&self.key).await? {
            return Err(ConvertError::TargetExists { target: self.key.to_string() });
        }
        Ok(())
    }

    /// The storage to create the file in: one that replaces, if that was asked for.
    pub(crate) fn creator(&self) -> Arc<dyn Storage> {
        if self.overwrite {
            Arc::new(Replacing(Arc::clone(&self.storage)))
        } else {
            Arc::clone(&self.storage)
        }
    }
}

/// A storage in which creating an object replaces one of the same name, once the new one is
/// complete.
#[derive(Debug)]
struct Replacing(Arc<dyn Storage>);

#[async_trait]
impl Storage for Replacing {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.0.stat(key).await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.0.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, _mode: PutMode) -> Result<(), StorageError> {
        self.0.put(key, payload, PutMode::Overwrite).await
    }

    async fn start_upload(&self, key: &Key) -> Result<Box<dyn Upload>, StorageError> {
        if !self.0.contains(key).await? {
            return self.0.start_upload(key).await;
        }
        // An upload needs a free name. So the new object gets one of its own until it is whole.
        let partial = partial(key)?;
        self.0.delete(&partial).await?;
        let upload = self.0.start_upload(&partial).await?;
        let storage = Arc::clone(&self.0);
        Ok(Box::new(Replacement { storage, key: key.clone(), partial, upload }))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        self.0.list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.0.delete(key).await
    }
}

/// The name of an object in the making, beside that of the one it will replace.
fn partial(key: &Key) -> Result<Key, StorageError> {
    let name = format!(".{}.partial", key.file_name());
    let partial = match key.as_str().rsplit_once('/') {
        Some((folder, _)) => Key::new(format!("{folder}/{name}")),
        None => Key::new(name),
    };
    Ok(partial?)
}

#[derive(Debug)]
struct Replacement {
    storage: Arc<dyn Storage>,
    key: Key,
    partial: Key,
    upload: Box<dyn Upload>,
}

impl Replacement {
    /// Moves the whole new object to its name. There is no atomic way to do so in a storage that
    /// only creates; but at every moment one of the two is there, whole.
    async fn finish(storage: &dyn Storage, from: &Key, to: &Key) -> Result<(), StorageError> {
        let len = storage.stat(from).await?.byte_len;
        storage.delete(to).await?;
        let mut upload = storage.start_upload(to).await?;
        let mut at = 0;
        while at < len {
            let end = len.min(at + COPY_BYTES);
            let part = storage.read_range(from, at..end).await?;
            upload.put_part(part.into()).await?;
            at = end;
        }
        upload.complete().await
    }
}

#[async_trait]
impl Upload for Replacement {
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError> {
        self.upload.put_part(part).await
    }

    async fn complete(self: Box<Self>) -> Result<(), StorageError> {
        let Self { storage, key, partial, upload } = *self;
        upload.complete().await?;
        Self::finish(&*storage, &partial, &key).await.map_err(|error| {
            let message = format!("the new file is whole, but still has the name {partial:?}");
            StorageError::new(error.kind(), error.op(), Some(key)).with_message(message)
        })?;
        storage.delete(&partial).await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.upload.abort().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_object_lies_beside_its_name() {
        let of = |name: &str| partial(&Key::new(name).unwrap()).unwrap().to_string();
        assert_eq!(of("x.npy"), ".x.npy.partial");
        assert_eq!(of("a/b/x.npy"), "a/b/.x.npy.partial");
    }
}
