//! What each of several ranks holds of state dicts, by PyTorch's helpers and by ours.

use std::sync::Arc;

use dcp::core::value::Dict;
use dcp::state::{StateDictOptions, set_state_dict};
use dcp::{Checkpointer, Collective, StateDict, Tensor, Value};
use serde_json::Value as Json;

use crate::Result;
use crate::state_dict::{Adam, Module, compare, stored, whole_state};

/// Compares what this rank holds of the state dicts of PyTorch's model with what PyTorch's rank does,
/// and what it has after a broadcast of rank 0's. Rank 0 saves what it gathered.
pub(crate) async fn run(folder: &str, group: &Arc<dyn Collective>) -> Result {
    let path = |name: &str| format!("{folder}/{name}");
    let theirs = |name: &str| path(&format!("{name}.{}", group.rank()));
    let is_sharded = |chunks: usize| chunks > 1;
    let raw = stored(&path("raw"), Some((group, &is_sharded))).await?;
    let described: Json = serde_json::from_slice(&std::fs::read(path("model.json"))?)?;
    let module = Module::new(&described, &raw, Vec::new())?;
    let mut adam = Adam::new(&described, &raw)?;
    let options = StateDictOptions::new().group(Arc::clone(group));
    for (layout, is_flat) in [("nested", false), ("flat", true)] {
        let options = options.clone().flatten_optimizer_state_dict(is_flat);
        for (name, full, offload) in [
            ("sharded", false, false),
            ("offloaded", false, true),
            ("full", true, false),
            ("rank0", true, true),
        ] {
            let options = options.clone().full_state_dict(full).cpu_offload(offload);
            let ours = whole_state(&module, &mut adam, &options).await?;
            let name = format!("{name}_{layout}");
            let same = compare(&held_here(&ours)?, &stored(&theirs(&name), None).await?);
            same.map_err(|error| format!("{name}: {error}"))?;
        }
    }

    let full = options.clone().full_state_dict(true);
    let gathered = whole_state(&module, &mut adam, &full.clone().cpu_offload(true)).await?;
    if group.rank() == 0 {
        // PyTorch loads it and sets it on ranks of its own.
        Checkpointer::new().save(&gathered, path("ours")).await?;
    }
    let part = |name: &str| -> StateDict {
        let dict = gathered.get(name).and_then(Value::as_dict).cloned().unwrap_or_default();
        dict.into_iter().collect()
    };
    let (mut fresh, mut lazy) = (module.zeroed()?, adam.untrained()?);
    let broadcast = full.broadcast_from_rank0(true);
    let (model, optimizer) = (part("model"), part("optimizer"));
    set_state_dict(&mut fresh, &mut [&mut lazy], model, optimizer, &broadcast).await?;
    let set = whole_state(&fresh, &mut lazy, &options).await?;
    let same = compare(&held_here(&set)?, &stored(&theirs("set"), None).await?);
    Ok(same.map_err(|error| format!("set: {error}"))?)
}

/// What this rank holds, as the script describes it, and the number of keys of each part.
fn held_here(state: &StateDict) -> Result<StateDict> {
    let mut all = StateDict::new();
    for (key, part) in state.iter() {
        let key = key.as_str().ok_or("a part without a name")?;
        let count = part.as_dict().ok_or("a part that is no dict")?.len();
        // Flattening drops empty dicts.
        if count > 0 {
            all.insert(key, held(part));
        }
        all.insert(format!("of_{key}"), u64::try_from(count)?);
    }
    Ok(all)
}

fn held(value: &Value) -> Value {
    match value {
        Value::Tensor(tensor) if tensor.is_sharded() => part_of(tensor).into(),
        Value::Dict(dict) => {
            let inner = dict.iter().map(|(key, value)| (key.clone(), held(value)));
            Value::Dict(inner.collect())
        }
        Value::List(list) => Value::List(list.iter().map(held).collect()),
        other => other.clone(),
    }
}

/// The part of a sharded tensor that this rank holds: one region, or nothing.
fn part_of(tensor: &Tensor) -> Dict {
    let shard = tensor.shards().iter().find(|shard| shard.region().volume() > 0);
    let view = shard.and_then(|shard| shard.view().cloned());
    let local = view.and_then(|view| Tensor::from_view(view).ok());
    let offsets = shard.map_or(String::new(), |shard| format!("{:?}", shard.region().offsets()));
    Dict::from([
        ("shape", Value::from(format!("{:?}", tensor.shape().to_vec()))),
        ("offsets", Value::from(offsets)),
        ("local", local.map_or(Value::None, Value::from)),
    ])
}
