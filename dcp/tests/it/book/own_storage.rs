//! A storage of one's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::bytes::Bytes;
use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{
    BufferedUpload, Capabilities, Claim, FolderEntry, FolderStream, Leftover,
    LeftoverAction as Action, ObjectMeta, ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload,
    UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind as Kind};
use futures_util::stream;

type Result<T> = std::result::Result<T, StorageError>;

#[derive(Clone, Debug, Default)]
pub struct MapStorage(Arc<Mutex<BTreeMap<Key, Bytes>>>);

fn error(kind: Kind, op: Op, key: &Key) -> StorageError {
    StorageError::new(kind, op, Some(key.clone()))
}

impl MapStorage {
    fn get(&self, op: Op, key: &Key) -> Result<Bytes> {
        self.0.lock().unwrap().get(key).cloned().ok_or_else(|| error(Kind::NotFound, op, key))
    }

    /// The objects in a folder, at any depth.
    fn found(&self, folder: Option<&Key>) -> Vec<ObjectMeta> {
        let objects = self.0.lock().unwrap();
        let is_found =
            |key: &Key| folder.is_none_or(|folder| key != folder && key.is_under(folder));
        let found = objects.iter().filter(|(key, _)| is_found(key));
        found.map(|(key, bytes)| ObjectMeta::new(key.clone(), bytes.len() as u64)).collect()
    }
}

#[async_trait]
impl Storage for MapStorage {
    fn capabilities(&self) -> Capabilities {
        let mut all = Capabilities::none();
        (all.writable, all.listable, all.ranged_reads) = (true, true, true);
        (all.atomic_create, all.complete_listing) = (true, true);
        all
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta> {
        Ok(ObjectMeta::new(key.clone(), self.get(Op::Stat, key)?.len() as u64))
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome> {
        request.fill_from(key, &self.get(Op::Read, key)?)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject> {
        let (meta, bytes) = (self.stat(key).await?, self.get(Op::Read, key)?);
        let fits = bytes.len() as u64 <= max_bytes;
        fits.then(|| WholeObject::new(meta, bytes))
            .ok_or_else(|| error(Kind::TooLarge, Op::Read, key))
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<ObjectMeta> {
        let mut objects = self.0.lock().unwrap();
        match mode {
            PutMode::Overwrite => {}
            PutMode::Create if !objects.contains_key(key) => {}
            PutMode::Create => return Err(error(Kind::AlreadyExists, Op::Put, key)),
            _ => return Err(error(Kind::Unsupported, Op::Put, key)),
        }
        objects.insert(key.clone(), payload.pieces().concat().into());
        Ok(ObjectMeta::new(key.clone(), payload.len()))
    }

    async fn start_upload(&self, key: &Key, options: UploadOptions) -> Result<Box<dyn Upload>> {
        Ok(Box::new(BufferedUpload::new(self.clone(), key.clone(), options.mode)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        Box::pin(stream::iter(self.found(folder).into_iter().map(Ok)))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        Box::pin(stream::iter(FolderEntry::of_objects(self.found(folder), folder).map(Ok)))
    }

    async fn delete(&self, keys: &[Key]) -> Result<()> {
        let mut objects = self.0.lock().unwrap();
        keys.iter().for_each(|key| drop(objects.remove(key)));
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>> {
        Err(error(Kind::Unsupported, Op::Claim, key))
    }

    async fn leftovers(&self, _: Option<&Key>, _: Duration, _: Action) -> Result<Vec<Leftover>> {
        Ok(Vec::new())
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<()> {
        Ok(())
    }
}
