//! A model of transformers, saved by ranks of which each has a part of every tensor.

use std::sync::Arc;

use dcp::core::StorageReader;
use dcp::core::metadata::Entry;
use dcp::core::registry::Access;
use dcp::engine::{Loader, Saver, Settings};
use dcp::formats::hf::{HfLayout, HfRankWriter, HfReader};
use dcp::{Collective, StateDict, Tensor};

use crate::{Result, layout, storage};

/// Files of at most this many bytes of tensors, so that a small model has several.
const FILE_BYTES: u64 = 20_000;

/// Loads the model in a folder into shards, and saves these and the whole tensors.
pub(crate) async fn resave(from: &str, to: &str, group: &Arc<dyn Collective>) -> Result {
    let reader = HfReader::new(storage(from, Access::Read).await?);
    let mut state = StateDict::new();
    for (number, (fqn, entry)) in reader.metadata().await?.iter().enumerate() {
        let Entry::Tensor(tensor) = entry else { continue };
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        let axis = format!("shard{}", number % shape.len().max(1));
        let layout = if shape.is_empty() { "replicated" } else { &axis };
        let target = match layout::by_name(layout, &shape, group.rank(), group.world_size())? {
            None => Tensor::zeros(dtype, shape)?,
            Some(regions) => Tensor::zeros_sharded(dtype, shape, regions)?,
        };
        state.insert(Arc::clone(fqn), target);
    }
    Loader::with_settings(Settings::in_group(Arc::clone(group))).load(&mut state, &reader).await?;
    let writer = HfRankWriter::builder(storage(to, Access::Write).await?);
    let writer = writer.layout(HfLayout::MaxFileBytes(FILE_BYTES)).consolidate(true).build();
    Saver::with_settings(Settings::in_group(Arc::clone(group))).save(&state, &writer).await?;
    Ok(())
}
