//! Reads the flat buffers of a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::digest::Sha256;
use dcp_core::metadata::{Entry, Layout, TensorEntry};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Key, Region, Value};
use dcp_jobs::cast::{CastOptions, Caster};
use dcp_jobs::read::{TensorReader, read_object};
use dcp_jobs::{JobError, Source};

use super::check::cast;
use super::keys::{BucketKey, BufferKey, GroupKey, GroupObjectKey, StateKind};
use super::parameter_search::{BucketShape, Elements};
use super::window::Window;
use crate::error::MegatronError;

/// One gradient buffer of a group of ranks, and the optimizer's state for it.
#[derive(Clone, Debug)]
pub(super) struct FlatBuffer {
    pub(super) key: BufferKey,
    /// The dtype of the parameters, where it is one that weights are stored in.
    pub(super) dtype: Option<DType>,
    pub(super) buckets: Vec<Bucket>,
}

/// A bucket, or several one after the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Bucket {
    pub(super) shape: BucketShape,
    /// Part and entry of the tensor of each state, by its name.
    pub(super) states: BTreeMap<Arc<str>, (usize, usize)>,
}

/// All flat buffers, and the checkpoints that their tensors lie in: the first is the one that was
/// looked at.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) parts: Vec<Source>,
    pub(super) all: Vec<FlatBuffer>,
}

impl Buffers {
    /// The buffers in `source`. `data_parallel` is the number of ranks that share a bucket, where
    /// it is known; `padded` whether buckets are stored with the padding at their end.
    pub(super) async fn find(
        source: &Source,
        metadata: &Arc<CheckpointMetadata>,
        data_parallel: Option<u64>,
        padded: bool,
    ) -> Result<Self, MegatronError> {
        let mut buffers: BTreeMap<BufferKey, BTreeMap<u64, Bucket>> = BTreeMap::new();
        for (at, (fqn, entry)) in metadata.iter().enumerate() {
            let (Some(key), Some(tensor)) = (BucketKey::parse(fqn), entry.as_tensor()) else {
                continue;
            };
            let bucket = buffers.entry(key.buffer).or_default().entry(key.bucket).or_default();
            if StateKind::of(&key.state) == Some(StateKind::Master) {
                bucket.shape = shape(tensor, padded);
            }
            bucket.states.insert(key.state, (0, at));
        }
        let mut all = Vec::with_capacity(buffers.len());
        for (key, mut buckets) in buffers {
            let lengths = bucket_lengths(source, metadata, &key, "per_bucket_numel").await;
            for (number, length) in (0..).zip(lengths.into_iter().flatten()) {
                let Some(bucket) = buckets.get_mut(&number) else { continue };
                bucket.shape.ranks = data_parallel.and_then(|ranks| {
                    let share = length.checked_div(ranks).filter(|share| *share > 0)?;
                    Some((ranks, share))
                });
            }
            if padded {
                let name = "per_bucket_numel_unpadded";
                let lengths = bucket_lengths(source, metadata, &key, name).await;
                for (number, length) in (0..).zip(lengths.into_iter().flatten()) {
                    if let Some(bucket) = buckets.get_mut(&number) {
                        bucket.shape.end_at(length);
                    }
                }
            }
            let buckets = buckets.into_values().collect();
            all.push(FlatBuffer { dtype: param_dtype(&key.dtypes), key, buckets });
        }
        let mut found = Self { parts: vec![source.clone()], all };
        for (fqn, entry) in metadata.iter() {
            let Some(key) = GroupObjectKey::parse(fqn).filter(|key| key.name == "param_state")
            else {
                continue;
            };
            found.add_archive(fqn, entry, metadata, key.group).await?;
        }
        Ok(found)
    }

    /// Adds the buffers in an object: all buckets of each one after the other. The object is an
    /// archive of its own, so that its tensors need not be read as a whole.
    async fn add_archive(
        &mut self,
        fqn: &str,
        entry: &Entry,
        metadata: &CheckpointMetadata,
        group: GroupKey,
    ) -> Result<(), MegatronError> {
        let Some(first) = self.parts.first() else { return Ok(()) };
        let placement = entry.as_object().and_then(|object| object.placement);
        let placed = placement.and_then(|placement| {
            let encoding = metadata.encoding(&placement)?;
            let whole = encoding.layout == Layout::TorchArchive && encoding.transforms.is_empty();
            Some((placement, metadata.file(placement.file).filter(|_| whole)?.clone()))
        });
        let Some((placement, file)) = placed else {
            let problem = "is not stored as an archive of its own".to_owned();
            return Err(MegatronError::Optimizer { what: fqn.to_owned(), problem });
        };
        let name = Key::new("param_state").map_err(dcp_core::StorageError::from)?;
        let (offset, len) = (placement.byte_offset, placement.byte_len);
        let storage = Arc::clone(&first.storage);
        let storage = Window::new(storage, file, offset, len, name.clone());
        let part = Source::torch_save(Arc::new(storage), name);
        self.add_coalesced(part, group).await
    }

    /// Adds the buffers in a file or object of `{buffer: {dtypes: {state: tensor}}}`.
    pub(super) async fn add_coalesced(
        &mut self,
        part: Source,
        group: GroupKey,
    ) -> Result<(), MegatronError> {
        let metadata = part.metadata().await?;
        let mut buffers: BTreeMap<(u64, u64, Arc<str>), Bucket> = BTreeMap::new();
        for (at, (fqn, entry)) in metadata.iter().enumerate() {
            let Some(tensor) = entry.as_tensor() else { continue };
            let Some((outer, rest)) = fqn.split_once(".(") else { continue };
            let Some((dtypes, state)) = rest.rsplit_once(").") else { continue };
            // In a list there is a number before that of the buffer: an object is a list of one,
            // a file of chained optimizers one of them.
            let mut numbers = outer.rsplit('.');
            let buffer = numbers.next().and_then(|number| number.parse().ok());
            let item = numbers.next().map_or(Some(0), |number| number.parse().ok());
            let (Some(item), Some(buffer)) = (item, buffer) else { continue };
            let key = (item, buffer, format!("({dtypes})").into());
            let bucket = buffers.entry(key).or_default();
            if StateKind::of(state) == Some(StateKind::Master) {
                bucket.shape =
                    BucketShape { coalesced: true, bounds: None, ..shape(tensor, false) };
            }
            bucket.states.insert(state.into(), (self.parts.len(), at));
        }
        if buffers.is_empty() {
            let what = format!("{}.param_state", group.prefix());
            let problem = "holds no buffers of parameters, exp_avg and exp_avg_sq".to_owned();
            return Err(MegatronError::Optimizer { what, problem });
        }
        let chained = buffers.keys().any(|(item, ..)| *item > 0);
        for ((item, buffer, dtypes), bucket) in buffers {
            let dtype = param_dtype(&dtypes);
            let mut group = group.clone();
            if chained {
                group.chained = Some(item);
            }
            let key = BufferKey { group, buffer, dtypes };
            self.all.push(FlatBuffer { key, dtype, buckets: vec![bucket] });
        }
        self.parts.push(part);
        Ok(())
    }
}

fn shape(tensor: &TensorEntry, padded: bool) -> BucketShape {
    let elements = tensor.shape.checked_volume().unwrap_or(0);
    let mut bounds = BTreeSet::from([0]);
    for chunk in tensor.chunks.iter() {
        if let ([start], [len]) = (chunk.offsets, chunk.sizes) {
            bounds.extend([*start, start.saturating_add(*len)]);
        }
    }
    // One chunk for all says nothing, and equal ones may be the parts of ranks, as zarr has them.
    let lengths: BTreeSet<_> = tensor.chunks.iter().map(|chunk| chunk.sizes.to_vec()).collect();
    let has_bounds = tensor.chunks.len() > 1 && !(padded && lengths.len() == 1);
    let bounds = (has_bounds && tensor.shape.ndim() == 1).then_some(bounds);
    BucketShape { elements, bounds, padded, ..BucketShape::default() }
}

/// The dtype of the parameters in a text such as `(torch.bfloat16, torch.float32)`.
fn param_dtype(dtypes: &str) -> Option<DType> {
    match dtypes.trim_start_matches('(').split(',').next()?.trim() {
        "torch.bfloat16" => Some(DType::BFloat16),
        "torch.float16" | "torch.half" => Some(DType::Float16),
        "torch.float32" | "torch.float" => Some(DType::Float32),
        _ => None,
    }
}

/// The lengths of a buffer's buckets, from an object of the checkpoint.
async fn bucket_lengths(
    source: &Source,
    metadata: &CheckpointMetadata,
    key: &BufferKey,
    name: &str,
) -> Option<Vec<u64>> {
    let fqn = format!("{}.{name}/shard_0_1", key.group.prefix());
    metadata.get(&fqn)?;
    // Only a hint: where it cannot be read, places are found without it.
    let value = read_object(source, &fqn).await.ok()?;
    let Value::List(outer) = value.view() else { return None };
    let Value::List(buffers) = outer.first()?.view() else { return None };
    let buffer = buffers.get(usize::try_from(key.buffer).ok()?)?.view().as_dict()?;
    let of_dtypes = |(name, lengths): (&Value, &Value)| {
        let Value::List(lengths) = lengths else { return None };
        dcp_core::value::python_str(name)
            .is_some_and(|name| name == *key.dtypes)
            .then(|| lengths.clone())
    };
    let lengths = buffer.iter().find_map(of_dtypes)?;
    lengths.iter().map(|length| u64::try_from(length.as_int()?).ok()).collect()
}

/// The master parameters of a buffer's buckets, as they would be in the model.
#[derive(Debug)]
pub(super) struct Masters {
    buckets: Vec<(TensorReader, Caster)>,
}

impl Masters {
    /// `None` when the buffer has no master parameters.
    pub(super) async fn of(
        buffer: &FlatBuffer,
        dtype: DType,
        parts: &[Source],
    ) -> Result<Option<Self>, MegatronError> {
        let mut buckets = Vec::with_capacity(buffer.buckets.len());
        for bucket in &buffer.buckets {
            let master = bucket
                .states
                .iter()
                .find(|(name, _)| StateKind::of(name) == Some(StateKind::Master));
            let Some((_, (part, entry))) = master else { return Ok(None) };
            let Some(part) = parts.get(*part) else { return Ok(None) };
            let metadata = part.metadata().await?;
            let reader = TensorReader::new(Arc::clone(&part.reader), metadata, *entry)?;
            let from = reader.tensor()?.dtype;
            let caster = Caster::new(reader.fqn(), from, dtype, CastOptions::default())
                .map_err(JobError::from)?;
            buckets.push((reader, caster));
        }
        Ok(Some(Self { buckets }))
    }
}

#[async_trait]
impl Elements for Masters {
    async fn read(&self, bucket: usize, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let Some((reader, caster)) = self.buckets.get(bucket) else { return Ok(Vec::new()) };
        let whole = Region::full(reader.tensor()?.shape.clone());
        let whole =
            whole.map_err(|error| dcp_core::FormatError::new("tensor", error.to_string()))?;
        Ok(cast(caster, &reader.read_range(&whole, range).await?))
    }

    async fn digest(&self, bucket: usize, range: Range<u64>) -> Result<[u8; 32], CheckpointError> {
        const SEGMENT: u64 = 1 << 20;
        let mut hash = Sha256::new();
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at.saturating_add(SEGMENT));
            hash.update(self.read(bucket, at..end).await?);
            at = end;
        }
        Ok(hash.finish())
    }
}
