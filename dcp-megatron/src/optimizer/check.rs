//! Compares the optimizer's master parameters with the model.
//!
//! Right after a step of the optimizer, a weight is its master parameter, cast. Megatron 0.15 to
//! 0.19 broke that in `fully_reshardable` checkpoints of runs with several gradient buckets: it
//! cut parameters out of a buffer from which the padding between buckets was missing, at places
//! counted with the padding. Every parameter behind the first bucket, and its moments, are what
//! is a little further on; the end is filled with zeros.

use std::fmt;
use std::sync::Arc;

use dcp_core::metadata::TensorEntry;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, FormatError, Region};
use dcp_jobs::cast::{CastCounts, CastOptions, Caster, is_float};
use dcp_jobs::element::{Element, decode};
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::read::TensorReader;
use dcp_jobs::{JobOptions, Source};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::format::OptimizerFormat;
use super::keys::{ParamStateKey, StateKind};
use super::shift::explain;
use crate::error::MegatronError;

/// Elements to compare at once.
pub(super) const SEGMENT: u64 = 1 << 20;

/// The share of every parameter that is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckDepth {
    /// The first elements of up to [`SAMPLED_CHUNKS`] chunks of each parameter, and all of a
    /// parameter in which they differ. Enough to find the shift, which spares no chunk behind the
    /// first bucket: a few kilobytes are read for each parameter of a sound checkpoint.
    Sampled,
    /// Everything.
    #[default]
    Full,
}

/// Chunks of a parameter of which [`CheckDepth::Sampled`] looks at the beginning, evenly spread.
pub const SAMPLED_CHUNKS: usize = 32;
/// Elements that it looks at in each.
pub const SAMPLED_ELEMENTS: u64 = 256;

/// The result of comparing an optimizer's master parameters with the weights.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OptimizerReport {
    /// The form of the optimizer's state.
    pub format: OptimizerFormat,
    /// The verdict.
    pub verdict: OptimizerVerdict,
    /// Parameters that were compared.
    pub compared: usize,
    /// Whether only samples of them were.
    pub sampled: bool,
    /// Parameters that are not those of the model, in the order of the checkpoint.
    pub mismatches: Vec<ParamMismatch>,
    /// Master parameters that could not be compared, and why.
    pub not_compared: Vec<(Arc<str>, &'static str)>,
}

/// The verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptimizerVerdict {
    /// All master parameters that were compared are those of the model.
    Sound,
    /// Parameters were cut out of the buffers at wrong places: the defect of Megatron 0.15 to
    /// 0.19. Their moments are as wrong.
    ShiftedBuckets,
    /// That defect cannot be excluded: in a `fully_reshardable` checkpoint, master parameters are
    /// zeros, or hold the elements of another one. Parameters that are shorter than the padding
    /// between buckets show no more of it than that.
    PossiblyShifted,
    /// Master parameters and weights differ, but not as that defect would have it: one of them
    /// may have been replaced on purpose.
    Different,
    /// There are no master parameters by name to compare.
    NotComparable,
}

impl fmt::Display for OptimizerVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sound => "master parameters are those of the model",
            Self::ShiftedBuckets => {
                "optimizer state is shifted between buckets, as Megatron 0.15 to 0.19 wrote it"
            }
            Self::PossiblyShifted => {
                "optimizer state may be shifted between buckets, as Megatron 0.15 to 0.19 wrote it"
            }
            Self::Different => "master parameters differ from the weights",
            Self::NotComparable => "there are no master parameters by name",
        })
    }
}

/// A master parameter that is not the model's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ParamMismatch {
    /// The key of the weight.
    pub param: Arc<str>,
    /// The key of the master parameter.
    pub master: Arc<str>,
    /// Elements that differ.
    pub differing: u64,
    /// Elements that there are.
    pub elements: u64,
    /// The origin of the elements that were found.
    pub cause: MismatchCause,
}

/// The origin of the elements of a wrong master parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MismatchCause {
    /// They are the weight's own, so many elements further on.
    Shift {
        /// Elements, in the order in which a rank holds them.
        by: u64,
    },
    /// They are those of another weight.
    Elsewhere {
        /// The key of that weight.
        param: Arc<str>,
        /// The position in it of the first element, row-major in the chunk that it is in.
        element: u64,
    },
    /// They are zeros, which the weight's are not.
    Zeros,
    /// They are nothing that is in the model.
    Unknown,
}

impl fmt::Display for ParamMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { param, differing, elements, cause, .. } = self;
        write!(
            f,
            "{param}: {differing} of {elements} elements differ from the master parameter, "
        )?;
        match cause {
            MismatchCause::Shift { by } => write!(f, "which is the weight from element {by} on"),
            MismatchCause::Elsewhere { param, element } => {
                write!(f, "which holds {param} from element {element} on")
            }
            MismatchCause::Zeros => f.write_str("which is zero"),
            MismatchCause::Unknown => f.write_str("which is nothing of the model"),
        }
    }
}

impl OptimizerReport {
    /// Whether the state is damaged for certain.
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        self.verdict == OptimizerVerdict::ShiftedBuckets
    }

    /// Whether the state is damaged, or that cannot be excluded: not to be carried over unasked.
    #[must_use]
    pub fn is_suspect(&self) -> bool {
        self.is_corrupt() || self.verdict == OptimizerVerdict::PossiblyShifted
    }
}

/// The verdict on the causes of mismatches.
fn judge(format: OptimizerFormat, mismatches: &[ParamMismatch]) -> OptimizerVerdict {
    // A weight that is its own, from a few elements further on to its end, is the defect. Parameters
    // that are shorter than the padding are nowhere their own: they begin in the middle of others,
    // or are zero. One such parameter may have the elements of another by chance, or on purpose.
    let by_buffer = format == OptimizerFormat::FullyReshardable;
    let shifted = |one: &ParamMismatch| matches!(one.cause, MismatchCause::Shift { .. });
    let cut =
        |one: &ParamMismatch| matches!(one.cause, MismatchCause::Elsewhere { element: 1.., .. });
    let known = mismatches.iter().filter(|one| one.cause != MismatchCause::Unknown).count();
    if mismatches.is_empty() {
        OptimizerVerdict::Sound
    } else if mismatches.iter().any(shifted)
        || (by_buffer && known > 1 && mismatches.iter().any(cut))
    {
        OptimizerVerdict::ShiftedBuckets
    } else if by_buffer && known > 0 {
        OptimizerVerdict::PossiblyShifted
    } else {
        OptimizerVerdict::Different
    }
}

/// Compares the master parameters of a Megatron checkpoint with its weights, a bounded part at a
/// time. `source` shows the checkpoint by its logical names, and `common` is its common state.
///
/// Flat formats have no master parameters by name: their report is
/// [`NotComparable`](OptimizerVerdict::NotComparable).
///
/// # Errors
///
/// When the checkpoint cannot be read. Differences are no error.
pub async fn check_optimizer(
    source: &Source,
    common: &Dict,
    depth: CheckDepth,
    job: &JobOptions,
) -> Result<OptimizerReport, MegatronError> {
    let source = CheckedSource::new(source, job);
    let metadata = source.metadata().await?;
    let format = OptimizerFormat::of(&metadata, common);
    let (pairs, not_compared) = pairs(&source, &metadata)?;
    let sampled = depth == CheckDepth::Sampled;
    let comparisons = pairs.iter().map(|pair| async move {
        let chunks = tiles(pair.master_reader.tensor()?)?;
        if sampled && !pair.differs_in_samples(&chunks).await? {
            return Ok(None);
        }
        pair.compare(chunks).await
    });
    // A stream over the closure itself would not be `Send`.
    let comparisons: Vec<_> = comparisons.collect();
    let found: Vec<Option<Wrong<'_>>> = stream::iter(comparisons)
        .buffered(job.parallelism.max(1))
        .try_collect()
        .await
        .map_err(MegatronError::Checkpoint)?;
    let wrong: Vec<_> = found.into_iter().flatten().collect();
    let mismatches = explain(&source, &metadata, wrong).await?;
    let verdict = match pairs.is_empty() {
        true => OptimizerVerdict::NotComparable,
        false => judge(format, &mismatches),
    };
    // Damage of what was read is no difference.
    let (compared, _) = (pairs.len(), source.finish().await.map_err(MegatronError::Checkpoint)?);
    Ok(OptimizerReport { format, verdict, compared, sampled, mismatches, not_compared })
}

/// A weight and its master parameter.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) param: Arc<str>,
    pub(super) master: Arc<str>,
    pub(super) weight_reader: TensorReader,
    pub(super) master_reader: TensorReader,
    pub(super) caster: Caster,
}

/// A pair that differs.
#[derive(Debug)]
pub(super) struct Wrong<'a> {
    pub(super) pair: &'a Pair,
    pub(super) differing: u64,
    pub(super) elements: u64,
    /// The first chunks that differ.
    pub(super) chunks: Vec<Region>,
}

type Pairs = (Vec<Pair>, Vec<(Arc<str>, &'static str)>);

fn pairs(source: &Source, metadata: &Arc<CheckpointMetadata>) -> Result<Pairs, CheckpointError> {
    let (mut pairs, mut left_out) = (Vec::new(), Vec::new());
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(key) = ParamStateKey::parse(fqn) else { continue };
        if StateKind::of(key.state) != Some(StateKind::Master) {
            continue;
        }
        let (Some(master), Some(weight)) = (entry.as_tensor(), metadata.get(key.param)) else {
            left_out.push((Arc::clone(fqn), "the model has no such tensor"));
            continue;
        };
        let Some(weight) = weight.as_tensor() else {
            left_out.push((Arc::clone(fqn), "the model has no such tensor"));
            continue;
        };
        if master.shape != weight.shape {
            left_out.push((Arc::clone(fqn), "the model's tensor has another shape"));
            continue;
        }
        let options = CastOptions::default();
        let caster = Caster::new(key.param, master.dtype, weight.dtype, options);
        let (Ok(caster), true) = (caster, is_float(master.dtype) && is_float(weight.dtype)) else {
            left_out.push((Arc::clone(fqn), "its numbers cannot be cast to the model's"));
            continue;
        };
        let Some(at_weight) = metadata.index_of(key.param) else { continue };
        let reader = |at| TensorReader::new(Arc::clone(&source.reader), Arc::clone(metadata), at);
        pairs.push(Pair {
            param: key.param.into(),
            master: Arc::clone(fqn),
            weight_reader: reader(at_weight)?,
            master_reader: reader(at)?,
            caster,
        });
    }
    Ok((pairs, left_out))
}

impl Pair {
    pub(super) fn dtype(&self) -> DType {
        self.caster.to()
    }

    /// Elements `range` of `region` of the weight, and of the master parameter as they would be
    /// in the model.
    pub(super) async fn read(
        &self,
        region: &Region,
        range: std::ops::Range<u64>,
    ) -> Result<(bytes::Bytes, Vec<u8>), CheckpointError> {
        let weight = self.weight_reader.read_range(region, range.clone()).await?;
        Ok((weight, self.read_master(region, range).await?))
    }

    pub(super) async fn read_master(
        &self,
        region: &Region,
        range: std::ops::Range<u64>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let master = self.master_reader.read_range(region, range).await?;
        Ok(cast(&self.caster, &master))
    }

    async fn differs_in_samples(&self, chunks: &[Region]) -> Result<bool, CheckpointError> {
        let step = chunks.len().div_ceil(SAMPLED_CHUNKS).max(1);
        let last = chunks.last().filter(|_| !chunks.len().saturating_sub(1).is_multiple_of(step));
        for region in chunks.iter().step_by(step).chain(last) {
            let range = 0..region.volume().min(SAMPLED_ELEMENTS);
            let (weight, master) = self.read(region, range).await?;
            if differing(self.dtype(), &weight, &master) > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn compare(&self, chunks: Vec<Region>) -> Result<Option<Wrong<'_>>, CheckpointError> {
        /// Chunks of which the cause is looked for.
        const KEPT: usize = 4;
        let mut wrong = Wrong { pair: self, differing: 0, elements: 0, chunks: Vec::new() };
        for region in chunks {
            let (total, mut at, before) = (region.volume(), 0, wrong.differing);
            while at < total {
                let end = total.min(at + SEGMENT);
                let (weight, master) = self.read(&region, at..end).await?;
                wrong.differing += differing(self.dtype(), &weight, &master);
                at = end;
            }
            wrong.elements = wrong.elements.saturating_add(total);
            if wrong.differing > before && wrong.chunks.len() < KEPT {
                wrong.chunks.push(region);
            }
        }
        Ok((wrong.differing > 0).then_some(wrong))
    }
}

/// The chunks of a tensor, or all of it as one where their number of elements is not its own.
pub(super) fn tiles(tensor: &TensorEntry) -> Result<Vec<Region>, CheckpointError> {
    let bad = |error: dcp_core::region::RegionError| FormatError::new("index", error.to_string());
    let whole = Region::full(tensor.shape.clone()).map_err(bad)?;
    let regions = tensor.chunks.iter().map(|chunk| chunk.region()).collect::<Result<Vec<_>, _>>();
    let mut regions = regions.map_err(bad)?;
    regions.retain(|region| !region.is_empty());
    let covered = regions.iter().fold(0_u64, |sum, region| sum.saturating_add(region.volume()));
    Ok(if covered == whole.volume() { regions } else { vec![whole] })
}

/// `elements` as the caster makes them.
pub(super) fn cast(caster: &Caster, elements: &[u8]) -> Vec<u8> {
    let whole = elements.len() / caster.from().size();
    let mut made = vec![0; whole * caster.to().size()];
    caster.cast(elements, &mut made, &mut CastCounts::default());
    made
}

/// The number of elements that differ. Every NaN equals every other NaN.
fn differing(dtype: DType, a: &[u8], b: &[u8]) -> u64 {
    if a == b {
        return 0;
    }
    let is_nan = |bytes: &[u8]| matches!(decode(dtype, bytes), Some(Element::Float(number)) if number.is_nan());
    let pairs = a.chunks_exact(dtype.size()).zip(b.chunks_exact(dtype.size()));
    let differ = pairs.filter(|(a, b)| a != b && !(is_nan(a) && is_nan(b))).count() as u64;
    let lengths = (a.len().abs_diff(b.len()) / dtype.size()) as u64;
    differ + lengths
}

#[cfg(test)]
mod tests {
    use dcp_conformance::MemoryStorage;
    use dcp_core::storage::{PutMode, StorageExt as _};
    use dcp_core::{HostMemory, Shard, StateDict, Storage, Tensor};
    use dcp_engine::Saver;
    use dcp_formats::dcp::DcpWriter;
    use dcp_storage_fs::FsStorage;

    use super::*;

    fn open(fixture: &str) -> Source {
        let path = format!("{}/../fixtures/megatron/{fixture}/ckpt", env!("CARGO_MANIFEST_DIR"));
        let storage: Arc<dyn Storage> =
            Arc::new(FsStorage::builder(path).create(false).open().unwrap());
        Source::dcp(storage, false)
    }

    async fn check(fixture: &str, depth: CheckDepth) -> OptimizerReport {
        let job = JobOptions::default();
        check_optimizer(&open(fixture), &Dict::new(), depth, &job).await.unwrap()
    }

    /// A weight in one file whose master parameter has two chunks, each with half of every row: of
    /// the weight no read takes a run that its checksum could be made of. `damaged` changes a
    /// stored byte of it.
    async fn divided_otherwise(damaged: bool) -> Source {
        const ROWS: u64 = 256;
        const COLUMNS: u64 = 128;
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let elements = |columns: std::ops::Range<u64>| {
            let numbers = (0..ROWS).flat_map(|row| columns.clone().map(move |at| (row, at)));
            numbers.flat_map(|(row, at)| ((row * COLUMNS + at) as f32).to_le_bytes()).collect()
        };
        let shard = |columns: std::ops::Range<u64>| {
            let region =
                Region::new([0, columns.start], [ROWS, columns.end - columns.start]).unwrap();
            let bytes: Vec<u8> = elements(columns);
            Shard::new(DType::Float32, region, HostMemory::from_vec(bytes)).unwrap()
        };
        let mut state = StateDict::new();
        for (name, cuts) in [
            ("decoder.final_layernorm.weight", &[0, COLUMNS][..]),
            ("optimizer.state.param.decoder.final_layernorm.weight", &[0, COLUMNS / 2, COLUMNS]),
        ] {
            let shards = cuts.windows(2).map(|cut| shard(cut[0]..cut[1])).collect();
            let tensor = Tensor::sharded(DType::Float32, [ROWS, COLUMNS], shards).unwrap();
            state.insert(name, tensor);
        }
        Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage))).await.unwrap();
        let open = || Source::dcp(Arc::clone(&storage), false);
        if damaged {
            let metadata = open().metadata().await.unwrap();
            let weight = metadata.get("decoder.final_layernorm.weight").unwrap();
            let weight = weight.as_tensor().unwrap().chunks.get(0).unwrap().placement.unwrap();
            let file = metadata.file(weight.file).unwrap();
            let mut bytes = storage.read_all(file).await.unwrap().to_vec();
            bytes[(weight.byte_offset + weight.byte_len / 2) as usize] ^= 1;
            storage.put(file, bytes.into(), PutMode::Overwrite).await.unwrap();
        }
        open()
    }

    #[tokio::test]
    async fn damaged_weights_are_an_error_and_no_verdict() {
        let job = JobOptions::default();
        let depth = CheckDepth::Full;
        let sound = divided_otherwise(false).await;
        let report = check_optimizer(&sound, &Dict::new(), depth, &job).await.unwrap();
        assert_eq!((report.compared, report.mismatches.len()), (1, 0), "{report:?}");
        let damaged = divided_otherwise(true).await;
        let found = check_optimizer(&damaged, &Dict::new(), depth, &job).await;
        let error = found.map(|report| report.verdict).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }

    #[tokio::test]
    async fn shifted_buckets_are_found() {
        for depth in [CheckDepth::Full, CheckDepth::Sampled] {
            let report = check("gpt_fully_reshardable_multibucket_CORRUPT", depth).await;
            assert_eq!(report.format, OptimizerFormat::FullyReshardable);
            assert!(report.is_corrupt());
            assert_eq!(report.compared, 8);
            let wrong: Vec<_> = report
                .mismatches
                .iter()
                .map(|one| (&*one.param, one.differing, one.elements, one.cause.clone()))
                .collect();
            let (mlp, attention) = ("decoder.layers.mlp", "decoder.layers.self_attention");
            let elsewhere =
                |param: &str| MismatchCause::Elsewhere { param: param.into(), element: 32 };
            let embedding = "embedding.word_embeddings.weight";
            let qkv = format!("{attention}.linear_qkv.weight");
            let expected = [
                (&*format!("{mlp}.linear_fc1.layer_norm_weight"), 8, 8, elsewhere(&qkv)),
                (&*qkv, 192, 192, MismatchCause::Shift { by: 96 }),
                // It begins in a gap between two parameters.
                (&*format!("{attention}.linear_proj.weight"), 64, 64, MismatchCause::Unknown),
                (&*format!("{attention}.linear_qkv.layer_norm_weight"), 8, 8, elsewhere(embedding)),
                (embedding, 64, 64, MismatchCause::Zeros),
            ];
            assert_eq!(wrong.len(), expected.len());
            for one in &expected {
                assert!(wrong.contains(one), "{one:?} is not in {wrong:?}");
            }
        }
    }

    #[tokio::test]
    async fn sound_optimizers_are_not_found() {
        for fixture in [
            "head020_fully_reshardable_multibucket",
            "gpt_tp2dp2_fully_reshardable",
            "gpt_separation_hint",
            "gpt_float16_optimizer",
        ] {
            for depth in [CheckDepth::Full, CheckDepth::Sampled] {
                let report = check(fixture, depth).await;
                assert_eq!(report.verdict, OptimizerVerdict::Sound, "{fixture}: {report:?}");
                assert_eq!((report.compared, report.not_compared.len()), (8, 0));
            }
        }
        let flat = check("gpt_dp2_dp_reshardable", CheckDepth::Full).await;
        assert_eq!(flat.verdict, OptimizerVerdict::NotComparable);
    }
}
