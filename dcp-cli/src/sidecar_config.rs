//! What lies beside a checkpoint of Megatron-Core and tells of its model.

use std::sync::Arc;

use dcp::Access;
use dcp::core::{Key, Storage, StorageError, StorageExt};
use dcp::mapping::Facts;

use crate::failure::{Exit, Failure};
use crate::folder::split;
use crate::open::{Opened, registry};

/// The folder of NeMo's that has the checkpoint, beside that with what tells of it.
pub(crate) const WEIGHTS: &str = "weights";
/// Bytes of a configuration that are read at most.
const CONFIG_MAX: u64 = 16 << 20;
/// What Megatron-Bridge writes among the files of a checkpoint.
const BRIDGE: &str = "run_config.yaml";
/// The same of NeMo, beside the folder of the checkpoint.
const NEMO: &str = "context/model.yaml";

/// What a configuration beside the checkpoint tells, and where it lies.
pub(crate) async fn facts(opened: &Opened) -> Result<Option<(Facts, String)>, Failure> {
    if let Some(found) = read(&opened.folder, &opened.place, BRIDGE).await? {
        return Ok(Some(found));
    }
    let Some((parent, _)) = split(&opened.place).filter(|(_, name)| name == WEIGHTS) else {
        return Ok(None);
    };
    let storage = registry().open(&parent, Access::Read)?;
    read(&storage, &parent, NEMO).await
}

async fn read(
    storage: &Arc<dyn Storage>,
    place: &str,
    name: &str,
) -> Result<Option<(Facts, String)>, Failure> {
    let key = Key::new(name).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Ok(None);
    }
    let file = format!("{}/{name}", place.trim_end_matches('/'));
    let bad = |problem: &str| Failure::new(Exit::Bad, format!("{file}: {problem}"));
    let len = storage.stat(&key).await?.byte_len;
    if len > CONFIG_MAX {
        return Err(bad("it is larger than a configuration is"));
    }
    let bytes = storage.read_range(&key, 0..len).await?;
    let text = std::str::from_utf8(&bytes).map_err(|_| bad("it is no text in UTF-8"))?;
    Ok(Some((Facts::from_run_config(text, &file)?, file)))
}
