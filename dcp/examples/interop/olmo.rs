//! What a trainer would do with a checkpoint of OLMo-core: load it, and save it again.

use std::sync::Arc;

use dcp::core::StateDict;
use dcp::core::StorageReader;
use dcp::core::registry::Access;
use dcp::engine::{Loader, Saver, Settings};
use dcp::formats::dcp::DcpReader;
use dcp::formats::metadata::Profile;
use dcp::olmo::{
    OlmoLoadOptions, OlmoSaveOptions, OptimizerLayout, load_keys, load_model_and_optim_state,
    save_model_and_optim_state, with_layout,
};
use dcp::{Collective, Value};
use futures_util::TryStreamExt;

use crate::{Result, storage};

/// Loads the checkpoint of either layout, with every rank, and saves it in the layout of `to`.
pub(crate) async fn resave(
    from: &str,
    to: &str,
    layout: &str,
    group: &Arc<dyn Collective>,
) -> Result {
    let reader: Arc<dyn StorageReader> =
        Arc::new(DcpReader::new(storage(from, Access::Read).await?));
    // The structure of the state, which a trainer has from its model.
    let nested = with_layout(Arc::clone(&reader), OptimizerLayout::Nested).await?;
    let values: Vec<_> = load_keys(nested, ["model", "optim"]).await?.try_collect().await?;
    let mut parts = values.into_iter().map(|(_, value)| match value {
        Value::Dict(dict) => Ok(dict),
        other => Err(format!("a state dict is a {}", other.kind())),
    });
    let mut next = || parts.next().unwrap_or_else(|| Ok(StateDict::new()));
    let (mut model, mut optim) = (next()?, next()?);

    let loader = Loader::with_settings(Settings::in_group(Arc::clone(group)));
    let options = OlmoLoadOptions::default();
    load_model_and_optim_state(&loader, reader, &mut model, Some(&mut optim), &options).await?;
    let saver = Saver::with_settings(Settings::in_group(Arc::clone(group)));
    let options = OlmoSaveOptions::default().profile(Profile::Olmo);
    let options = options.flatten_optimizer_state(layout == "flat");
    let target = storage(to, Access::Write).await?;
    save_model_and_optim_state(&saver, &target, &model, Some(&optim), &options).await?;
    Ok(())
}
