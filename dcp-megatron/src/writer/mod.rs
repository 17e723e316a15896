//! Writes `torch_dist` checkpoints: PyTorch's files, the common state, `metadata.json`.

mod before;
mod builder;
mod form;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::error::StorageOp;
use dcp_core::metadata::{Encoding, Entry, ObjectEntry, Placement};
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::storage::PutMode;
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Payload, Storage, StorageError,
    StorageErrorKind, StorageWriter, Value,
};
use dcp_formats::dcp::{DcpWriter, data_file, remove_unreferenced, sidecar_of};
use dcp_formats::metadata::Profile;
use dcp_formats::torch_object::decode_object;
use dcp_formats::torch_save::encode_value;
use dcp_formats::torch_zip::check_archive;

pub use builder::MegatronWriterBuilder;
pub use form::MegatronForm;

use crate::disk::file_hashes::{self, INTEGRITY_FILE};
use crate::disk::recovery::{self, Fixed, RECORD, recovered};
use crate::disk::small_file::read_small;
use crate::error::PlanRefusal;
use crate::sharded::culprit;
use before::{Before, hinted_files};
use form::{COMMON_FILE, COMMON_OBJECT, METADATA_JSON};

/// Writes checkpoints as Megatron-Core's `torch_dist` strategy does.
///
/// Tensors and objects go into `__{rank}_{n}.distcp` files and a `.metadata`, as
/// [`DcpWriter`] writes them: every Megatron-Core since 0.6 on PyTorch 2.1 or later reads them.
/// What is added on the coordinator, in [`commit`](StorageWriter::commit):
///
/// 1. the common state, in `common.pt` or as the object `common_state/shard_0_1`
///    ([`MegatronForm`]);
/// 2. `.metadata`;
/// 3. optionally, `integrity.json` with the SHA-256 of every file;
/// 4. `metadata.json`, whose presence makes the folder a checkpoint.
///
/// Each of these files appears whole or not at all, and after all that came before it is durable.
///
/// # Overwriting
///
/// A folder that holds a checkpoint is refused unless [`overwrite`](MegatronWriterBuilder::overwrite)
/// is on. Then data files get new names, so existing files stay unchanged until the commit.
/// `common.pt` has one name only: where it is about to change, `metadata.json` is removed first, so
/// a process that dies in between leaves a folder that Megatron-Core takes for no checkpoint, never
/// one that mixes two. Before that, `.dcp-commit` gets these files as they are and as they will be;
/// with it, [`recovered`] and all that reads checkpoints in dcp find the old checkpoint until
/// `.metadata` is replaced, and the new one from then on. Where the common state is inside both, or
/// its file is the same, the replacement of `.metadata` alone is the commit for Megatron-Core, too.
/// When the commit fails rather than dies, what was there before is put back: it is sent to the
/// storage before anything is removed, so that a full disk does not prevent it.
///
/// The [`Sidecar`](dcp_formats::dcp::Sidecar) is written too; Megatron-Core ignores it. It says that
/// the checkpoint is complete with `metadata.json` only: what a save that died before left is in the
/// way of no other one. A `.metadata` of which that is not said may be a checkpoint of PyTorch, and
/// stays unless overwriting is on.
pub struct MegatronWriter {
    dcp: DcpWriter,
    storage: Arc<dyn Storage>,
    common: Option<Value>,
    form: MegatronForm,
    profile: Profile,
    integrity: bool,
    overwrite: bool,
}

impl MegatronWriter {
    /// A writer with options, of which the form is the one that most versions read.
    pub fn builder(storage: Arc<dyn Storage>) -> MegatronWriterBuilder {
        MegatronWriterBuilder {
            dcp: DcpWriter::builder(Arc::clone(&storage)),
            storage,
            common: None,
            form: MegatronForm::default(),
            profile: Profile::Compat,
            integrity: false,
            overwrite: false,
        }
    }

    /// The common state as it is stored.
    fn encoded_common(&self) -> Result<Bytes, CheckpointError> {
        let value = self.common.clone().unwrap_or_else(|| Value::Dict(Dict::new()));
        if value.view().as_dict().is_none() {
            let problem = format!("it is a {}, not a dict", value.kind());
            return Err(FormatError::new("common state", problem).into());
        }
        let encoded = match self.form {
            MegatronForm::CommonFile => encode_value(&value, "common"),
            MegatronForm::CommonInside => {
                encode_value(&Value::List(vec![value.clone()]), "archive")
            }
        };
        let encoded = encoded.and_then(|encoded| {
            check_archive(&encoded)?;
            decode_object(&encoded)?;
            Ok(encoded)
        });
        encoded.map_err(|error| {
            let path = culprit(&value, &|part| encode_value(part, "archive").is_err());
            let problem = match path.is_empty() {
                true => error.problem().to_owned(),
                false => format!("at {path}: {}", error.problem()),
            };
            FormatError::new("common state", problem).with_source(error).into()
        })
    }

    /// Puts the common state among the objects, in a file of its own of rank 0.
    async fn put_common_inside(
        &self,
        generation: u64,
        encoded: Bytes,
        metadata: &mut CheckpointMetadata,
        reports: &mut Vec<WriteReport>,
    ) -> Result<Key, CheckpointError> {
        let taken: HashSet<&Key> =
            reports.iter().flat_map(|report| &report.files).map(|(key, _)| key).collect();
        let mut n = 0;
        let key = loop {
            let key = data_file(0, n, generation).map_err(StorageError::from)?;
            if !taken.contains(&key) {
                break key;
            }
            n += 1;
        };
        let full = || FormatError::new("checkpoint", "it has too many files");
        let file = metadata.intern_file(&key).ok_or_else(full)?;
        let encoding = metadata.intern_encoding(&Encoding::default()).ok_or_else(full)?;
        let byte_len = encoded.len() as u64;
        let placement = Placement { file, encoding, byte_offset: 0, byte_len };
        metadata.insert(COMMON_OBJECT, Entry::Object(ObjectEntry::new(Some(placement))));
        put(&*self.storage, &key, &encoded, PutMode::Create).await?;
        match reports.first_mut() {
            Some(report) => report.files.push((key.clone(), byte_len)),
            None => reports.push(WriteReport::new(vec![(key.clone(), byte_len)])),
        }
        Ok(key)
    }

    /// The hashes of all files that were written: those that the ranks have made of theirs, and of
    /// the files that have no hash yet. Data files are as they will be, so it is done before the while
    /// without a complete checkpoint.
    async fn hashes(
        &self,
        reports: &[WriteReport],
    ) -> Result<BTreeMap<Key, file_hashes::Digest>, CheckpointError> {
        let mut known: BTreeMap<Key, file_hashes::Digest> =
            reports.iter().flat_map(|report| report.sha256.clone()).collect();
        let files = reports.iter().flat_map(|report| &report.files);
        let others = files.filter(|(key, _)| !known.contains_key(key)).cloned().collect();
        known.extend(file_hashes::hashes(&*self.storage, others).await?);
        Ok(known)
    }

    /// The commit, after a failure of which all is as it was but the data files. What it writes of
    /// these is added to `written`.
    async fn try_commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        mut reports: Vec<WriteReport>,
        written: &mut Vec<Key>,
    ) -> Result<(), CheckpointError> {
        let claim = session.claim.clone();
        let before = self.look().await?;
        let mut with_common = None;
        if self.form == MegatronForm::CommonInside {
            let encoded = self.encoded_common()?;
            let metadata = with_common.insert(metadata.clone());
            let generation = session.generation;
            let key = self.put_common_inside(generation, encoded, metadata, &mut reports).await?;
            written.push(key);
        }
        let metadata = with_common.as_ref().unwrap_or(metadata);
        let mut staged = before.stage(&*self.storage).await?;
        let replaced = self.replace(session, metadata, reports, &before).await;
        if replaced.is_err() {
            let ours = dcp_formats::metadata::encode(metadata, self.profile).ok();
            written.extend(ours.as_ref().and_then(|bytes| sidecar_of(bytes).ok()));
            let restored = before
                .restore(&*self.storage, (claim.as_deref(), &mut staged), ours.as_ref())
                .await;
            if restored {
                self.forget().await;
            }
        }
        staged.abort().await;
        replaced
    }

    /// Reads the files of the checkpoint that is there, also where a process died while it
    /// overwrote it.
    async fn look(&self) -> Result<Before, StorageError> {
        Before::look(&*recovered(&self.storage).await?).await
    }

    async fn record(&self, all: &[Fixed]) -> Result<(), StorageError> {
        put(&*self.storage, &key(RECORD)?, &recovery::encode(all), PutMode::Overwrite).await
    }

    /// Removes the record: the files under their own names are those of one checkpoint.
    async fn forget(&self) {
        let removed = match key(RECORD) {
            Ok(key) => self.storage.delete(&[key]).await,
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "{RECORD} cannot be removed");
        }
    }

    /// Everything of the commit that can be undone.
    async fn replace(
        &self,
        mut session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
        before: &Before,
    ) -> Result<(), CheckpointError> {
        let json = self.form.metadata_json();
        let common = match self.form {
            MegatronForm::CommonFile => Some(self.encoded_common()?),
            MegatronForm::CommonInside => None,
        };
        let hashes = if self.integrity { self.hashes(&reports).await? } else { BTreeMap::new() };
        // After a death, the files are not yet as they were found.
        let was_left = read_small(&*self.storage, RECORD).await?.is_some();
        let same_common = common == before.common && !was_left;
        let in_place = same_common && before.is_described_as(json);
        let bytes = dcp_formats::metadata::encode(metadata, self.profile)?;
        let digest = recovery::digest(&bytes);
        let new = Fixed {
            metadata: digest,
            json: Bytes::from_static(json.as_bytes()),
            common: common.clone(),
            integrity: None,
        };
        let old = before.fixed().filter(|_| !in_place || before.has_integrity());
        if let Some(old) = &old {
            let both = [old.clone(), new.clone()];
            let both = if old.metadata == digest { &both[..1] } else { &both[..] };
            self.record(both).await?;
        }
        if !in_place {
            before.remove(&*self.storage, METADATA_JSON).await?;
        }
        before.remove(&*self.storage, INTEGRITY_FILE).await?;
        if old.is_some_and(|old| old.metadata == digest) {
            // The same index of another common state: this is the commit.
            self.record(&[new]).await?;
        }
        match &common {
            Some(bytes) if !same_common => {
                put(&*self.storage, &key(COMMON_FILE)?, bytes, PutMode::Overwrite).await?;
            }
            None => before.remove(&*self.storage, COMMON_FILE).await?,
            _ => {}
        }
        // What is replaced goes when the new checkpoint is complete, not a step earlier.
        let stale: HashSet<Key> = std::mem::take(&mut session.stale).into_iter().collect();
        self.dcp.commit(session, metadata, reports).await?;
        if common.is_some() && read_small(&*self.storage, COMMON_FILE).await? != common {
            return Err(overtaken()?.into());
        }
        if self.integrity {
            let manifest = file_hashes::manifest(&*self.storage, &stale, hashes, json).await?;
            put(&*self.storage, &key(INTEGRITY_FILE)?, &manifest, PutMode::Overwrite).await?;
        }
        let json = Bytes::from_static(json.as_bytes());
        put(&*self.storage, &key(METADATA_JSON)?, &json, PutMode::Overwrite).await?;
        self.forget().await;
        remove_unreferenced(&*self.storage, stale.into_iter().collect()).await;
        Ok(())
    }
}

#[async_trait]
impl StorageWriter for MegatronWriter {
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        self.dcp.encode_object(fqn, value)
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        // What cannot be written is known before the first byte is.
        self.encoded_common()?;
        // This saver holds the claim, so the files do not change during the checks.
        let session = self.dcp.begin().await;
        let before = match self.look().await {
            Err(_) if session.is_err() => return session,
            before => before?,
        };
        if let Some(json) = before.metadata_json {
            if !self.overwrite {
                return Err(refusal("there is a checkpoint here, and overwriting is off")?.into());
            }
            if before::names_other_backend(&json) {
                let message = "there is a checkpoint of another backend here, of which an \
                               overwrite would leave parts; take another folder";
                return Err(refusal(message)?.into());
            }
        }
        let mut session = session?;
        session.stale.extend(hinted_files(&*self.storage).await?);
        session.stale.sort_unstable();
        session.stale.dedup();
        Ok(session)
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        if global.metadata.get(COMMON_OBJECT).is_some() {
            let instead = "the common state is an option of the writer, not a planned object";
            let key = COMMON_OBJECT.to_owned();
            return Err(PlanRefusal::ReservedKey { key, instead }.into());
        }
        let mut plans = self.dcp.place(session, locals, global)?;
        // Of a large job, most ranks hold replicas only; an empty file of each would be the most of
        // the folder, and Megatron-Core makes none.
        for plan in plans.iter_mut().filter(|plan| plan.orders.is_empty()) {
            plan.files.clear();
        }
        Ok(plans)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        self.dcp.renamed(file, generation)
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        let report = self.dcp.write(local, plan, data).await?;
        if !self.integrity {
            return Ok(report);
        }
        // Here and not in the commit, for which all other ranks wait.
        let hashes = file_hashes::hashes(&*self.storage, report.files.clone()).await?;
        Ok(report.with_sha256(hashes))
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        // Held until metadata.json is there and what it replaces is gone.
        let claim = match &session.claim {
            Some(claim) => Some(Arc::clone(claim)),
            None => dcp_formats::dcp::claim(&*self.storage).await?,
        };
        let session = session.with_claim(claim.clone());
        let mut written: Vec<Key> =
            reports.iter().flat_map(|report| &report.files).map(|(key, _)| key.clone()).collect();
        let committed = self.try_commit(session, metadata, reports, &mut written).await;
        match &committed {
            // The request may still take effect: its outcome is unknown.
            Err(CheckpointError::Storage(error)) if error.is_retryable() => {}
            Err(_) => remove_unreferenced(&*self.storage, written).await,
            Ok(()) => {}
        }
        drop(claim);
        committed
    }

    async fn abandon(&self, plan: &WritePlan) {
        self.dcp.abandon(plan).await;
    }
}

fn key(name: &str) -> Result<Key, StorageError> {
    Ok(Key::new(name)?)
}

fn refusal(message: &str) -> Result<StorageError, StorageError> {
    let key = key(METADATA_JSON)?;
    let error = StorageError::new(StorageErrorKind::AlreadyExists, StorageOp::Put, Some(key));
    Ok(error.with_message(message))
}

fn overtaken() -> Result<StorageError, StorageError> {
    let key = key(COMMON_FILE)?;
    let error = StorageError::new(StorageErrorKind::AlreadyExists, StorageOp::Put, Some(key));
    Ok(error.with_message("another save replaced it since this one began to commit"))
}

/// Puts a small object. After a lost reply, the stored object decides whether it failed.
async fn put(
    storage: &dyn Storage,
    key: &Key,
    bytes: &Bytes,
    mode: PutMode,
) -> Result<(), StorageError> {
    let Err(error) = storage.put(key, Payload::from(bytes.clone()), mode).await else {
        return Ok(());
    };
    if error.is_retryable()
        && let Ok(Some(found)) = read_small(storage, key.as_str()).await
        && found == *bytes
    {
        return Ok(());
    }
    Err(error)
}

impl fmt::Debug for MegatronWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MegatronWriter")
            .field("dcp", &self.dcp)
            .field("form", &self.form)
            .field("integrity", &self.integrity)
            .finish_non_exhaustive()
    }
}
