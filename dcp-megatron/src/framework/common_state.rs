//! The common state of an opened checkpoint, as data.

use dcp_core::Key;
use dcp_core::storage::StorageExt;
use dcp_core::text::Quoted;
use dcp_jobs::inspect::KeySummary;
use dcp_jobs::{Checkpoint, Error, ErrorKind};
use serde_json::{Map, Value};

use super::{ARGUMENTS, COMMON};
use crate::disk::common_state::COMMON_STATE;
use crate::disk::config::METADATA_JSON;
use crate::open::checkpoint::MegatronCheckpoint;

/// The common state of a checkpoint of Megatron-Core, as
/// [`value_json`](dcp_jobs::element::value_json) writes it.
///
/// # Errors
///
/// [`InvalidOption`](ErrorKind::InvalidOption) for a checkpoint of another program,
/// [`Damaged`](ErrorKind::Damaged) where there is none or none can be recognized.
pub async fn common_state(checkpoint: &Checkpoint) -> Result<Map<String, Value>, Error> {
    common_state_for(checkpoint, COMMON).await
}

/// The arguments in the common state: those of the run that saved the checkpoint.
///
/// # Errors
///
/// As [`common_state`].
pub async fn arguments(checkpoint: &Checkpoint) -> Result<Map<String, Value>, Error> {
    let mut state = common_state_for(checkpoint, ARGUMENTS).await?;
    state.remove("args").and_then(plain_dict).ok_or_else(|| {
        has_no(checkpoint, "arguments in its common state")
            .with_hint("`framework::common_state` shows what there is")
    })
}

async fn common_state_for(
    checkpoint: &Checkpoint,
    option: &str,
) -> Result<Map<String, Value>, Error> {
    if checkpoint.downcast::<MegatronCheckpoint>().is_none() {
        return Err(no_common_state(checkpoint, option).await);
    }
    let found = checkpoint.inspect().filter(|name| name == COMMON_STATE).run().await?;
    match found.summary.keys.into_values().next() {
        Some(KeySummary::Object { value }) => {
            plain_dict(value).ok_or_else(|| has_no(checkpoint, "common state that is a dict"))
        }
        _ => Err(has_no(checkpoint, "common state")),
    }
}

fn has_no(checkpoint: &Checkpoint, what: &str) -> Error {
    Error::new(ErrorKind::Damaged, format!("{:?} has no {what}", checkpoint.uri()))
}

async fn no_common_state(checkpoint: &Checkpoint, option: &str) -> Error {
    let uri = checkpoint.uri();
    if checkpoint.is_folder()
        && let Ok(config) = Key::new(METADATA_JSON)
        && checkpoint.storage().contains(&config).await.unwrap_or(false)
    {
        let message = format!(
            "{} has no common state that can be recognized: its {METADATA_JSON} does not name the \
             backends of Megatron-Core, because it is damaged or of another program",
            Quoted(uri)
        );
        return Error::new(ErrorKind::Damaged, message)
            .with_hint("`Checkpoint::inspect` shows what else there is");
    }
    let message = format!("{option} is for checkpoints of Megatron-Core, and {uri:?} is none");
    Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out to see what there is")
}

/// The entries of a dict, or those of an object with a dict as its state.
fn plain_dict(value: Value) -> Option<Map<String, Value>> {
    let Value::Object(mut map) = value else { return None };
    match map.get("type").and_then(Value::as_str) {
        None => Some(map),
        Some(_) => match map.remove("state") {
            Some(Value::Object(state)) => Some(state),
            _ => None,
        },
    }
}
