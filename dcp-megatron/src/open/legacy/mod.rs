//! Checkpoints of `--ckpt-format torch`: a folder `mp_rank_*` for each model-parallel rank, shown
//! as the whole tensors that they are parts of, under the names of distributed checkpoints.

mod assemble;
pub(crate) mod folders;
mod fused;
mod leaves;
mod names;
mod rank_local;

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{Key, Storage, Value};
use dcp_formats::torch_save::TorchSaveReader;
use dcp_jobs::view::Assembled;
use dcp_jobs::{JobOptions, Source};

use folders::Grid;
pub(crate) use folders::LegacyFolders;

use crate::args::MegatronArgs;
use crate::error::MegatronError;

/// The file of a rank's model, arguments and random state.
const MODEL_FILE: &str = "model_optim_rng.pt";
/// The file of a rank's optimizer, when that is a distributed one.
const OPTIMIZER_FILE: &str = "distrib_optim.pt";
/// Optimizer state without names of parameters that is still taken into the common state, in
/// bytes.
const OPTIMIZER_BYTES_MAX: u64 = 16 << 20;

/// Whether Megatron-LM writes a file of this name into the folder of a rank.
pub(crate) fn is_rank_file(name: &str) -> bool {
    [MODEL_FILE, OPTIMIZER_FILE].contains(&name)
}

/// A checkpoint of `mp_rank_*` folders.
#[derive(Debug)]
pub(crate) struct Legacy {
    /// The model's tensors, and what is known of ranks as objects.
    pub(crate) source: Source,
    /// The entries of the first rank's file besides the model and the random state.
    pub(crate) common: Dict,
    /// The files of distributed optimizers, by rank of the model.
    pub(crate) optimizers: Vec<Source>,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) ep: u32,
    /// The folders whose optimizer file is lost, and the problem of each.
    pub(crate) damage: Vec<(String, String)>,
    pub(crate) warnings: Vec<String>,
}

impl Legacy {
    /// Opens the folders. No tensor of the model is read.
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        folders: LegacyFolders,
        job: &JobOptions,
    ) -> Result<Self, MegatronError> {
        let mut warnings = Vec::new();
        let first = folders.first()?;
        let reader = reader(storage, first, MODEL_FILE)?;
        let sizes = reader.metadata_of_optimizer().await?;
        let keeps_optimizer = sizes <= OPTIMIZER_BYTES_MAX;
        if !keeps_optimizer {
            warnings.push(format!(
                "the optimizer's state in {MODEL_FILE} ({sizes} bytes) is in lists that name no \
                 parameters, and is left out"
            ));
        }
        let mut common = reader
            .values(|key| !is_model(key) && key != RNG && (keeps_optimizer || key != "optimizer"))
            .await?;
        let args = common.get("args").and_then(MegatronArgs::from_value);
        let grid = folders.grid(args.as_ref())?;
        if grid.places().count() > 1
            && let Some(optimizer) = common.get_mut("optimizer")
            && rank_local::strip(optimizer)
        {
            warnings.push(format!(
                "the optimizer's state in each {MODEL_FILE} is that of its rank, in lists that \
                 name no parameters, and is left out; the optimizer's settings are kept"
            ));
        }
        let mut differing = BTreeSet::new();
        let mut sources = Vec::new();
        let mut ranks = Vec::new();
        for (at, place) in grid.places().enumerate() {
            let reader = self::reader(storage, &place.folder, MODEL_FILE)?;
            let own = reader.values(|key| matches!(key, RNG | "iteration")).await?;
            same_iteration(&place.folder, own.get("iteration"), common.get("iteration"))?;
            if grid.is_first(at) {
                ranks.push((place.tp, place.pp, own.get(RNG).cloned()));
            }
            if place.folder != first {
                differing.extend(rank_local::differing(&reader, &common).await?);
            }
            sources.push(fused::grouped(reader.source, grid.ep, args.as_ref(), job).await?);
        }
        if !differing.is_empty() {
            let keys = differing.into_iter().collect::<Vec<_>>().join(", ");
            warnings.push(format!(
                "what is not the same in all folders is taken from {first} alone: {keys}"
            ));
        }
        let leaves = leaves::collect(&grid, &sources, args.as_ref(), &mut warnings).await?;
        let mut view = Assembled::builder(&sources, job).await?;
        assemble::add(&mut view, leaves, &grid, args.as_ref(), &sources).await?;
        for (tp, pp, state) in ranks {
            if let Some(state) = state {
                let name = format!("{RNG}/shard_{pp}.{tp}_{}.{}", grid.pp, grid.tp);
                view.object(name, None, Value::List(vec![state]))?;
            }
        }
        let mut optimizers = Vec::new();
        for place in grid.places().filter(|place| place.has_optimizer) {
            optimizers.push(self::reader(storage, &place.folder, OPTIMIZER_FILE)?.source);
        }
        if !optimizers.is_empty() {
            warnings.push(format!(
                "the optimizer's state is in buffers that name no parameters, {} of \
                 {OPTIMIZER_FILE}; it is left out unless it is taken apart by parameter \
                 (`OptimizerForm::PerParameter`)",
                optimizers.len()
            ));
        }
        let damage = lost_optimizers(&grid);
        let (tp, pp, ep) = (grid.tp, grid.pp, grid.ep);
        Ok(Self { source: view.finish()?, common, optimizers, tp, pp, ep, damage, warnings })
    }
}

/// The folders without the optimizer that others have: all have one or none.
fn lost_optimizers(grid: &Grid) -> Vec<(String, String)> {
    let has = grid.places().find(|place| place.has_optimizer);
    let Some(has) = has.map(|place| place.folder.as_str()) else { return Vec::new() };
    let lost = grid.places().filter(|place| !place.has_optimizer).map(|place| {
        let problem = format!(
            "there is no {OPTIMIZER_FILE} in it, and there is one in {has}: the optimizer's state \
             of this rank is lost; with none of these files, all but the optimizer can be read"
        );
        (place.folder.clone(), problem)
    });
    lost.collect()
}

const RNG: &str = "rng_state";

/// Whether a key of a file is that of a model: `model`, or `model0` and so on, the chunks of a
/// virtual pipeline.
fn is_model(key: &str) -> bool {
    model_chunk(key).is_some()
}

/// Returns the chunk of a virtual pipeline that a key of a file names.
fn model_chunk(key: &str) -> Option<u64> {
    match key.strip_prefix("model")? {
        "" => Some(0),
        digits => digits.parse().ok(),
    }
}

/// A file, read both as a checkpoint and by its outermost keys.
struct File {
    source: Source,
    reader: TorchSaveReader,
    folder: String,
}

fn reader(storage: &Arc<dyn Storage>, folder: &str, name: &str) -> Result<File, MegatronError> {
    let key = Key::new(format!("{folder}/{name}")).map_err(dcp_core::StorageError::from)?;
    let reader = TorchSaveReader::new(Arc::clone(storage), key.clone());
    let source = Source::torch_save(Arc::clone(storage), key);
    Ok(File { source, reader, folder: folder.to_owned() })
}

impl File {
    async fn values(&self, wanted: impl Fn(&str) -> bool + Send) -> Result<Dict, MegatronError> {
        let values = self.reader.values(wanted).await?;
        values.ok_or_else(|| MegatronError::Legacy {
            folder: self.folder.clone(),
            problem: format!("{MODEL_FILE} holds no dict; it is not a checkpoint of Megatron-LM"),
        })
    }

    /// Bytes of the tensors in the optimizer's state.
    async fn metadata_of_optimizer(&self) -> Result<u64, MegatronError> {
        let metadata = self.source.metadata().await?;
        let tensors = metadata.iter().filter(|(fqn, _)| fqn.starts_with("optimizer."));
        let lens = tensors.filter_map(|(_, entry)| entry.as_tensor()?.byte_len());
        Ok(lens.fold(0, u64::saturating_add))
    }
}

/// Files of different iterations are of different checkpoints.
fn same_iteration(
    folder: &str,
    own: Option<&Value>,
    first: Option<&Value>,
) -> Result<(), MegatronError> {
    let number = |value: Option<&Value>| value.and_then(Value::as_int);
    match (number(own), number(first)) {
        (Some(own), Some(first)) if own != first => Err(MegatronError::Legacy {
            folder: folder.to_owned(),
            problem: format!(
                "it is of iteration {own}, the first folder of iteration {first}: the folders are \
                 of different checkpoints"
            ),
        }),
        _ => Ok(()),
    }
}
