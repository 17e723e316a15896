//! Reads what a checkpoint contains, by the functions of Megatron-Core's API.

use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, FormatError, StateDict, Storage, Tensor, Value};
use dcp_jobs::get::{Found, find};
use indexmap::IndexMap;

use crate::disk::common_state::{COMMON_OBJECT, CommonPlace};
use crate::disk::config::CheckpointingConfig;
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, StoredFormat};
use crate::sharded::{LocalTensor, ObjectKey, ShardedObject, ShardedTensor};

/// A tensor or object of a checkpoint, without its data.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ShardedEntry {
    /// A tensor in one piece.
    Tensor(Box<ShardedTensor>),
    /// An object.
    Object(Box<ShardedObject>),
}

/// Whether a folder is a checkpoint of Megatron-Core: whether it has a `metadata.json` that can be
/// read, which is written last.
///
/// # Errors
///
/// When the file is there but cannot be understood, or the storage fails.
pub async fn check_is_distributed_checkpoint(
    storage: &Arc<dyn Storage>,
) -> Result<bool, MegatronError> {
    Ok(CheckpointingConfig::read(&*crate::disk::recovery::recovered(storage).await?)
        .await?
        .is_some())
}

/// The common state of a checkpoint: all that is not sharded.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`].
pub async fn load_common_state_dict(storage: &Arc<dyn Storage>) -> Result<Dict, MegatronError> {
    load_common_state_dict_with(storage, &MegatronOpenOptions::default()).await
}

/// Returns the common state of a checkpoint that is opened with `options`, such as a plug-in's
/// strategy.
///
/// # Errors
///
/// As [`load_common_state_dict`].
pub async fn load_common_state_dict_with(
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
) -> Result<Dict, MegatronError> {
    Ok(MegatronCheckpoint::open(storage, options).await?.common().clone())
}

/// Returns the content metadata that Megatron-Core (0.13 and later) stores in a checkpoint; `None`
/// where there is none.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`].
pub async fn load_content_metadata(
    storage: &Arc<dyn Storage>,
) -> Result<Option<Dict>, MegatronError> {
    load_content_metadata_with(storage, &MegatronOpenOptions::default()).await
}

/// Returns the content metadata of a checkpoint that is opened with `options`, such as a plug-in's
/// strategy.
///
/// # Errors
///
/// As [`load_content_metadata`].
pub async fn load_content_metadata_with(
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
) -> Result<Option<Dict>, MegatronError> {
    Ok(MegatronCheckpoint::open(storage, options).await?.content_metadata().cloned())
}

/// Every tensor of a checkpoint by its key, in one piece and without data. Those that versions up
/// to 0.15 saved flattened have the shape that they have for Megatron-Core, where Megatron-Core
/// since 0.16 shows how they are stored.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`].
pub async fn load_tensors_metadata(
    storage: &Arc<dyn Storage>,
) -> Result<IndexMap<Arc<str>, ShardedTensor>, MegatronError> {
    load_tensors_metadata_with(storage, &MegatronOpenOptions::default()).await
}

/// Returns every tensor of a checkpoint that is opened with `options`, such as a plug-in's
/// strategy.
///
/// # Errors
///
/// As [`load_tensors_metadata`].
pub async fn load_tensors_metadata_with(
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
) -> Result<IndexMap<Arc<str>, ShardedTensor>, MegatronError> {
    let all = load_sharded_metadata_with(storage, options).await?.into_iter();
    let tensors = all.filter_map(|(key, described)| match described {
        ShardedEntry::Tensor(tensor) => Some((key, *tensor)),
        ShardedEntry::Object(_) => None,
    });
    Ok(tensors.collect())
}

/// Returns every tensor as [`load_tensors_metadata`] does, and every object by its unique key;
/// since 0.19 the common state is among them.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`].
pub async fn load_sharded_metadata(
    storage: &Arc<dyn Storage>,
) -> Result<IndexMap<Arc<str>, ShardedEntry>, MegatronError> {
    load_sharded_metadata_with(storage, &MegatronOpenOptions::default()).await
}

/// Returns every tensor and object of a checkpoint that is opened with `options`, such as a
/// plug-in's strategy.
///
/// # Errors
///
/// As [`load_sharded_metadata`].
pub async fn load_sharded_metadata_with(
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
) -> Result<IndexMap<Arc<str>, ShardedEntry>, MegatronError> {
    let checkpoint = MegatronCheckpoint::open(storage, options).await?;
    let metadata = checkpoint.source().metadata().await?;
    let mut all = IndexMap::with_capacity(metadata.len());
    for (key, entry) in metadata.iter() {
        match entry {
            Entry::Tensor(tensor) => {
                let local = LocalTensor::described(tensor.dtype, tensor.shape.clone());
                let whole = ShardedTensor::from_rank_offsets(Arc::clone(key), local).build()?;
                all.insert(Arc::clone(key), ShardedEntry::Tensor(Box::new(whole)));
            }
            _ => {
                if let Some(at) = ObjectKey::parse(key) {
                    all.insert(
                        Arc::clone(key),
                        ShardedEntry::Object(Box::new(ShardedObject::request(at))),
                    );
                }
            }
        }
    }
    let inside = StoredFormat::TorchDist { common: CommonPlace::Inside };
    if *checkpoint.format() == inside
        && let Some(at) = ObjectKey::parse(COMMON_OBJECT)
    {
        all.insert(
            COMMON_OBJECT.into(),
            ShardedEntry::Object(Box::new(ShardedObject::request(at))),
        );
    }
    Ok(all)
}

/// Every tensor of a checkpoint by its key, whole, and the common state beside them. All of it is
/// in memory then; jobs of `dcp-jobs` are for what is larger.
///
/// # Errors
///
/// As [`MegatronCheckpoint::open`], when a tensor cannot be read, and when it has the name of an
/// entry of the common state.
pub async fn load_plain_tensors(storage: &Arc<dyn Storage>) -> Result<StateDict, MegatronError> {
    load_plain_tensors_with(storage, &MegatronOpenOptions::default()).await
}

/// Returns every tensor and the common state of a checkpoint that is opened with `options`, such as
/// a plug-in's strategy.
///
/// # Errors
///
/// As [`load_plain_tensors`].
pub async fn load_plain_tensors_with(
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
) -> Result<StateDict, MegatronError> {
    let checkpoint = MegatronCheckpoint::open(storage, options).await?;
    let metadata = checkpoint.source().metadata().await?;
    let mut all = checkpoint.common().clone();
    for (key, entry) in metadata.iter() {
        let Entry::Tensor(tensor) = entry else { continue };
        let Found::Tensor(found) = find(checkpoint.source(), key, None).await? else { continue };
        let bytes = found.read().await?.to_vec();
        let value = Tensor::replicated(tensor.dtype, tensor.shape.clone(), bytes)?;
        if all.insert(Arc::clone(key), Value::Tensor(value)).is_some() {
            let problem = format!("{key:?} is both a tensor and an entry of the common state");
            return Err(CheckpointError::from(FormatError::new("checkpoint", problem)).into());
        }
    }
    Ok(all)
}
