//! The weighted mean of several checkpoints.

mod agreement;
mod on_ranks;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{ChunkTable, Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Key, Region, StorageReader, TensorView,
};
use futures_util::{StreamExt, TryStreamExt, stream};
use indexmap::IndexMap;

use crate::cast::{CastCounts, CastReport, TensorCast, is_averaged};
use crate::error::JobError;
use crate::integrity::check::refuse_unsound;
use crate::options::JobOptions;
use crate::read::tensor_read::TensorReader;
use crate::read::ties::{Place, places};
use crate::source::Source;

use self::agreement::{Quantized, mismatches, refuse_different};
use super::equality::Input;
use super::mean::Mean;
use super::scratch::{SCRATCH, invalid_region, name, no_entry, not_a_tensor, outside, pieces};

/// Chooses another dtype for a tensor, from its name and dtype.
type DTypeRule = dyn Fn(&str, DType) -> Option<DType> + Send + Sync;

/// Options of averaging checkpoints.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct AverageOptions {
    /// One weight per checkpoint, relative to their sum: the mean is the sum of `weight × value`
    /// divided by the sum of the weights. All 1 when `None`. Negative weights extrapolate.
    pub(crate) weights: Option<Vec<f64>>,
    /// The dtype of the sum, `Float32` or `Float64`. By default `Float64` for tensors that any
    /// checkpoint stores in 64 bits, and `Float32` for others.
    pub(crate) accumulate: Option<DType>,
    /// The dtype of the result, to which the sum is rounded once. By default the dtype in the first
    /// checkpoint.
    pub(crate) dtype: Option<Arc<DTypeRule>>,
    /// The origin of entries without a mean.
    pub(crate) non_float: NonFloat,
}

impl AverageOptions {
    /// Sets one weight per checkpoint.
    #[must_use]
    pub fn weights(mut self, weights: Vec<f64>) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Sets the dtype of the sum, `Float32` or `Float64`.
    #[must_use]
    pub fn accumulate(mut self, dtype: DType) -> Self {
        self.accumulate = Some(dtype);
        self
    }

    /// Sets the dtypes of results: `rule` maps the name and dtype of a tensor of the first
    /// checkpoint.
    #[must_use]
    pub fn dtypes(
        mut self,
        rule: impl Fn(&str, DType) -> Option<DType> + Send + Sync + 'static,
    ) -> Self {
        self.dtype = Some(Arc::new(rule));
        self
    }

    /// Sets the origin of integers, booleans, quantized tensors and objects.
    #[must_use]
    pub fn non_float(mut self, non_float: NonFloat) -> Self {
        self.non_float = non_float;
        self
    }
}

impl fmt::Debug for AverageOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AverageOptions")
            .field("weights", &self.weights)
            .field("accumulate", &self.accumulate)
            .field("non_float", &self.non_float)
            .finish_non_exhaustive()
    }
}

/// The range of the largest weight in which weights are used without scaling.
const WEIGHTS_AS_THEY_ARE: std::ops::RangeInclusive<f64> = 1e-12..=1e12;

/// The origin of entries without a mean: integers, booleans, quantized and packed tensors with their
/// scales, exponents (`float8_e8m0fnu`), and objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NonFloat {
    /// Any checkpoint; all must be equal.
    #[default]
    Equal,
    /// The first checkpoint.
    First,
    /// The last checkpoint.
    Last,
}

/// A reader of the mean of several checkpoints with the same keys and shapes. It computes a bounded
/// part at a time. The mean of NaN and anything is NaN.
pub struct Averaged {
    metadata: Arc<CheckpointMetadata>,
    entries: Vec<Averaging>,
    /// Reads the objects, which have the same positions here.
    objects: Arc<dyn StorageReader>,
    objects_metadata: Arc<CheckpointMetadata>,
    parallelism: usize,
    counts: Mutex<Vec<CastCounts>>,
    /// Per entry, the number of sums that overflowed.
    overflowed: Mutex<Vec<u64>>,
}

/// The treatment of one entry.
enum Averaging {
    Mean { readers: Vec<TensorReader>, mean: Mean },
    Taken(TensorReader),
    Object,
}

impl Averaged {
    /// Averages `sources` for a job. Also returns the view, for its [`report`](Self::report).
    /// Entries without a mean that must be equal are compared before this returns.
    ///
    /// # Errors
    ///
    /// [`JobError::Disagreement`] with all keys that are missing in a source, differ in shape,
    /// or differ although they must be equal; [`JobError::InvalidOption`] for invalid weights or
    /// dtypes; also when a source cannot be read.
    pub async fn apply(
        sources: &[Source],
        options: &AverageOptions,
        job: &JobOptions,
    ) -> Result<(Source, Arc<Self>), JobError> {
        let weights = weights(options, sources.len())?;
        check_accumulate(options.accumulate)?;
        let mut inputs = Vec::with_capacity(sources.len());
        for source in sources {
            let input = Input::open(source, job).await?;
            refuse_unsound(&input.metadata)?;
            inputs.push(input);
        }
        let problems = mismatches(&inputs);
        if !problems.is_empty() {
            return Err(JobError::Disagreement { problems, structure: true });
        }
        let quantized = Quantized::of(&inputs);
        // Where they differ, rank 0 of a group fails, and all ranks with it.
        if options.non_float == NonFloat::Equal && job.is_coordinator() {
            refuse_different(&inputs, &quantized, job.parallelism).await?;
        }
        let base = if options.non_float == NonFloat::Last { inputs.len() - 1 } else { 0 };
        let of = (&*inputs, base, &quantized);
        let view = Arc::new(Self::new(of, &weights, options, job.parallelism)?);
        let storage = inputs.get(base).map(|input| Arc::clone(&input.source.storage));
        let parts: Vec<_> = inputs.into_iter().map(|input| input.source).collect();
        let averaged = Source::derived(Arc::clone(&view) as _, &parts).zip(storage);
        let (mut averaged, storage) = averaged.ok_or_else(|| few(0))?;
        averaged.storage = storage;
        Ok((averaged, view))
    }

    fn new(
        (inputs, base, quantized): (&[Input], usize, &Quantized),
        weights: &[f64],
        options: &AverageOptions,
        parallelism: usize,
    ) -> Result<Self, JobError> {
        let (Some(first), Some(base)) = (inputs.first(), inputs.get(base)) else {
            return Err(few(inputs.len()));
        };
        let mut metadata = CheckpointMetadata::clone(&base.metadata);
        let mut ties = Ties::default();
        let mut entries = Vec::with_capacity(metadata.len());
        for (fqn, entry) in base.metadata.iter() {
            let (Entry::Tensor(tensor), Some(like)) = (entry, first.tensor_entry(fqn)) else {
                entries.push(Averaging::Object);
                continue;
            };
            let dtypes: Vec<_> =
                inputs.iter().filter_map(|input| Some(input.tensor_entry(fqn)?.dtype)).collect();
            if !dtypes.iter().all(|dtype| is_averaged(*dtype)) || quantized.has(fqn) {
                entries.push(Averaging::Taken(base.tensor(fqn)?));
                continue;
            }
            let requested = options.dtype.as_ref().and_then(|rule| rule(fqn, like.dtype));
            let to = requested.unwrap_or(like.dtype);
            let mean = Mean::new(fqn, &dtypes, to, weights, options.accumulate)?;
            let readers: Result<_, _> = inputs.iter().map(|input| input.tensor(fqn)).collect();
            let mut averaged = tensor.clone();
            averaged.dtype = to;
            averaged.chunks = ties.place(inputs, fqn, tensor, &mut metadata);
            metadata.insert(Arc::clone(fqn), Entry::Tensor(averaged));
            entries.push(Averaging::Mean { readers: readers?, mean });
        }
        let counts = Mutex::new(vec![CastCounts::default(); entries.len()]);
        let overflowed = Mutex::new(vec![0; entries.len()]);
        Ok(Self {
            metadata: Arc::new(metadata),
            entries,
            objects: Arc::clone(&base.source.reader),
            objects_metadata: Arc::clone(&base.metadata),
            parallelism: parallelism.max(1),
            counts,
            overflowed,
        })
    }

    /// The losses of casting sums to the dtypes of results, over what was read so far. Lists all
    /// tensors from the start.
    #[must_use]
    pub fn report(&self) -> CastReport {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.entries.iter().zip(counts.iter()).zip(self.metadata.iter());
        let tensors = all.filter_map(|((entry, counts), (fqn, _))| {
            let Averaging::Mean { mean, .. } = entry else { return None };
            let (from, to) = mean.last_cast()?;
            let (from, to) = (from.name(), to.name());
            Some((Arc::clone(fqn), TensorCast::new(from, to, *counts)))
        });
        CastReport { tensors: tensors.collect() }
    }

    /// Per tensor, the number of means read so far that are infinite or NaN because the sum
    /// overflowed. Omits tensors without any.
    #[must_use]
    pub fn overflowed(&self) -> IndexMap<Arc<str>, u64> {
        let overflowed = self.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.metadata.iter().zip(overflowed.iter()).filter(|(_, count)| **count > 0);
        all.map(|((fqn, _), count)| (Arc::clone(fqn), *count)).collect()
    }

    /// The number of averaged tensors, and of entries taken unchanged.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let is_mean = |entry: &&Averaging| matches!(entry, Averaging::Mean { .. });
        let averaged = self.entries.iter().filter(is_mean).count();
        (averaged, self.entries.len() - averaged)
    }

    async fn fill(
        &self,
        item: &ReadItem,
        region: &Region,
        target: &TensorView,
    ) -> Result<u64, CheckpointError> {
        let fqn = name(&self.metadata, item.entry);
        let entry = self.entries.get(item.entry as usize);
        let entry = entry.ok_or_else(|| no_entry(item.entry))?;
        let (element_bytes, readers) = match entry {
            Averaging::Mean { readers, mean } => (mean.element_bytes(), &**readers),
            Averaging::Taken(reader) => {
                (reader.tensor()?.dtype.size(), std::slice::from_ref(reader))
            }
            Averaging::Object => return Err(not_a_tensor(&fqn)),
        };
        let mut read = 0_u64;
        for piece in pieces(region, element_bytes, SCRATCH) {
            let piece = piece.map_err(|error| invalid_region(&fqn, error))?;
            let inner = piece.relative_to(region.offsets());
            let inner = inner.ok_or_else(|| outside(&fqn, &piece, region))?;
            let boxes = std::slice::from_ref(&piece);
            let reads: Vec<_> = readers.iter().map(|reader| reader.read(boxes)).collect();
            let mut parts = stream::iter(reads).buffered(self.parallelism);
            let place = target.narrow(&inner)?;
            let elements: Bytes = match entry {
                Averaging::Mean { mean, .. } => {
                    let mut sum = mean.start(piece.volume());
                    while let Some(part) = parts.try_next().await? {
                        read = read.saturating_add(part.len() as u64);
                        sum.add(&part);
                    }
                    let mut counts = CastCounts::default();
                    let (elements, beyond) = sum.finish(&mut counts);
                    let mut overflowed =
                        self.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(total) = overflowed.get_mut(item.entry as usize) {
                        *total += beyond;
                    }
                    drop(overflowed);
                    let mut all = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(total) = all.get_mut(item.entry as usize) {
                        total.add(&counts);
                    }
                    elements.into()
                }
                _ => parts.try_next().await?.unwrap_or_default(),
            };
            place
                .fill_from(&elements)
                .map_err(|source| CheckpointError::Memory { fqn: fqn.to_string(), source })?;
        }
        Ok(read)
    }
}

fn few(checkpoints: usize) -> JobError {
    JobError::invalid_option("an average", format!("of {checkpoints} checkpoints has no meaning"))
}

fn weights(options: &AverageOptions, checkpoints: usize) -> Result<Vec<f64>, JobError> {
    let bad = |problem: String| JobError::invalid_option("the weights", problem);
    if checkpoints == 0 {
        return Err(few(0));
    }
    let Some(weights) = &options.weights else { return Ok(vec![1.0; checkpoints]) };
    if weights.len() != checkpoints {
        return Err(bad(format!("are {}, the checkpoints {checkpoints}", weights.len())));
    }
    if weights.iter().any(|weight| !weight.is_finite()) {
        return Err(bad("must be finite numbers".to_owned()));
    }
    // Weights far from one could make a 32-bit sum overflow or vanish, so they are scaled by the
    // largest. Others are used unchanged, which keeps their rounding.
    let largest = weights.iter().fold(0.0_f64, |most, weight| most.max(weight.abs()));
    let usual = WEIGHTS_AS_THEY_ARE.contains(&largest) || largest == 0.0;
    let unit = if usual { 1.0 } else { largest };
    let weights: Vec<f64> = weights.iter().map(|weight| weight / unit).collect();
    let sum: f64 = weights.iter().sum();
    if sum as f32 == 0.0 || !(sum as f32).is_finite() {
        return Err(bad(format!("must have a sum that is not zero, it is {}", sum * unit)));
    }
    Ok(weights)
}

fn check_accumulate(accumulate: Option<DType>) -> Result<(), JobError> {
    match accumulate {
        None | Some(DType::Float32 | DType::Float64) => Ok(()),
        Some(dtype) => {
            let problem = format!("cannot be summed in {dtype}, only in float32 or float64");
            Err(JobError::invalid_option("an average", problem))
        }
    }
}

/// The places of a tensor's chunks, in all inputs.
type Places = Vec<Vec<Place>>;

/// Assigns one synthetic placement to tensors that share stored bytes in all inputs, so that the
/// target stores them once.
#[derive(Debug, Default)]
struct Ties {
    known: HashMap<Places, u64>,
    /// The number of placements assigned so far.
    given: u64,
}

impl Ties {
    /// The chunks of the mean of `fqn`, divided as `tensor` is.
    fn place(
        &mut self,
        inputs: &[Input],
        fqn: &str,
        tensor: &TensorEntry,
        metadata: &mut CheckpointMetadata,
    ) -> ChunkTable {
        let places: Option<Places> = inputs
            .iter()
            .filter_map(|input| Some((input, input.tensor_entry(fqn)?)))
            .map(|(input, tensor)| places(&input.metadata, tensor))
            .collect();
        let next = self.given;
        let byte_offset = match places {
            Some(places) => *self.known.entry(places).or_insert(next),
            // A tensor whose ties are unknown is tied to nothing.
            None => next,
        };
        self.given += u64::from(byte_offset == next);
        let file = Key::new("mean").ok().and_then(|key| metadata.intern_file(&key));
        let encoding = metadata.intern_encoding(&Encoding::new(Layout::Computed));
        let placement = file.zip(encoding).map(|(file, encoding)| Placement {
            file,
            encoding,
            byte_offset,
            byte_len: 0,
        });
        let mut chunks = tensor.chunks.clone();
        chunks.map_placements(|_| placement);
        chunks
    }
}

#[async_trait]
impl StorageReader for Averaged {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let mut objects = LoadPlan::default();
        for item in &plan.items {
            let ReadKind::Tensor { region, .. } = &item.kind else {
                objects.items.push(item.clone());
                continue;
            };
            let target = sink.destination(item)?;
            let read = self.fill(item, region, &target).await?;
            sink.commit(item)?;
            report += ReadReport::new(target.byte_len(), read);
        }
        if !objects.items.is_empty() {
            report += self.objects.read(&self.objects_metadata, &objects, sink).await?;
        }
        Ok(report)
    }
}

impl fmt::Debug for Averaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (averaged, taken) = self.counts();
        f.debug_struct("Averaged").field("averaged", &averaged).field("taken", &taken).finish()
    }
}
