//! Reads checkpoints of the zarr backend (up to 0.15): an array per tensor, a `torch.save` file per
//! object.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement};
use dcp_core::plan::{LoadPlan, ReadItem};
use dcp_core::storage::ObjectMeta;
use dcp_core::value::Opaque;
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, FormatError, Storage, StorageReader, TensorView,
    Value,
};
use dcp_formats::torch_save::encode_value;
use dcp_formats::zarr::ZarrReader;

use crate::sharded::ObjectKey;

/// The ending of an object's file.
const OBJECT_ENDING: &str = ".pt";

/// Reads arrays as the tensors they are, and objects as lists of one, as later formats store them.
pub(crate) struct ZarrCheckpoint {
    arrays: ZarrReader,
    /// The place of everything.
    stored: Arc<CheckpointMetadata>,
    /// The entries as in `stored`, but objects have no stored bytes: they are computed as lists of
    /// one.
    shown: Arc<CheckpointMetadata>,
    warnings: Vec<String>,
}

impl ZarrCheckpoint {
    pub(crate) async fn open(
        storage: Arc<dyn Storage>,
        tolerant: bool,
    ) -> Result<Self, CheckpointError> {
        let arrays = ZarrReader::open(storage, tolerant).await?;
        let mut warnings = Vec::new();
        let objects = objects(arrays.others(), &mut warnings);
        let stored = (*arrays.metadata().await?).clone();
        let stored = with_objects(stored, &objects, Layout::TorchArchive)?;
        let shown = with_objects((*arrays.metadata().await?).clone(), &objects, Layout::Computed)?;
        Ok(Self { arrays, stored: Arc::new(stored), shown: Arc::new(shown), warnings })
    }

    /// Returns the damage, which only a tolerant reader has.
    pub(crate) fn damage(&self) -> &[String] {
        self.arrays.warnings()
    }

    /// Returns the warnings about oddities that did not keep it from being opened.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// The objects among files, by the unique keys that Megatron-Core requests them by. Before 0.8 it
/// left out the last axis of the grid in a file's name, which is as long as the offsets reach.
fn objects<'f>(
    files: &'f [ObjectMeta],
    warnings: &mut Vec<String>,
) -> Vec<(ObjectKey, &'f ObjectMeta)> {
    let mut found = Vec::new();
    let mut reach: HashMap<(Arc<str>, Dims), u64> = HashMap::new();
    for meta in files {
        let Some(name) = meta.key.as_str().strip_suffix(OBJECT_ENDING) else { continue };
        let Some(at) = ObjectKey::parse(name) else {
            if meta.key.file_name().starts_with("shard_") {
                warnings.push(format!("{:?} has the name of no object: it is left out", meta.key));
            }
            continue;
        };
        if let (Some((0, rest)), Some(last)) = (at.grid().split_last(), at.offset().last()) {
            let reach = reach.entry((Arc::clone(at.key()), rest.into())).or_insert(0);
            *reach = (*reach).max(last.saturating_add(1));
        }
        found.push((at, meta));
    }
    let whole = found.into_iter().filter_map(|(at, meta)| {
        let Some((0, rest)) = at.grid().split_last() else { return Some((at, meta)) };
        let last = *reach.get(&(Arc::clone(at.key()), rest.into()))?;
        Some((at.with_last_axis(last), meta))
    });
    let mut whole: Vec<_> = whole.collect();
    whole.sort_by(|(a, _), (b, _)| a.cmp(b));
    whole
}

fn with_objects(
    mut metadata: CheckpointMetadata,
    objects: &[(ObjectKey, &ObjectMeta)],
    layout: Layout,
) -> Result<CheckpointMetadata, CheckpointError> {
    let full = || FormatError::new("index", "it has too many files or encodings");
    for (at, meta) in objects {
        let fqn = at.to_string();
        if metadata.get(&fqn).is_some() {
            let problem = format!("{:?} and another file are both {fqn:?}", meta.key);
            return Err(FormatError::new("checkpoint", problem).into());
        }
        let file = metadata.intern_file(&meta.key).ok_or_else(full)?;
        let encoding = metadata.intern_encoding(&Encoding::new(layout)).ok_or_else(full)?;
        let placement = Placement { file, encoding, byte_offset: 0, byte_len: meta.byte_len };
        metadata.insert(fqn, Entry::Object(ObjectEntry::new(Some(placement))));
    }
    Ok(metadata)
}

#[async_trait]
impl StorageReader for ZarrCheckpoint {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.shown))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        self.arrays.read(&self.stored, plan, Arc::new(Wrapping { sink })).await
    }
}

/// Gives a sink its objects in lists of one.
#[derive(Debug)]
struct Wrapping {
    sink: Arc<dyn DataSink>,
}

impl DataSink for Wrapping {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.sink.destination(item)
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        self.sink.commit(item)
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        self.sink.object(item, in_list(value)?)
    }
}

/// A list of one, opaque when its item is.
fn in_list(item: Value) -> Result<Value, FormatError> {
    let view = match &item {
        Value::Opaque(opaque) => Value::List(vec![opaque.view.clone()]),
        _ => return Ok(Value::List(vec![item])),
    };
    let encoded = encode_value(&Value::List(vec![item]), "archive")?;
    Ok(Value::Opaque(Arc::new(Opaque { encoded, view })))
}

impl fmt::Debug for ZarrCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZarrCheckpoint").field("arrays", &self.arrays).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Key;

    use super::*;

    #[test]
    fn short_names_are_completed_and_others_left_out() {
        let files: Vec<_> = [
            "rng_state/shard_0.1_1.pt",
            "rng_state/shard_0.0_1.pt",
            "a._extra_state/shard_1.0_2.4.pt",
            "common.pt",
            "deep/er/shard_0_1.pt",
            "rng_state/readme.txt",
        ]
        .into_iter()
        .map(|name| ObjectMeta::new(Key::new(name).unwrap(), 1))
        .collect();
        let mut warnings = Vec::new();
        let keys: Vec<_> =
            objects(&files, &mut warnings).iter().map(|(at, _)| at.to_string()).collect();
        assert_eq!(
            keys,
            ["a._extra_state/shard_1.0_2.4", "rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"]
        );
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("deep/er"), "{warnings:?}");
    }
}
