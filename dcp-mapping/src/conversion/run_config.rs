//! The configuration that a trainer wrote next to a checkpoint of Megatron-Core that has no
//! arguments.

use std::sync::Arc;

use dcp_core::location::{below_url, split_url};
use dcp_core::registry::Access;
use dcp_core::storage::StorageExt;
use dcp_core::{Key, Storage, StorageError};
use dcp_jobs::{Checkpoint, Error, ErrorKind};

use crate::facts::Facts;

/// The folder of NeMo's checkpoints that holds the weights.
const NEMO_WEIGHTS: &str = "weights";
/// Bytes of a configuration that are read at most.
const CONFIG_MAX: u64 = 16 << 20;
/// The configuration that Megatron-Bridge writes among the files of a checkpoint.
const BRIDGE: &str = "run_config.yaml";
/// The configuration of NeMo, in the folder above that of the checkpoint.
const NEMO: &str = "context/model.yaml";

/// Reads the facts in the configuration of a checkpoint, and its URL.
pub(super) async fn facts(checkpoint: &Checkpoint) -> Result<Option<(Facts, String)>, Error> {
    if let Some(found) = read(checkpoint.storage(), checkpoint.place(), BRIDGE).await? {
        return Ok(Some(found));
    }
    let Some((parent, _)) = split_url(checkpoint.place()).filter(|(_, name)| name == NEMO_WEIGHTS)
    else {
        return Ok(None);
    };
    let storage = checkpoint.opener().storages().open(&parent, Access::Read).await?;
    read(&storage, &parent, NEMO).await
}

async fn read(
    storage: &Arc<dyn Storage>,
    place: &str,
    name: &str,
) -> Result<Option<(Facts, String)>, Error> {
    let key = Key::new(name).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Ok(None);
    }
    let file = below_url(place, name);
    let bad = |problem: &str| Error::new(ErrorKind::Damaged, format!("{file}: {problem}"));
    let len = storage.stat(&key).await?.byte_len;
    if len > CONFIG_MAX {
        return Err(bad("it is larger than a configuration is"));
    }
    let bytes = storage.read_range(&key, 0..len).await?;
    let text = std::str::from_utf8(&bytes).map_err(|_| bad("it is not UTF-8 text"))?;
    Ok(Some((Facts::from_run_config(text, &file)?, file)))
}
