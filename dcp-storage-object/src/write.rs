//! Writing whole objects, and deleting them.

use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{ObjectMeta, PutMode, Version};
use dcp_core::{Key, Payload, StorageError, StorageErrorKind as Kind};
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetResult, MultipartUpload, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, UpdateVersion,
};

use crate::error::Failure;
use crate::inner::Inner;
use crate::provider::Provider;
use crate::retry::{Attempts, random};

/// The metadata of an object by which its writer recognizes it. Azure takes letters and digits.
const MARK: &str = "dcpwrite";

/// The mark of one write.
#[derive(Clone, Debug)]
pub(crate) struct Mark(pub(crate) String);

impl Mark {
    pub(crate) fn new() -> Self {
        Self(format!("{:016x}{:016x}", random(), random()))
    }

    pub(crate) fn attributes(&self) -> Attributes {
        let mut attributes = Attributes::new();
        attributes.insert(Attribute::Metadata(MARK.into()), self.0.clone().into());
        attributes
    }

    pub(crate) fn is_on(&self, found: &GetResult) -> bool {
        let mark = found.attributes.get(&Attribute::Metadata(MARK.into()));
        mark.is_some_and(|mark| mark.as_ref() == self.0)
    }
}

impl Inner {
    /// The pieces of a payload, without a copy unless the store keeps them.
    pub(crate) fn pieces(&self, payload: &Payload) -> PutPayload {
        if self.provider.keeps_memory() {
            return payload.pieces().concat().into();
        }
        payload.pieces().iter().cloned().collect()
    }

    /// The attempts at a write of `len` bytes, which has more time the longer it is.
    pub(crate) fn write_attempts(&self, len: u64) -> Attempts {
        let mut policy = self.retry;
        policy.deadline += std::time::Duration::from_secs(len >> 20);
        Attempts::new(policy)
    }

    pub(crate) async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let path = self.prefix.path(Op::Put, key)?;
        self.check_writable(Op::Put, Some(key))?;
        let len = payload.len();
        let max = self.capabilities.write_limits.put_bytes_max;
        if len > max {
            return Err(StorageError::new(Kind::TooLarge, Op::Put, Some(key.clone()))
                .with_message(format!("{len} bytes; one request takes {max}")));
        }
        let mut attempts = self.write_attempts(len);
        let put = self.put_until_known(&path, self.pieces(&payload), &mode, &mut attempts).await;
        match put {
            Ok(tag) => Ok(ObjectMeta::new(key.clone(), len).with_version(self.version_of_tag(tag))),
            Err(failure) => Err(failure.into_error(Op::Put, Some(key), &attempts.summary())),
        }
    }

    /// Writes an object, again if it is not known whether it was written. Returns its ETag.
    async fn put_until_known(
        &self,
        path: &Path,
        payload: PutPayload,
        mode: &PutMode,
        attempts: &mut Attempts,
    ) -> Result<Option<String>, Failure> {
        let mark = Mark::new();
        loop {
            let failure = match self.put_once(path, &payload, mode, &mark, attempts).await {
                Ok(put) => return Ok(put.e_tag),
                Err(failure) => failure,
            };
            // The condition fails also when a request is repeated whose answer was lost: here or
            // in the store.
            if failure.is_condition() && self.provider.has_attributes() {
                match self.head(Op::Put, path, attempts).await {
                    Ok(found) if mark.is_on(&found) => return Ok(found.meta.e_tag),
                    // Blocks of an upload that never ended count as an object, for this request.
                    Err(missing)
                        if missing.kind == Kind::NotFound && self.provider == Provider::Azure =>
                    {
                        return self.put_blocks(path, payload, mode, &mark, attempts).await;
                    }
                    _ => {}
                }
            }
            attempts.pause(failure).await?;
        }
    }

    pub(crate) async fn put_once(
        &self,
        path: &Path,
        payload: &PutPayload,
        mode: &PutMode,
        mark: &Mark,
        attempts: &mut Attempts,
    ) -> Result<PutResult, Failure> {
        let mode = self.store_mode(path, mode, attempts).await?;
        let is_update = matches!(mode, object_store::PutMode::Update(_));
        let mut options = PutOptions::from(mode);
        if self.provider.has_attributes() {
            options.attributes = mark.attributes();
        }
        let put = self.store.put_opts(path, payload.clone(), options);
        attempts
            .request(Op::Put, put)
            .await
            .map_err(|failure| missing_is_conflict(failure, is_update))
    }

    /// Writes an object as one block and a list of blocks, whose conditions are about objects only.
    async fn put_blocks(
        &self,
        path: &Path,
        payload: PutPayload,
        mode: &PutMode,
        mark: &Mark,
        attempts: &mut Attempts,
    ) -> Result<Option<String>, Failure> {
        let Some(completion) = self.completion.as_ref().filter(|_| *mode == PutMode::Create) else {
            return Err(Failure::new(Kind::Conflict, "an upload of the object has not ended"));
        };
        let mut upload = self.begin(path, mark, attempts).await?;
        if payload.content_length() > 0 {
            attempts.request(Op::Put, upload.put_part(payload)).await?;
        }
        let done = attempts.request(Op::Put, completion.complete(upload.as_mut(), mode)).await;
        match done {
            Ok(done) => Ok(done.e_tag),
            Err(failure) => match self.marked(Op::Put, path, mark, attempts).await {
                Some(found) => Ok(found.meta.e_tag),
                None if failure.kind == Kind::Conflict => {
                    Err(failure.with_kind(Kind::AlreadyExists))
                }
                None => Err(failure),
            },
        }
    }

    /// Begins an upload of the store.
    pub(crate) async fn begin(
        &self,
        path: &Path,
        mark: &Mark,
        attempts: &mut Attempts,
    ) -> Result<Box<dyn MultipartUpload>, Failure> {
        loop {
            let mut options = PutMultipartOptions::default();
            if self.provider.has_attributes() {
                options.attributes = mark.attributes();
            }
            let request = self.store.put_multipart_opts(path, options);
            match attempts.request(Op::Upload, request).await {
                Ok(upload) => return Ok(upload),
                Err(failure) => attempts.pause(failure).await?,
            }
        }
    }

    async fn store_mode(
        &self,
        path: &Path,
        mode: &PutMode,
        attempts: &mut Attempts,
    ) -> Result<object_store::PutMode, Failure> {
        let version = match mode {
            PutMode::Overwrite => return Ok(object_store::PutMode::Overwrite),
            PutMode::Create if self.capabilities.atomic_create => {
                return Ok(object_store::PutMode::Create);
            }
            PutMode::Create => {
                self.refuse_taken(Op::Put, path, attempts).await?;
                return Ok(object_store::PutMode::Overwrite);
            }
            _ if !self.capabilities.conditional_put => {
                return Err(Failure::new(Kind::Unsupported, "the store checks no versions"));
            }
            PutMode::Update(version) => version,
            _ => return Err(Failure::new(Kind::Unsupported, "the mode is not known")),
        };
        let generation = match self.provider.updates_by_generation() {
            true => Some(self.generation(path, version, attempts).await?),
            false => None,
        };
        let e_tag = Some(version.as_str().to_owned());
        Ok(object_store::PutMode::Update(UpdateVersion { e_tag, version: generation }))
    }

    /// Fails if an object is at the path.
    pub(crate) async fn refuse_taken(
        &self,
        op: Op,
        path: &Path,
        attempts: &mut Attempts,
    ) -> Result<(), Failure> {
        match self.head(op, path, attempts).await {
            Ok(_) => Err(Failure::new(Kind::AlreadyExists, "an object of that key exists")),
            Err(failure) if failure.kind == Kind::NotFound => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// The generation of an object that has this version.
    async fn generation(
        &self,
        path: &Path,
        version: &Version,
        attempts: &mut Attempts,
    ) -> Result<String, Failure> {
        let found = self.check_version(Op::Put, path, version, attempts).await?;
        found.meta.version.ok_or_else(|| {
            Failure::new(Kind::Unsupported, "the store returned no generation of the object")
        })
    }

    /// The object, which is in conflict unless it has this version.
    pub(crate) async fn check_version(
        &self,
        op: Op,
        path: &Path,
        version: &Version,
        attempts: &mut Attempts,
    ) -> Result<GetResult, Failure> {
        let found = self.head(op, path, attempts).await;
        let found = found.map_err(|failure| missing_is_conflict(failure, true))?;
        if self.version(&found.meta).as_ref() != Some(version) {
            return Err(Failure::new(Kind::Conflict, "the object has another version"));
        }
        Ok(found)
    }

    /// The object, if it is the one that this write made.
    pub(crate) async fn marked(
        &self,
        op: Op,
        path: &Path,
        mark: &Mark,
        attempts: &mut Attempts,
    ) -> Option<GetResult> {
        if !self.provider.has_attributes() {
            return None;
        }
        let found = self.head(op, path, attempts).await.ok()?;
        mark.is_on(&found).then_some(found)
    }

    pub(crate) async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.check_writable(Op::Delete, keys.first())?;
        let paths = keys.iter().map(|key| self.prefix.path(Op::Delete, key));
        let paths = paths.collect::<Result<Vec<_>, _>>()?;
        let mut attempts = Attempts::new(self.retry);
        loop {
            let Err(failure) = self.delete_once(&paths, &mut attempts).await else {
                return Ok(());
            };
            if let Err(failure) = attempts.pause(failure).await {
                let only = if keys.len() == 1 { keys.first() } else { None };
                return Err(failure.into_error(Op::Delete, only, &attempts.summary()));
            }
        }
    }

    pub(crate) async fn delete_once(
        &self,
        paths: &[Path],
        attempts: &mut Attempts,
    ) -> Result<(), Failure> {
        let paths = stream::iter(paths.iter().cloned().map(Ok).collect::<Vec<_>>());
        let mut deleted = self.store.delete_stream(paths.boxed());
        let mut first = Ok(());
        attempts
            .request(Op::Delete, async {
                while let Some(result) = deleted.next().await {
                    match result {
                        Err(error) if !matches!(error, Error::NotFound { .. }) => {
                            first = first.and(Err(error));
                        }
                        // A missing bucket is found missing too.
                        Err(error) if Failure::of(Op::Delete, &error).kind == Kind::NoBucket => {
                            first = first.and(Err(error));
                        }
                        _ => {}
                    }
                }
                first
            })
            .await
    }
}

/// The object of an update is gone, which is a conflict.
pub(crate) fn missing_is_conflict(mut failure: Failure, is_update: bool) -> Failure {
    if is_update && failure.kind == Kind::NotFound {
        failure.kind = Kind::Conflict;
    }
    failure
}
