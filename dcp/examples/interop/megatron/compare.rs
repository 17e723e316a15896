//! Whether what was loaded is what was saved.

use dcp::core::Dict;
use serde_json::Value as Json;

use crate::{Result, expected};

/// Fails unless a common state is what the tagged JSON says, in whatever order.
pub(super) fn compare_common(found: &Dict, json: &Json) -> Result {
    let pairs = json.get("v").and_then(Json::as_array).ok_or("no common state")?;
    for pair in pairs {
        let name = pair.get(0).and_then(Json::as_str).unwrap_or_default();
        let value = found.get(name).ok_or_else(|| format!("no {name} in the common state"))?;
        if !pair.get(1).is_some_and(|json| expected::matches(value.view(), json)) {
            return Err(format!("{name} is {value:?} in the common state, not {pair}").into());
        }
    }
    if found.len() != pairs.len() {
        let names: Vec<_> = found.iter().map(|(name, _)| name).collect();
        return Err(format!("{names:?} are in the common state, not {json}").into());
    }
    Ok(())
}
