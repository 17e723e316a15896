//! What a trainer would do with Megatron-Core's checkpoints: describe its part of the state for
//! any parallel layout, save it, load it. `xtask/python/interop_megatron.py` builds the same from
//! the same description.

mod compare;
mod description;

use std::sync::Arc;

use compare::compare_common;
use dcp::convert::{TensorReader, read_object};
use dcp::megatron::sharded::ObjectKey;
use dcp::megatron::{COMMON_STATE, MegatronCheckpoint, OpenOptions};
use dcp::{Access, Region, Value};
use description::{Description, Spec};

use crate::{Result, expected};

/// One of the subcommands: `open STATE CHECKPOINT...`.
pub(crate) async fn run(args: &[&str]) -> Result {
    match *args {
        ["open", state, ref checkpoints @ ..] => {
            let description = Description::read(state)?;
            for checkpoint in checkpoints {
                let opened = open(&description, checkpoint).await;
                opened.map_err(|error| format!("{checkpoint}: {error}"))?;
            }
            Ok(())
        }
        _ => Err(format!("usage: megatron open STATE DIR..., not {args:?}").into()),
    }
}

/// Opens a checkpoint as offline jobs do, and compares every tensor, every object and the common
/// state with the description.
async fn open(description: &Description, checkpoint: &str) -> Result {
    let storage = crate::storage(checkpoint, Access::Read)?;
    let opened = MegatronCheckpoint::open(&storage, &OpenOptions::default()).await?;
    let mut common = opened.common().clone();
    let content = common.remove("content_metadata").ok_or("no content metadata")?;
    if !expected::matches(content.view(), description.content()) {
        return Err(format!("content metadata is {content:?}").into());
    }
    compare_common(&common, description.common(common.get("args").is_some()))?;
    let args = opened.args().ok_or("no arguments")?;
    if args.num_layers() != Some(description.layers()?) {
        return Err(format!("{:?} layers", args.num_layers()).into());
    }

    let source = opened.source();
    let metadata = source.metadata().await?;
    let mut tensors = description.list("tensors").map(Spec::new).collect::<Result<Vec<_>>>()?;
    for (number, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(stored) = entry.as_tensor() else {
            if &**fqn != COMMON_STATE {
                let at = ObjectKey::parse(fqn).ok_or_else(|| format!("what is {fqn}?"))?;
                let (wanted, found) = (description.object(&at)?, read_object(source, fqn).await?);
                let equal = matches!(found.view(), Value::List(only)
                    if matches!(&only[..], [value] if expected::matches(value.view(), &wanted)));
                if !equal {
                    return Err(format!("{fqn} is {found:?}, not {wanted}").into());
                }
            }
            continue;
        };
        let at = tensors.iter().position(|spec| spec.key == **fqn);
        let spec = tensors.swap_remove(at.ok_or_else(|| format!("{fqn} is not expected"))?);
        if stored.dtype != spec.dtype || *stored.shape != *spec.shape {
            return Err(format!("{fqn} is {} {}", stored.dtype, stored.shape).into());
        }
        let reader = TensorReader::new(Arc::clone(&source.reader), Arc::clone(&metadata), number)?;
        let bytes = reader.read(&[Region::full(spec.shape)?]).await?;
        if bytes != spec.whole {
            return Err(format!("{fqn} differs").into());
        }
    }
    if let Some(spec) = tensors.first() {
        return Err(format!("{} is not there", spec.key).into());
    }
    Ok(())
}
