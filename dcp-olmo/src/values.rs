//! Reading a few entries of a checkpoint as values.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, StorageReader, Value};
use dcp_engine::{Loader, Settings};
use dcp_planner::{FlattenRule, KeyFilter, Template};

use crate::rekeyed::{Origin, Rekeyed, Shown};

/// The values of the entries at positions `entries`, in that order: tensors whole, in memory of
/// their own, which is not claimed for more bytes than the checkpoint can hold.
pub(crate) async fn read_values(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    entries: &[usize],
) -> Result<Vec<Value>, CheckpointError> {
    // Under numbers, so that an entry may be wanted twice.
    let shown = entries.iter().enumerate().map(|(n, entry)| Shown {
        fqn: n.to_string().into(),
        path: None,
        origin: Origin::Entry(*entry),
    });
    let view = Rekeyed::new(Arc::clone(reader), Arc::clone(metadata), shown.collect())?;
    let named = |error| naming(error, metadata, entries);
    let template = Template::whole(&*view.metadata().await?, &KeyFilter::all()).map_err(named)?;
    let mut state: Dict =
        template.leaves().iter().map(|leaf| (Arc::clone(&leaf.fqn), leaf.value.clone())).collect();
    Loader::with_settings(Settings::new().flatten_rule(FlattenRule::TopLevel))
        .load(&mut state, &view)
        .await?;
    Ok(state.into_iter().map(|(_, value)| value).collect())
}

/// The error under the name that the entry has in the checkpoint.
fn naming(error: PlanError, metadata: &CheckpointMetadata, entries: &[usize]) -> PlanError {
    let number = error.fqn().and_then(|number| number.parse::<usize>().ok());
    let entry = number.and_then(|number| entries.get(number));
    match entry.and_then(|entry| metadata.at(*entry)) {
        Some((fqn, _)) => error.with_fqn(&**fqn),
        None => error,
    }
}
