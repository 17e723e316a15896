//! Writes any checkpoint as `torch_dist`, as the ranks of a job would save it.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::path::PathItem;
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, FormatError, Tensor, Value};
use dcp_formats::torch_save::TorchSaveReader;
use dcp_jobs::get::{Found, find};
use dcp_jobs::integrity::{ForeignCallable, admit_callables};
use dcp_jobs::read::read_object;
use dcp_jobs::reshard::divide;
use dcp_jobs::view::Assembled;
use dcp_jobs::write::ConversionReport;
use dcp_jobs::write::refuse_rank_parts;
use dcp_jobs::{JobOptions, Source};
use dcp_planner::unflatten;

use crate::args::MegatronArgs;
use crate::disk::common_state::COMMON_STATE;
use crate::error::MegatronError;
use crate::jobs::plain_args::with_plain_args;
use crate::partition::{MegatronDivision, ParallelLayout, oldest_version};
#[cfg(doc)]
use crate::writer::MegatronForm;
use crate::writer::MegatronWriterBuilder;

/// Bytes of tensors in objects that a source keeps in parts, and of objects that get another name:
/// both are in memory while the job goes on.
const OBJECTS_BYTES_MAX: u64 = 1 << 30;

/// Writes everything that `source` has as a checkpoint of `torch_dist`, as the ranks of `layout`
/// would have saved it: each tensor cut as [`partition::RULES`](crate::partition::RULES) says, one
/// chunk a layer and expert, in the file of the rank that holds it; what no rule names in the grid
/// it is stored in, else whole. Optimizer state goes with its parameter, objects with their layer
/// or rank.
///
/// The common state is the writer's, if it has one, else the source's own: the entry
/// [`COMMON_STATE`]. It is taken over as it is: arguments in it go on to say how the run that
/// saved it was laid out, as the random states among the objects do, which Megatron-LM passes
/// over where the two layouts differ. With the sizes of `layout` in the arguments it would request
/// random states and rerun states of ranks that never were. With [`MegatronForm::CommonFile`]
/// arguments of classes that some version since 0.6 does not load are written as plain values, and
/// [`ConversionReport::replaced`] names them. An object that has no place in a grid becomes one of a grid of
/// one, `name/shard_0_1`, a list of one, which is how Megatron-Core names objects. Objects that a
/// file of `torch.save` keeps in parts are put together.
///
/// No tensor is held in memory as a whole, objects that are not Megatron-Core's own are, up to 1 GiB
/// of them; and what was read is compared with its checksums before
/// the new checkpoint is committed.
///
/// # Errors
///
/// [`MegatronError::Layout`] and [`MegatronError::Indivisible`] when the layout does not fit;
/// [`MegatronError::FlatOptimizer`] for optimizer state that only its own layout can have; else as
/// [`divide`], which [`JobOptions::callables`] governs as it does for the common state. What was there before is then untouched.
pub async fn to_torch_dist(
    source: &Source,
    writer: MegatronWriterBuilder,
    layout: ParallelLayout,
    options: &JobOptions,
) -> Result<ConversionReport, MegatronError> {
    let metadata = source.metadata().await?;
    refuse_rank_parts(&metadata)?;
    let nested = nested(source, &metadata).await?;
    let mut writer = writer;
    if !writer.has_common() {
        let of_source = match nested.get(COMMON_STATE) {
            Some(common) => Some(common.clone()),
            None if metadata.get(COMMON_STATE).is_some() => {
                Some(read_object(source, COMMON_STATE).await?)
            }
            None => None,
        };
        if let Some(common) = of_source {
            writer = writer.common(common);
        }
    }
    let callables = match writer.common_value() {
        Some(common) => admit_callables(&COMMON_STATE.into(), common, options)?,
        None => Vec::new(),
    };
    let mut replaced = Vec::new();
    let has_common_file = writer.has_common_file();
    if has_common_file
        && let Some(common) = writer.common_value()
        && let Some((plain, classes)) = with_plain_args(common)?
    {
        writer = writer.common(plain);
        replaced = classes;
    }
    let args = writer.common_dict().and_then(|common| common.get("args"));
    let args = args.and_then(MegatronArgs::from_value);
    let source = with_unique_keys(source, &metadata, nested, options).await?;
    let metadata = source.metadata().await?;
    let division = MegatronDivision::new(&metadata, layout, args.as_ref())?;
    let oldest_version = oldest_version(layout, args.as_ref());
    let mut report = divide(&source, &writer.build(), &division, options).await?;
    let is_left = |one: &ForeignCallable| {
        replaced.iter().all(|object| one.path.as_ref() != Some(&object.path))
    };
    report.callables.splice(0..0, callables.into_iter().filter(is_left));
    report.replaced = replaced;
    report.oldest_version = oldest_version.filter(|_| has_common_file);
    Ok(report)
}

/// Whether a key is that of something that Megatron-Core keeps as one object.
fn is_one_object(key: &str) -> bool {
    key == COMMON_STATE || key.contains("/shard_")
}

/// The object whose part an entry is, in a checkpoint that keeps what is in objects one by one, as
/// a file of `torch.save` does.
fn outermost(entry: &Entry) -> Option<&Arc<str>> {
    match entry.path().map(|path| &**path) {
        Some([PathItem::Key(first), _, ..]) if is_one_object(first) => Some(first),
        _ => None,
    }
}

/// Objects that a checkpoint keeps in parts, put together again.
async fn nested(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
) -> Result<Dict, MegatronError> {
    let parts: Vec<_> = metadata.iter().filter(|(_, entry)| outermost(entry).is_some()).collect();
    let lens = parts.iter().filter_map(|(_, entry)| entry.as_tensor()?.byte_len());
    let byte_len = lens.fold(0, u64::saturating_add);
    if byte_len > OBJECTS_BYTES_MAX {
        let problem = format!("the objects in it have tensors of {byte_len} bytes");
        return Err(FormatError::new("checkpoint", problem).into());
    }
    let keys: HashSet<&Arc<str>> = parts.iter().filter_map(|(_, e)| outermost(e)).collect();
    if keys.is_empty() {
        return Ok(Dict::new());
    }
    // The file itself has more than the names of the parts: empty containers, and keys that are
    // no text.
    if let Some(reader) = source.extension::<TorchSaveReader>()
        && let Some(values) = reader.values(|key| keys.iter().any(|known| &***known == key)).await?
    {
        return Ok(values);
    }
    let mut leaves = Vec::new();
    for (fqn, entry) in parts {
        let value = match find(source, fqn, None).await? {
            Found::Object(_) => read_object(source, fqn).await?,
            Found::Tensor(tensor) => {
                let bytes = tensor.read().await?.to_vec();
                let Some(tensor) = entry.as_tensor() else { continue };
                let tensor = Tensor::replicated(tensor.dtype, tensor.shape.clone(), bytes);
                Value::Tensor(tensor?)
            }
            _ => continue,
        };
        leaves.extend(entry.path().map(|path| (Arc::clone(path), value)));
    }
    Ok(unflatten(leaves)?)
}

/// Returns a view of `source` that shows every object in one piece, under a unique key.
async fn with_unique_keys(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    nested: Dict,
    options: &JobOptions,
) -> Result<Source, MegatronError> {
    let is_plain = |fqn: &str, entry: &Entry| {
        matches!(entry, Entry::Object(_)) && outermost(entry).is_none() && !is_one_object(fqn)
    };
    if nested.is_empty() && !metadata.iter().any(|(fqn, entry)| is_plain(fqn, entry)) {
        return Ok(source.clone());
    }
    let lens = metadata.iter().filter(|(fqn, entry)| is_plain(fqn, entry)).filter_map(|(_, e)| {
        let Entry::Object(object) = e else { return None };
        object.placement.map(|placement| placement.byte_len)
    });
    let byte_len = lens.fold(0, u64::saturating_add);
    if byte_len > OBJECTS_BYTES_MAX {
        let problem = format!(
            "the objects in it that become sharded objects of Megatron-Core have {byte_len} bytes, \
             more than the {OBJECTS_BYTES_MAX} that are taken over; leave some of them out"
        );
        return Err(FormatError::new("checkpoint", problem).into());
    }
    let mut view = Assembled::builder(std::slice::from_ref(source), options).await?;
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if is_plain(fqn, entry) {
            let value = read_object(source, fqn).await?;
            view.object(format!("{fqn}/shard_0_1"), None, Value::List(vec![value]))?;
        } else if outermost(entry).is_none() {
            view.pass(Arc::clone(fqn), None, 0, at)?;
        }
    }
    for (key, value) in nested {
        if let Value::Str(key) = key
            && *key != *COMMON_STATE
        {
            view.object(key, None, value)?;
        }
    }
    Ok(view.finish()?)
}
