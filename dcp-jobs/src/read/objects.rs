//! Reads the objects of a checkpoint.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::checkpoint::DataSink;
use dcp_core::metadata::Entry;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Shard, TensorView, Value};

use crate::error::ReadRefusal;
use crate::source::Source;

/// The maximum number of objects per read.
const BATCH: usize = 1024;
/// The size in bytes after which a read of objects ends.
const BATCH_BYTES: u64 = 64 << 20;

/// The value of an object, or the error of reading it.
pub type ObjectResult = Result<Value, CheckpointError>;

/// Reads the objects at positions `entries` of `metadata`, the metadata of `source`. The result has
/// one item for each; an error of one does not affect the others.
///
/// Objects of a `torch.save` file may share memory there that each owns here. When they exceed the
/// size of the file by far, the remaining ones are not read.
pub async fn read_objects(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
) -> HashMap<usize, ObjectResult> {
    let mut results = HashMap::with_capacity(entries.len());
    let mut batches = ObjectBatches::new(source, metadata, entries);
    let (mut held, mut limit) = (0_u64, HELD_MIN);
    while let Some(batch) = batches.next().await {
        let values = batch.iter().filter_map(|(_, value)| value.as_ref().ok());
        held = values.map(weight).fold(held, u64::saturating_add);
        results.extend(batch);
        if held > limit && limit == HELD_MIN {
            limit = held_max(source, metadata).await;
        }
        if held > limit {
            break;
        }
    }
    for &entry in entries {
        results.entry(entry).or_insert_with(|| Err(too_much(metadata, entry, limit)));
    }
    results
}

/// Bytes that objects may occupy together, whatever the size of their files.
const HELD_MIN: u64 = 256 << 20;

/// [`HELD_MIN`] plus an amount in proportion to the files. No limit when the sizes of files are
/// unknown, as for a view of several checkpoints.
async fn held_max(source: &Source, metadata: &CheckpointMetadata) -> u64 {
    const PER_BYTE: u64 = 16;
    let mut len = 0_u64;
    for file in metadata.files() {
        match source.storage.stat(file).await {
            Ok(meta) => len = len.saturating_add(meta.byte_len),
            Err(_) => return u64::MAX,
        }
    }
    len.saturating_mul(PER_BYTE).saturating_add(HELD_MIN)
}

fn too_much(metadata: &CheckpointMetadata, entry: usize, limit: u64) -> CheckpointError {
    let fqn = metadata.entry_name(entry).into_owned();
    ReadRefusal::ObjectMemory { key: fqn, limit }.into()
}

/// Reads objects in batches of little memory.
pub(crate) struct ObjectBatches<'a> {
    source: &'a Source,
    metadata: &'a Arc<CheckpointMetadata>,
    /// The remaining objects; the next ones are last.
    open: Vec<Vec<usize>>,
}

impl<'a> ObjectBatches<'a> {
    pub(crate) fn new(
        source: &'a Source,
        metadata: &'a Arc<CheckpointMetadata>,
        entries: &[usize],
    ) -> Self {
        // Every read of a pickle that holds all objects parses the whole.
        let at_once = if source.single_pickle().is_some() { usize::MAX } else { BATCH };
        let open = entries.chunks(at_once).rev().map(<[usize]>::to_vec).collect();
        Self { source, metadata, open }
    }

    /// The next objects, at least one; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Vec<(usize, ObjectResult)>> {
        loop {
            let batch = self.open.pop()?;
            match (read_up_to(self.source, self.metadata, &batch, BATCH_BYTES).await, &*batch) {
                (Ok(Taken { mut values, stopped, .. }), _) => {
                    let (mut got, mut left) = (Vec::with_capacity(values.len()), Vec::new());
                    for entry in batch {
                        match values.remove(&entry) {
                            Some(value) => got.push((entry, Ok(value))),
                            None if stopped => left.push(entry),
                            None => got.push((entry, Err(missing(self.metadata, entry)))),
                        }
                    }
                    if !left.is_empty() {
                        self.open.push(left);
                    }
                    return Some(got);
                }
                (Err(error), [entry]) => return Some(vec![(*entry, Err(error))]),
                // The batch contains a bad object; halves find it.
                (Err(_), batch) => {
                    let (first, second) = batch.split_at(batch.len() / 2);
                    self.open.extend([second.to_vec(), first.to_vec()]);
                }
            }
        }
    }
}

/// Bytes of memory that a value owns, without what a batch shares.
fn weight(value: &Value) -> u64 {
    match value {
        Value::Opaque(opaque) => (opaque.encoded.len() as u64).saturating_add(weight(&opaque.view)),
        Value::Tensor(tensor) => {
            tensor.shards().iter().map(Shard::byte_len).fold(0, u64::saturating_add)
        }
        Value::List(items) | Value::Tuple(items) => {
            items.iter().map(weight).fold(0, u64::saturating_add)
        }
        Value::Dict(dict) => dict.iter().map(|(_, item)| weight(item)).fold(0, u64::saturating_add),
        Value::Object(object) => {
            let parts = object.args.iter().chain(&object.items).chain(&object.state);
            parts.map(weight).fold(0, u64::saturating_add)
        }
        _ => 0,
    }
}

/// Reads one object by name.
///
/// # Errors
///
/// When no object has this name, or it cannot be read.
pub async fn read_object(source: &Source, fqn: &str) -> Result<Value, CheckpointError> {
    let metadata = source.metadata().await?;
    let missing = || PlanError::Missing { fqns: vec![fqn.to_owned()] };
    let entry = metadata.index_of(fqn).ok_or_else(missing)?;
    if metadata.at(entry).is_some_and(|(_, entry)| entry.as_tensor().is_some()) {
        return Err(PlanError::not_an_object(fqn).into());
    }
    let mut taken = read_up_to(source, &metadata, &[entry], u64::MAX).await?;
    taken.values.remove(&entry).ok_or_else(|| unread(&metadata, entry))
}

/// The positions of all objects.
pub(crate) fn object_entries(metadata: &CheckpointMetadata) -> Vec<usize> {
    let objects = metadata.iter().enumerate();
    objects.filter(|(_, (_, entry))| matches!(entry, Entry::Object(_))).map(|(at, _)| at).collect()
}

/// Reads objects until they occupy `limit` bytes; at least one.
async fn read_up_to(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
    limit: u64,
) -> Result<Taken, CheckpointError> {
    let mut plan = LoadPlan::default();
    for &entry in entries {
        let placed = metadata.at(entry).and_then(|(_, e)| e.as_object());
        let (Some(_), Ok(entry)) = (placed, u32::try_from(entry)) else {
            return Err(missing(metadata, entry));
        };
        plan.items.push(ReadItem { entry, leaf: entry, kind: ReadKind::Object });
    }
    if plan.items.is_empty() {
        return Ok(Taken::default());
    }
    let taken = Mutex::new(Taken { left: limit, ..Taken::default() });
    let sink = Arc::new(ObjectSink { taken });
    let read = source.reader.read(metadata, &plan, Arc::clone(&sink) as Arc<dyn DataSink>).await;
    let mut taken = sink.taken.lock().unwrap_or_else(PoisonError::into_inner);
    if !taken.stopped {
        read?;
    }
    Ok(std::mem::take(&mut *taken))
}

fn missing(metadata: &CheckpointMetadata, entry: usize) -> CheckpointError {
    let fqn = metadata.entry_name(entry).into_owned();
    PlanError::Index { fqn, problem: "it does not say where its bytes are".into() }.into()
}

/// The reader returned without the value of an object.
pub(crate) fn unread(metadata: &CheckpointMetadata, entry: usize) -> CheckpointError {
    let fqn = metadata.entry_name(entry).into_owned();
    PlanError::unread(fqn, "the value").into()
}

#[derive(Debug)]
struct ObjectSink {
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    values: HashMap<usize, Value>,
    /// Bytes until the limit.
    left: u64,
    /// Whether values were refused because of the limit.
    stopped: bool,
}

impl DataSink for ObjectSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        Err(item.unrequested().into())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.left == 0 {
            taken.stopped = true;
            return Err(CheckpointError::Canceled);
        }
        taken.left = taken.left.saturating_sub(weight(&value));
        taken.values.insert(item.entry as usize, value);
        Ok(())
    }
}
