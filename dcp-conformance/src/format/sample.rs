//! The checkpoints that the suite saves, and their plans for two ranks.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::dims::checked_volume;
use dcp_core::metadata::{Entry, ObjectEntry, TensorEntry};
use dcp_core::plan::{GlobalPlan, PlanKey, SavePlan, SelectedItem, TensorSpec};
use dcp_core::storage::OwnThreads;
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Dims, Payload, Region, StorageWriter, Value,
};

use super::subject::Features;
use crate::case::{Failure, ensure};
use crate::numbers::Numbers;

/// The contents of a checkpoint.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Sample {
    /// The tensors.
    pub tensors: Vec<SampleTensor>,
    /// The objects, by FQN.
    pub objects: Vec<(String, Value)>,
}

/// A tensor of a [`Sample`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SampleTensor {
    /// Its flat name.
    pub fqn: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Dims,
    /// Its elements, row-major and little-endian.
    pub bytes: Bytes,
    /// The parts that ranks write: rank, offsets, sizes.
    parts: Vec<(u32, Vec<u64>, Vec<u64>)>,
}

impl SampleTensor {
    /// A tensor with these row-major, little-endian elements.
    #[must_use]
    pub fn new(fqn: &str, dtype: DType, shape: impl Into<Dims>, bytes: Bytes) -> Self {
        let shape = shape.into();
        let parts = vec![(0, vec![0; shape.ndim()], shape.to_vec())];
        Self { fqn: fqn.to_owned(), dtype, shape, bytes, parts }
    }

    /// The elements of `region`, row-major and little-endian.
    pub(super) fn elements(&self, region: &Region) -> Result<Vec<u8>, Failure> {
        let size = self.dtype.size();
        let mut elements = Vec::new();
        for (at, count) in region.runs_in(&self.shape) {
            let at = usize::try_from(at)? * size;
            let run = self.bytes.get(at..at + usize::try_from(count)? * size);
            ensure!(run.is_some(), "{:?} has no bytes for {region}", self.fqn);
            elements.extend_from_slice(run.unwrap_or_default());
        }
        Ok(elements)
    }
}

impl Sample {
    /// A sample of these tensors and objects.
    #[must_use]
    pub fn new(tensors: Vec<SampleTensor>, objects: Vec<(String, Value)>) -> Self {
        Self { tensors, objects }
    }

    /// The state that the suite saves. Another seed gives other contents with the same names,
    /// dtypes and shapes.
    pub(super) fn generated(seed: u64, features: &Features) -> Self {
        let mut numbers = Numbers(seed);
        // FQN, dtype, shape, and the rank, offset and size of each part along an axis.
        type Part = (u32, usize, u64, u64);
        let tensors: [(&str, DType, &[u64], &[Part]); 9] = [
            ("layer.weight", DType::Float32, &[6, 5], &[(0, 0, 0, 3), (1, 0, 3, 3)]),
            ("layer.bias", DType::BFloat16, &[7], &[(0, 0, 0, 4), (1, 0, 4, 3)]),
            ("columns", DType::Int64, &[4, 6], &[(0, 1, 0, 2), (1, 1, 2, 4)]),
            ("mask", DType::UInt8, &[3, 2, 2], &[(1, 0, 0, 3)]),
            ("one rank.scale", DType::Float64, &[300], &[(0, 0, 0, 300)]),
            // Longer than the buffers and blocks of a toy.
            ("long", DType::UInt8, &[120, 75], &[(0, 0, 0, 80), (1, 0, 80, 40)]),
            ("replicated", DType::Float16, &[5], &[(0, 0, 0, 5)]),
            ("empty", DType::Float32, &[0, 3], &[(0, 0, 0, 0)]),
            ("step", DType::Int64, &[], &[]),
        ];
        let is_stored = |shape: &[u64]| {
            (features.scalars || !shape.is_empty())
                && (features.empty_tensors || !shape.contains(&0))
        };
        let tensors = tensors.into_iter().filter(|(_, _, shape, _)| is_stored(shape));
        let tensors = tensors.map(|(fqn, dtype, shape, parts)| {
            let len = checked_volume(shape).unwrap_or(0) * dtype.size() as u64;
            let bytes: Vec<u8> = (0..len).map(|_| numbers.below(256) as u8).collect();
            let mut tensor = SampleTensor::new(fqn, dtype, shape, bytes.into());
            let part = |&(rank, axis, offset, size): &Part| {
                let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
                (offsets[axis], sizes[axis]) = (offset, size);
                (rank, offsets, sizes)
            };
            if !parts.is_empty() {
                tensor.parts = parts.iter().map(part).collect();
            }
            tensor
        });
        let tensors = tensors.collect();
        let mut config = Dict::new();
        config.insert("rate", 0.125);
        config.insert("names", Value::List(vec!["a".into(), Value::None]));
        let mut objects = vec![
            ("epoch".to_owned(), Value::Int(seed as i64)),
            ("note".to_owned(), Value::from("a text")),
            ("config".to_owned(), Value::Dict(config)),
        ];
        objects.retain(|_| features.objects);
        Self { tensors, objects }
    }

    /// The plans of two ranks, the coordinator's plan, and each rank's data.
    pub(super) fn planned(&self, writer: &dyn StorageWriter) -> Result<Planned, Failure> {
        let mut planned = Planned {
            locals: vec![SavePlan::new(); RANKS],
            global: GlobalPlan {
                metadata: CheckpointMetadata::new(),
                selections: vec![Vec::new(); RANKS],
                ..GlobalPlan::default()
            },
            data: vec![Vec::new(); RANKS],
        };
        for tensor in &self.tensors {
            let mut entry = TensorEntry::new(tensor.dtype, tensor.shape.clone());
            let mut chunks = Vec::new();
            for (rank, offsets, sizes) in &tensor.parts {
                chunks.push((*rank as usize, entry.chunks.push(offsets, sizes, None)?));
            }
            let at = planned.global.metadata.insert(&*tensor.fqn, Entry::Tensor(entry));
            for ((rank, chunk), (_, offsets, sizes)) in chunks.into_iter().zip(&tensor.parts) {
                let region = Region::new(offsets.clone(), sizes.clone())?;
                let spec = TensorSpec {
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    sharded: tensor.parts.len() > 1,
                };
                let bytes = tensor.elements(&region)?.into();
                planned.push(rank, (&tensor.fqn, Some((spec, region))), bytes, (at, chunk))?;
            }
        }
        for (fqn, value) in &self.objects {
            let bytes = writer.encode_object(fqn, value)?;
            let entry = Entry::Object(ObjectEntry::new(None));
            let at = planned.global.metadata.insert(&**fqn, entry);
            planned.push(0, (fqn, None), bytes, (at, 0))?;
        }
        Ok(planned)
    }
}

/// The number of ranks in a save.
const RANKS: usize = 2;

/// A planned save of a [`Sample`].
pub(super) struct Planned {
    pub(super) locals: Vec<SavePlan>,
    pub(super) global: GlobalPlan,
    /// The bytes of each item, by rank.
    pub(super) data: Vec<Vec<Bytes>>,
}

impl Planned {
    fn push(
        &mut self,
        rank: usize,
        (fqn, tensor): (&str, Option<(TensorSpec, Region)>),
        bytes: Bytes,
        (entry, chunk): (usize, usize),
    ) -> Result<(), Failure> {
        let (Some(local), Some(data), Some(selected)) = (
            self.locals.get_mut(rank),
            self.data.get_mut(rank),
            self.global.selections.get_mut(rank),
        ) else {
            return Err(Failure::new(format!("there is no rank {rank}")));
        };
        let (spec, region) = tensor.unzip();
        let key = local.push_key(PlanKey { fqn: fqn.into(), path: None, tensor: spec });
        match &region {
            Some(region) => local.push_chunk(key, region)?,
            None => local.push_object(key, bytes.len() as u64)?,
        }
        let item = u32::try_from(data.len())?;
        data.push(bytes);
        let (entry, chunk) = (u32::try_from(entry)?, u32::try_from(chunk)?);
        selected.push(SelectedItem { item, entry, chunk });
        Ok(())
    }
}

/// The data of one rank, in memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) items: Vec<Bytes>,
    /// The item whose bytes are unavailable.
    pub(super) broken: Option<usize>,
}

#[async_trait]
impl DataSource for Memory {
    async fn resolve(&self, item: usize, range: Range<u64>) -> Result<Payload, CheckpointError> {
        let bytes = self.items.get(item).filter(|_| self.broken != Some(item));
        let range = range.start as usize..range.end as usize;
        match bytes.filter(|bytes| range.start <= range.end && range.end <= bytes.len()) {
            Some(bytes) => Ok(Payload::from(bytes.slice(range))),
            None => {
                let problem = format!("there are no bytes {range:?} of item {item}");
                Err(dcp_core::FormatError::new("data of the suite", problem).into())
            }
        }
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

/// The data of each rank, except for one unavailable item.
pub(super) fn sources(
    data: Vec<Vec<Bytes>>,
    broken: Option<(usize, usize)>,
) -> Vec<Arc<dyn DataSource>> {
    let source = |(rank, items)| {
        let broken = broken.filter(|(at, _)| *at == rank).map(|(_, item)| item);
        Arc::new(Memory { items, broken }) as _
    };
    data.into_iter().enumerate().map(source).collect()
}
