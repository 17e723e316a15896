//! Restarts an optimizer from the weights, for checkpoints whose optimizer state is damaged.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::TensorEntry;
use dcp_core::value::Dict;
use dcp_core::{DType, Value};
use dcp_jobs::cast::CastOptions;
use dcp_jobs::view::{Assembled, Cast, Piece};
use dcp_jobs::{JobOptions, Source};

use super::check::tiles;
use super::format::OptimizerFormat;
use super::groups::without_steps;
use super::keys::{ParamStateKey, StateKind};
use crate::disk::common_state::COMMON_STATE;
use crate::error::MegatronError;

/// A checkpoint with a reset optimizer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Restarted {
    /// The checkpoint: all as it is, but master parameters, moments and steps.
    pub source: Source,
    /// The common state in it.
    pub common: Dict,
    /// Master parameters that are now those of the model.
    pub params: usize,
    /// State that is as it was: master parameters of which the model has no tensor of that name
    /// and shape, and what is not Adam's. Moments are never kept, for the steps are zero.
    pub kept: Vec<Arc<str>>,
}

/// The checkpoint that `source` shows by its logical names, with the common state `common`, its
/// optimizer reset: every master parameter is the weight in the optimizer's precision, every
/// moment is zero, and so is the step.
///
/// This is the safe repair of [shifted buckets](super::OptimizerVerdict::ShiftedBuckets). What
/// they lost cannot be had back: some of it was never written, and where the rest belongs is only
/// known while the weights have not changed. All parameters are reset, the sound ones too,
/// because a group has one step, by which Adam corrects the bias of moments that began at zero.
/// What is below the precision of the weights is lost; training goes on as from weights alone,
/// with the learning rate where it was.
///
/// # Errors
///
/// [`MegatronError::Optimizer`] for formats that do not name parameters: they have not this
/// damage. And when the checkpoint cannot be read.
pub async fn restart_optimizer(
    source: &Source,
    common: &Dict,
    job: &JobOptions,
) -> Result<Restarted, MegatronError> {
    let metadata = source.metadata().await?;
    let format = OptimizerFormat::of(&metadata, common);
    if !format.is_by_parameter() || format == OptimizerFormat::FsdpDtensor {
        return Err(MegatronError::Optimizer {
            what: format.to_string(),
            problem: "does not name the parameters, so its state cannot be reset from the \
                      weights; leave the optimizer out of the conversion instead"
                .to_owned(),
        });
    }
    let mut masters: HashMap<&str, DType> = HashMap::new();
    for (fqn, entry) in metadata.iter() {
        let Some(key) = ParamStateKey::parse(fqn) else { continue };
        let weight = metadata.get(key.param).and_then(|entry| entry.as_tensor());
        if let (Some(StateKind::Master), Some(master), Some(weight)) =
            (StateKind::of(key.state), entry.as_tensor(), weight)
            && master.shape == weight.shape
        {
            masters.insert(key.param, master.dtype);
        }
    }
    let rule = |fqn: &str, _| masters.get(fqn).copied();
    let (cast, _) = Cast::apply(source, rule, CastOptions::default(), job).await?;
    let changed = without_steps(common);
    let mut view = Assembled::builder(&[source.clone(), cast], job).await?;
    let (mut params, mut kept) = (0, Vec::new());
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        if **fqn == *COMMON_STATE {
            view.object(COMMON_STATE, None, Value::Dict(changed.clone()))?;
            continue;
        }
        let key = ParamStateKey::parse(fqn);
        let known = key.as_ref().and_then(|key| {
            let weight = match StateKind::of(key.state)? {
                StateKind::Master => {
                    masters.get(key.param)?;
                    Some(metadata.index_of(key.param)?)
                }
                StateKind::ExpAvg | StateKind::ExpAvgSq => None,
            };
            Some((weight, entry.as_tensor()?))
        });
        match known {
            Some((weight, tensor)) => {
                params += usize::from(weight.is_some());
                let pieces = pieces(weight, tensor)?;
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                view.tensor(Arc::clone(fqn), entry.path().cloned(), dtype, shape, pieces)?;
            }
            None => {
                if key.is_some() {
                    kept.push(Arc::clone(fqn));
                }
                view.pass(Arc::clone(fqn), entry.path().cloned(), 0, at)?;
            }
        }
    }
    Ok(Restarted { source: view.finish()?, common: changed, params, kept })
}

/// The chunks of a state, as those of a weight of the second part, or zeros.
fn pieces(
    weight: Option<usize>,
    tensor: &TensorEntry,
) -> Result<Vec<Piece>, dcp_core::CheckpointError> {
    let chunks = tiles(tensor)?.into_iter().map(|region| match weight {
        Some(weight) => Piece::same(region.clone(), 1, weight, region),
        None => Piece::zeros(region),
    });
    Ok(chunks.collect())
}
