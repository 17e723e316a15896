//! Optimizer state by parameter, whatever the format it is stored in: the canonical names and
//! shapes of `fully_reshardable`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, DType, Region, Value};
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::read::read_object;
use dcp_jobs::view::{Assembled, AssembledBuilder, Piece, PieceFrom};
use dcp_jobs::{JobOptions, Source};
use indexmap::IndexMap;

use super::assign::{Assigned, Sequence, assign};
use super::buffers::{Buffers, FlatBuffer, Masters};
use super::format::OptimizerFormat;
use super::groups::{GroupObjects, fully_reshardable};
use super::keys::{
    BucketKey, GroupKey, GroupObjectKey, ParamStateKey, StateKind, model_tensors, param_state_fqn,
};
use super::parameter_search::{BucketShape, Walked, walk};
use super::report::{AmbiguousPlace, LayoutReport, PerParameterReport, PlacedParam, UnknownPlace};
use super::shards::{Known, know, local_params};
use crate::args::MegatronArgs;
use crate::disk::common_state::COMMON_STATE;
use crate::error::MegatronError;

/// A checkpoint with the optimizer's state by parameter.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PerParameter {
    /// The checkpoint: everything of the model as it is, and
    /// `optimizer.state.<param|exp_avg|exp_avg_sq>.<key>` in the shape of the model's tensor
    /// `<key>`. Its [`COMMON_STATE`] is that of a `fully_reshardable` checkpoint, with the
    /// parameter groups and steps.
    ///
    /// Where not every parameter was found, those that were are there, and so is all that is
    /// stored, with the common state as it was: nothing is lost, and the model converts.
    pub source: Source,
    /// The common state in it.
    pub common: Dict,
    /// The parameters that were found, and those that were not.
    pub report: PerParameterReport,
}

/// The checkpoint that `source` shows by its logical names, with the common state `common`, as one
/// whose optimizer is `fully_reshardable`.
///
/// Formats that name parameters are renamed. Flat buffers do not: their parameters are found by
/// their elements, for a master parameter, cast to the weight's dtype, is the weight. Weights and
/// master parameters are read once for that, a bounded part at a time. Parameters of a rank with
/// the same elements are distinguished by the order in which Megatron's modules register them, if
/// exactly one assignment agrees with everything else in the buffers; the
/// [report](LayoutReport::by_order) names them. Nothing is guessed beyond that.
///
/// What [Megatron-FSDP](OptimizerFormat::FsdpDtensor) writes is left as it is.
///
/// # Errors
///
/// When the checkpoint cannot be read, or a buffer is stored in a form that cannot be looked into.
pub async fn per_parameter(
    source: &Source,
    common: &Dict,
    job: &JobOptions,
) -> Result<PerParameter, MegatronError> {
    let source = CheckedSource::new(source, job).into_source();
    let metadata = source.metadata().await?;
    let from = OptimizerFormat::of(&metadata, common);
    let as_it_is = |params, layout| PerParameter {
        source: source.clone(),
        common: common.clone(),
        report: PerParameterReport { from, params, layout, differing: Vec::new() },
    };
    if matches!(from, OptimizerFormat::None | OptimizerFormat::FsdpDtensor) {
        return Ok(as_it_is(0, None));
    }
    if from.is_by_parameter() {
        let (changed, differing) = fully_reshardable(common, &GroupObjects::new());
        let (source, params) = renamed(&source, &metadata, &changed, job).await?;
        let report = PerParameterReport { from, params, layout: None, differing };
        return Ok(PerParameter { source, common: changed, report });
    }
    let ranks = args(common).and_then(|args| args.count("data_parallel_size"));
    let padded = from == OptimizerFormat::FullyShardedBucketSpace;
    let buffers = Buffers::find(&source, &metadata, ranks, padded).await?;
    of_buffers(buffers, &metadata, common, from, job).await
}

/// Shows a checkpoint of `mp_rank_*` folders as one whose optimizer is `fully_reshardable`.
/// `source` shows the model with its tensors merged, in chunks as ranks have them; `optimizers` are
/// the files `distrib_optim.pt` of the folders, in any order. The buffers themselves are not shown,
/// whether all of their parameters were found or not.
///
/// # Errors
///
/// When a file cannot be read.
pub async fn per_parameter_of_legacy(
    source: &Source,
    common: &Dict,
    optimizers: &[Source],
    job: &JobOptions,
) -> Result<PerParameter, MegatronError> {
    let source = CheckedSource::new(source, job).into_source();
    let metadata = source.metadata().await?;
    let mut buffers = Buffers { parts: vec![source], all: Vec::new() };
    for (group, file) in (0..).zip(optimizers) {
        let group = GroupKey { chained: None, group };
        buffers.add_coalesced(CheckedSource::new(file, job).into_source(), group).await?;
    }
    of_buffers(buffers, &metadata, common, OptimizerFormat::LegacyDistributed, job).await
}

fn args(common: &Dict) -> Option<MegatronArgs> {
    common.get("args").and_then(MegatronArgs::from_value)
}

/// The first part of `buffers` with the state in them by parameter.
async fn of_buffers(
    buffers: Buffers,
    metadata: &Arc<CheckpointMetadata>,
    common: &Dict,
    from: OptimizerFormat,
    job: &JobOptions,
) -> Result<PerParameter, MegatronError> {
    let gated = args(common).and_then(|args| args.flag("swiglu").filter(|gated| *gated));
    let found = Found::of(&buffers, metadata, gated, job).await?;
    let mut layout = found.report;
    let states = states(&buffers, metadata, &found.places, &mut layout).await?;
    let objects = match buffers.parts.first() {
        Some(source) => group_objects(source, metadata).await?,
        None => GroupObjects::new(),
    };
    let complete = layout.is_complete();
    let (changed, differing) = match complete {
        true => fully_reshardable(common, &objects),
        false => (common.clone(), Vec::new()),
    };
    let mut view = Assembled::builder(&buffers.parts, job).await?;
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if **fqn == *COMMON_STATE {
            view.object(COMMON_STATE, None, Value::Dict(changed.clone()))?;
        } else if !(complete && is_flat(fqn)) {
            view.pass(Arc::clone(fqn), entry.path().cloned(), 0, at)?;
        }
    }
    let params = states.iter().map(|state| state.param).collect::<HashSet<_>>().len();
    for state in states {
        view.tensor(state.fqn, None, state.dtype, state.shape, state.pieces)?;
    }
    let report = PerParameterReport { from, params, layout: Some(layout), differing };
    Ok(PerParameter { source: view.finish()?, common: changed, report })
}

/// Whether a name is one of flat state, or of what goes with it and has another place by parameter.
fn is_flat(fqn: &str) -> bool {
    let placed = |key: GroupObjectKey<'_>| {
        SETTINGS.contains(&key.name)
            || matches!(key.name, "param_state" | "per_bucket_numel" | "per_bucket_numel_unpadded")
    };
    BucketKey::parse(fqn).is_some() || GroupObjectKey::parse(fqn).is_some_and(placed)
}

/// Objects beside the buffers that a `fully_reshardable` checkpoint has in its common state.
const SETTINGS: [&str; 2] = ["optimizer", "grad_scaler"];

/// A checkpoint whose state has names, under the canonical ones.
async fn renamed(
    source: &Source,
    metadata: &CheckpointMetadata,
    common: &Dict,
    job: &JobOptions,
) -> Result<(Source, usize), MegatronError> {
    let mut view = Assembled::builder(std::slice::from_ref(source), job).await?;
    let mut params = HashSet::new();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let key = ParamStateKey::parse(fqn);
        let name = match key.as_ref().and_then(|key| Some((StateKind::of(key.state)?, key.param))) {
            Some((kind, param)) => {
                params.insert(param);
                param_state_fqn(kind.name(), param).into()
            }
            None => Arc::clone(fqn),
        };
        add(&mut view, name, at, entry, common)?;
    }
    Ok((view.finish()?, params.len()))
}

fn add(
    view: &mut AssembledBuilder,
    name: Arc<str>,
    at: usize,
    entry: &Entry,
    common: &Dict,
) -> Result<(), MegatronError> {
    if *name == *COMMON_STATE {
        view.object(name, None, Value::Dict(common.clone()))?;
    } else {
        view.pass(name, entry.path().cloned(), 0, at)?;
    }
    Ok(())
}

/// The place of the state of a box of a model's tensor.
#[derive(Clone, Debug)]
struct Place {
    buffer: usize,
    bucket: usize,
    range: Range<u64>,
}

/// The boxes of a tensor, in the order in which they were found.
type Boxes = IndexMap<Region, Place>;

/// The places of the parameters of all buffers, by the entry of the model's tensor.
#[derive(Debug, Default)]
struct Found {
    places: BTreeMap<usize, Boxes>,
    report: LayoutReport,
}

impl Found {
    async fn of(
        buffers: &Buffers,
        metadata: &Arc<CheckpointMetadata>,
        gated: Option<bool>,
        job: &JobOptions,
    ) -> Result<Self, MegatronError> {
        let mut found = Self::default();
        let dtypes: BTreeSet<_> = buffers.all.iter().map(|buffer| buffer.dtype).collect();
        for dtype in dtypes {
            let of_dtype = buffers.all.iter().enumerate().filter(|(_, one)| one.dtype == dtype);
            let of_dtype: Vec<_> = of_dtype.collect();
            let known = match (dtype, buffers.parts.first()) {
                (Some(dtype), Some(model)) => match local_params(metadata, dtype, gated) {
                    Some(params) => {
                        Ok((dtype, know(model, metadata, params, job.parallelism).await?))
                    }
                    None => Err("the model is in more parts than any model has"),
                },
                _ => Err("its parameters are in a dtype that weights are not stored in"),
            };
            match known {
                Ok((dtype, known)) => found.solve(buffers, &of_dtype, dtype, &known).await?,
                Err(problem) => {
                    for (_, buffer) in of_dtype {
                        let buffer = buffer.key.to_string();
                        let place = UnknownPlace { buffer, bucket: 0, element: 0, problem };
                        found.report.unknown.push(place);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Finds the parameters of buffers of one dtype.
    async fn solve(
        &mut self,
        buffers: &Buffers,
        of_dtype: &[(usize, &FlatBuffer)],
        dtype: DType,
        known: &Known,
    ) -> Result<(), MegatronError> {
        let mut groups = HashMap::new();
        let (mut sequences, mut walks) = (Vec::new(), Vec::new());
        for (number, buffer) in of_dtype {
            let walked = match Masters::of(buffer, dtype, &buffers.parts).await? {
                Some(masters) => {
                    let shapes: Vec<BucketShape> =
                        buffer.buckets.iter().map(|bucket| bucket.shape.clone()).collect();
                    walk(known, &shapes, &masters).await?
                }
                None => {
                    self.unknown(buffer, 0, 0, "it has no master parameters");
                    Walked::default()
                }
            };
            for (bucket, element) in &walked.unknown {
                let problem = "no weight of the model has these elements, so the parameter that \
                               begins here is not known";
                self.unknown(buffer, *bucket, *element, problem);
            }
            let next = groups.len();
            let group = *groups.entry(&buffer.key.group).or_insert(next);
            let classes = walked.slots.iter().map(|slot| slot.class).collect();
            sequences.push(Sequence { group, classes });
            walks.push((*number, *buffer, walked));
        }
        let (assigned, ways) = assign(known, &sequences);
        for way in ways {
            if !self.report.registrations.contains(&way.name()) {
                self.report.registrations.push(way.name());
            }
        }
        for ((number, buffer, walked), assigned) in walks.into_iter().zip(assigned) {
            for (slot, assigned) in walked.slots.into_iter().zip(assigned) {
                let (bucket, element) = (slot.bucket, slot.range.start);
                let at = match assigned {
                    Assigned::ByValue(at) => {
                        self.report.by_value += 1;
                        at
                    }
                    Assigned::ByOrder(at) => {
                        self.report.by_order.extend(known.params.get(at).map(|param| {
                            PlacedParam {
                                param: Arc::clone(&param.key),
                                layer: param.layer,
                                buffer: buffer.key.to_string(),
                                bucket,
                                element,
                            }
                        }));
                        at
                    }
                    Assigned::Ambiguous(all) => {
                        let all = all.iter().filter_map(|at| known.params.get(*at));
                        self.report.ambiguous.push(AmbiguousPlace {
                            buffer: buffer.key.to_string(),
                            bucket,
                            element,
                            elements: slot.range.end - slot.range.start,
                            candidates: all.map(|p| (Arc::clone(&p.key), p.layer)).collect(),
                        });
                        continue;
                    }
                };
                let Some(param) = known.params.get(at) else { continue };
                let mut from = slot.range.start;
                for region in &param.boxes {
                    let range = from..from + region.volume();
                    from = range.end;
                    // Ranks that share a parameter have the same state of it.
                    let places = self.places.entry(param.entry).or_default();
                    let place = Place { buffer: number, bucket, range };
                    places.entry(region.clone()).or_insert(place);
                }
            }
        }
        Ok(())
    }

    fn unknown(&mut self, buffer: &FlatBuffer, bucket: usize, element: u64, problem: &'static str) {
        let buffer = buffer.key.to_string();
        self.report.unknown.push(UnknownPlace { buffer, bucket, element, problem });
    }
}

/// A tensor of state, to put together.
struct StateTensor {
    param: usize,
    fqn: String,
    dtype: DType,
    shape: dcp_core::Dims,
    pieces: Vec<Piece>,
}

/// The tensors of state of all parameters that were found as a whole.
async fn states(
    buffers: &Buffers,
    metadata: &CheckpointMetadata,
    places: &BTreeMap<usize, Boxes>,
    report: &mut LayoutReport,
) -> Result<Vec<StateTensor>, MegatronError> {
    let mut indices = Vec::with_capacity(buffers.parts.len());
    for part in &buffers.parts {
        indices.push(part.metadata().await?);
    }
    let candidates = report.ambiguous.iter().flat_map(|at| &at.candidates);
    let candidates: HashSet<Arc<str>> = candidates.map(|(name, _)| Arc::clone(name)).collect();
    let mut states = Vec::new();
    for (entry, fqn, tensor) in model_tensors(metadata) {
        let Some(places) = places.get(&entry) else {
            if candidates.contains(fqn) || !report.unknown.is_empty() {
                let problem = "it was not found in the buffers".to_owned();
                report.unresolved.push((Arc::clone(fqn), problem));
            } else {
                report.without_state.push(Arc::clone(fqn));
            }
            continue;
        };
        let expected = tensor.shape.checked_volume().unwrap_or(0);
        let held = places.keys().fold(0_u64, |sum, region| sum.saturating_add(region.volume()));
        if held != expected {
            let problem = format!("the buffers hold {held} of its {expected} elements");
            report.unresolved.push((Arc::clone(fqn), problem));
            continue;
        }
        let bucket = |place: &Place| buffers.all.get(place.buffer)?.buckets.get(place.bucket);
        let names: BTreeSet<_> = places
            .values()
            .filter_map(bucket)
            .flat_map(|bucket| bucket.states.keys().cloned())
            .collect();
        for name in names {
            let mut dtype = None;
            let pieces: Option<Vec<Piece>> = places
                .iter()
                .map(|(filled, place)| {
                    let (part, from) = *bucket(place)?.states.get(&name)?;
                    let (_, stored) = indices.get(part)?.at(from)?;
                    dtype = Some(stored.as_tensor()?.dtype);
                    let length = place.range.end - place.range.start;
                    let region = Region::new([place.range.start], [length]).ok()?;
                    let from = PieceFrom::Reshaped { part, entry: from, region };
                    Some(Piece { region: filled.clone(), from })
                })
                .collect();
            let (Some(pieces), Some(dtype)) = (pieces, dtype) else {
                let problem = format!("not all of its buckets have {name}");
                report.unresolved.push((Arc::clone(fqn), problem));
                continue;
            };
            let kind = StateKind::of(&name);
            let canonical = kind.map_or(&*name, |kind| kind.name());
            let (fqn, shape) = (param_state_fqn(canonical, fqn), tensor.shape.clone());
            states.push(StateTensor { param: entry, fqn, dtype, shape, pieces });
        }
    }
    states.sort_by(|a, b| a.fqn.cmp(&b.fqn));
    Ok(states)
}

/// The [`SETTINGS`] beside the buffers.
async fn group_objects(
    source: &Source,
    metadata: &CheckpointMetadata,
) -> Result<GroupObjects, MegatronError> {
    let mut objects = GroupObjects::new();
    for (fqn, entry) in metadata.iter() {
        let (Some(key), Entry::Object(_)) = (GroupObjectKey::parse(fqn), entry) else { continue };
        if !SETTINGS.contains(&key.name) {
            continue;
        }
        let value = read_object(source, fqn).await?;
        let value = match value {
            Value::List(mut items) if items.len() == 1 => items.pop().unwrap_or(Value::None),
            other => other,
        };
        objects.entry(key.group).or_default().push((key.name.to_owned(), value));
    }
    Ok(objects)
}
