//! Megatron-Core's weights as transformers has them, as offline jobs do it.

use std::path::Path;

use dcp::Access;
use dcp::convert::{JobOptions, to_hf};
use dcp::formats::hf::HfLayout;
use dcp::mapping::{Facts, MapOptions, Mapping, Recognition, map_to_hf, recognize};
use dcp::megatron::{MegatronCheckpoint, OpenOptions};

use crate::{Result, storage};

/// One of the subcommands.
pub(crate) async fn run(args: &[&str]) -> Result {
    match *args {
        ["to-hf", from, to] => into_hf(from, to).await,
        _ => Err(format!("usage: map to-hf DIR DIR, not {args:?}").into()),
    }
}

/// A checkpoint whose family is told by what is in it, as a model that transformers opens.
async fn into_hf(from: &str, to: &str) -> Result {
    let options = OpenOptions::default();
    let opened = MegatronCheckpoint::open(&storage(from, Access::Read)?, &options).await?;
    let args = opened.args().ok_or("no arguments")?;
    let facts = Facts::from_dict(args.dict());
    let metadata = opened.source().metadata().await?;
    let family = match recognize(&metadata, &facts)? {
        Recognition::Found { family, .. } => family,
        other => return Err(format!("{other:?}").into()),
    };
    let (mapping, job) = (Mapping::builtin(&family)?, JobOptions::default());
    let mapped = map_to_hf(opened.source(), &mapping, &facts, &MapOptions::default(), &job).await?;
    let target = storage(to, Access::Write)?;
    to_hf(&mapped.source, &target, &HfLayout::default(), false, &job).await?;
    let config = serde_json::to_vec_pretty(&mapping.config_json(&mapped.facts)?)?;
    Ok(std::fs::write(Path::new(to).join("config.json"), config)?)
}
