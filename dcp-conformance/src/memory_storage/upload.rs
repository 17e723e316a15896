//! The parts of an object in memory.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{ObjectMeta, PartFuture, Upload, UploadOptions};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

use super::{MemoryStorage, copied};

/// An upload that refuses what the strictest object store refuses.
#[derive(Debug)]
pub(super) struct MemoryUpload {
    storage: MemoryStorage,
    key: Key,
    options: UploadOptions,
    /// The lengths of the parts, in order.
    part_lens: Vec<u64>,
    /// The parts that were written, in order.
    parts: Arc<Mutex<Vec<Option<Bytes>>>>,
}

impl MemoryUpload {
    pub(super) fn new(
        storage: MemoryStorage,
        key: Key,
        options: UploadOptions,
    ) -> Result<Self, StorageError> {
        let limits = storage.capabilities().write_limits;
        let upload = Self { storage, key, options, part_lens: Vec::new(), parts: Arc::default() };
        let part_bytes = upload.options.part_bytes;
        if part_bytes < limits.part_bytes_min.max(1) || part_bytes > limits.part_bytes_max {
            return Err(upload.invalid(format!("parts of {part_bytes} bytes are not allowed")));
        }
        Ok(upload)
    }

    fn invalid(&self, message: impl Into<String>) -> StorageError {
        StorageError::new(StorageErrorKind::Invalid, StorageOp::Upload, Some(self.key.clone()))
            .with_message(message)
    }

    /// Whether a part of `len` bytes may follow.
    fn check(&self, len: u64) -> Result<(), StorageError> {
        let part_bytes = self.options.part_bytes;
        if let Some(last) = self.part_lens.last().filter(|last| **last != part_bytes) {
            let message = format!("a part follows one of {last} bytes; parts have {part_bytes}");
            return Err(self.invalid(message));
        }
        if len > part_bytes {
            return Err(self.invalid(format!("a part of {len} bytes; parts have {part_bytes}")));
        }
        let parts_max = self.storage.capabilities().write_limits.parts_max;
        if self.part_lens.len() as u64 >= u64::from(parts_max) {
            return Err(self.invalid(format!("more than {parts_max} parts")));
        }
        Ok(())
    }
}

#[async_trait]
impl Upload for MemoryUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let checked = self.check(part.len());
        self.part_lens.push(part.len());
        let parts = Arc::clone(&self.parts);
        let number = {
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.push(None);
            parts.len() - 1
        };
        Box::pin(async move {
            checked?;
            let bytes = copied(&part);
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(written) = parts.get_mut(number) {
                *written = Some(bytes);
            }
            Ok(())
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let mut bytes = Vec::new();
        for (number, part) in
            self.parts.lock().unwrap_or_else(PoisonError::into_inner).iter().enumerate()
        {
            let part = part.as_ref();
            let part =
                part.ok_or_else(|| self.invalid(format!("part {number} was not written")))?;
            bytes.extend_from_slice(part);
        }
        self.storage.insert(StorageOp::Upload, &self.key, bytes.into(), &self.options.mode)
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
    }
}
