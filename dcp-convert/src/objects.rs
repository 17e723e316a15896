//! Reading the objects of a checkpoint.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::{
    CheckpointError, CheckpointMetadata, DataSink, Entry, LoadPlan, PlanError, ReadItem, ReadKind,
    TensorView, Value,
};

use crate::source::Source;

/// Objects to ask for in one read.
const BATCH: usize = 1024;

/// The value of an object, or why it could not be read.
pub type ObjectResult = Result<Value, CheckpointError>;

/// Reads the objects at positions `entries` of the metadata, which is that of `source`; each is
/// there in the result. One that cannot be read does not keep the others from being read.
pub async fn read_objects(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
) -> HashMap<usize, ObjectResult> {
    let mut results = HashMap::with_capacity(entries.len());
    // Every read of a file of `torch.save` parses its pickle.
    let at_once = if source.save_reader().is_some() { usize::MAX } else { BATCH };
    for batch in entries.chunks(at_once) {
        let mut open = vec![batch];
        while let Some(batch) = open.pop() {
            match (read_batch(source, metadata, batch).await, batch) {
                (Ok(values), _) => {
                    results.extend(values.into_iter().map(|(at, value)| (at, Ok(value))));
                }
                (Err(error), [entry]) => _ = results.insert(*entry, Err(error)),
                // Somewhere in it is a bad one: find it.
                (Err(_), batch) => {
                    let (first, second) = batch.split_at(batch.len() / 2);
                    open.extend([second, first]);
                }
            }
        }
        for &entry in batch {
            results.entry(entry).or_insert_with(|| Err(missing(metadata, entry)));
        }
    }
    results
}

/// Reads one object.
///
/// # Errors
///
/// When there is no object of that name, or it cannot be read.
pub async fn read_object(source: &Source, fqn: &str) -> Result<Value, CheckpointError> {
    let metadata = source.metadata().await?;
    let absent = || {
        let problem = "there is no object of that name".to_owned();
        CheckpointError::from(PlanError::Unsupported { fqn: fqn.to_owned(), problem })
    };
    let entry = metadata.index_of(fqn).ok_or_else(absent)?;
    read_batch(source, &metadata, &[entry]).await?.remove(&entry).ok_or_else(absent)
}

/// All positions of objects.
pub(crate) fn object_entries(metadata: &CheckpointMetadata) -> Vec<usize> {
    let objects = metadata.iter().enumerate();
    objects.filter(|(_, (_, entry))| matches!(entry, Entry::Object(_))).map(|(at, _)| at).collect()
}

async fn read_batch(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
) -> Result<HashMap<usize, Value>, CheckpointError> {
    let mut plan = LoadPlan::default();
    for &entry in entries {
        let placed = metadata.at(entry).and_then(|(_, e)| e.as_object());
        let (Some(_), Ok(entry)) = (placed, u32::try_from(entry)) else {
            return Err(missing(metadata, entry));
        };
        plan.items.push(ReadItem { entry, leaf: entry, kind: ReadKind::Object });
    }
    if plan.items.is_empty() {
        return Ok(HashMap::new());
    }
    let sink = Arc::new(ObjectSink { metadata: Arc::clone(metadata), values: Mutex::default() });
    source.reader.read(metadata, &plan, Arc::clone(&sink) as Arc<dyn DataSink>).await?;
    let mut values = sink.values.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *values))
}

fn missing(metadata: &CheckpointMetadata, entry: usize) -> CheckpointError {
    let fqn = metadata.at(entry).map_or_else(String::new, |(fqn, _)| fqn.to_string());
    PlanError::Unsupported { fqn, problem: "the metadata does not say where its bytes are".into() }
        .into()
}

#[derive(Debug)]
struct ObjectSink {
    metadata: Arc<CheckpointMetadata>,
    values: Mutex<HashMap<usize, Value>>,
}

impl DataSink for ObjectSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let known = self.metadata.at(item.entry as usize);
        Err(PlanError::Unsupported {
            fqn: known.map_or_else(String::new, |(fqn, _)| fqn.to_string()),
            problem: "a tensor where an object was asked for".to_owned(),
        }
        .into())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(item.entry as usize, value);
        Ok(())
    }
}
