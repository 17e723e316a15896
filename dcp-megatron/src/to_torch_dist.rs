//! Any checkpoint as one of Megatron-Core's `torch_dist`, as the ranks of a job would have saved
//! it.

use std::sync::Arc;

use dcp_convert::view::Assembled;
use dcp_convert::{JobOptions, Source, WriteReport, divide, read_object};
use dcp_core::{CheckpointMetadata, Entry, Value};

use crate::args::MegatronArgs;
use crate::error::MegatronError;
use crate::logical::COMMON_STATE;
use crate::partition::{MegatronDivision, ParallelLayout};
use crate::writer::MegatronWriterBuilder;

/// Writes everything that `source` has as a checkpoint of `torch_dist`, as the ranks of `layout`
/// would have saved it: each tensor cut as [`partition::RULES`](crate::partition::RULES) says, one
/// chunk a layer and expert, in the file of the rank that holds it; what no rule names in the grid
/// it is stored in, else whole. Optimizer state goes with its parameter, objects with their layer
/// or rank.
///
/// The common state is the writer's, if it was given one, else the source's own: the entry
/// [`COMMON_STATE`]. It is taken over as it is: arguments in it go on to say how the run that
/// saved it was laid out, as the random states among the objects do, which Megatron-Core passes
/// over where the layout is another. An object that has no place in a grid becomes one of a grid of
/// one, `name/shard_0_1`, a list of one, which is how Megatron-Core knows objects.
///
/// Nothing is held in memory as a whole, and what was read is compared with its checksums before
/// the new checkpoint is committed.
///
/// # Errors
///
/// [`MegatronError::Layout`] and [`MegatronError::Indivisible`] when the layout does not fit;
/// [`MegatronError::FlatOptimizer`] for optimizer state that only its own layout can have; else as
/// [`divide`]. What was there before is then untouched.
pub async fn to_torch_dist(
    source: &Source,
    writer: MegatronWriterBuilder,
    layout: ParallelLayout,
    options: &JobOptions,
) -> Result<WriteReport, MegatronError> {
    let metadata = source.metadata().await?;
    let mut writer = writer;
    if !writer.has_common() && metadata.get(COMMON_STATE).is_some() {
        writer = writer.common(read_object(source, COMMON_STATE).await?);
    }
    let args = writer.common_dict().and_then(|common| common.get("args"));
    let args = args.and_then(MegatronArgs::from_value);
    let source = with_unique_keys(source, &metadata, options).await?;
    let metadata = source.metadata().await?;
    let division = MegatronDivision::new(&metadata, layout, args.as_ref())?;
    Ok(divide(&source, &writer.build(), &division, options).await?)
}

/// The same with every object under a unique key.
async fn with_unique_keys(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    options: &JobOptions,
) -> Result<Source, MegatronError> {
    let is_plain = |fqn: &str, entry: &Entry| {
        matches!(entry, Entry::Object(_)) && fqn != COMMON_STATE && !fqn.contains("/shard_")
    };
    if !metadata.iter().any(|(fqn, entry)| is_plain(fqn, entry)) {
        return Ok(source.clone());
    }
    let mut view = Assembled::builder(std::slice::from_ref(source), options).await?;
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if is_plain(fqn, entry) {
            let value = read_object(source, fqn).await?;
            view.object(format!("{fqn}/shard_0_1"), None, Value::List(vec![value]))?;
        } else {
            view.pass(Arc::clone(fqn), None, 0, at)?;
        }
    }
    Ok(view.finish()?)
}
