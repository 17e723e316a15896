//! The Rust half of `cargo xtask interop`, which proves that PyTorch reads what we write and that
//! we read what it writes.
//!
//! Start it once per rank with `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set, as any
//! launcher does:
//!
//! - `load CHECKPOINT...` loads each into a layout of its own and compares it bit for bit with the
//!   `expected.safetensors` and `expected.json` beside it.
//! - `load-from URL FOLDER NAME...` does the same with checkpoints below a URL, and with what is
//!   expected of each in a folder.
//! - `save STATE.json CHECKPOINT plain|by-size|zstd SALT` saves tensors whose bytes follow from their
//!   name, and the objects of the file.
//! - `rewrite FROM TO` carries every object over without understanding it.
//! - `olmo FROM TO nested|flat` loads a checkpoint of OLMo-core and saves it in that layout.
//! - `megatron ...` opens, loads and saves checkpoints of Megatron-Core.
//! - `state-dict FOLDER` makes the state dicts of a model and an optimizer and compares them.
//! - `state-ranks FOLDER` compares what each rank holds of them, gathered, offloaded and broadcast.
//! - `hugging-face FROM TO` loads a model into shards and saves them and the whole tensors.
//! - `mesh FILE` compares the shards of layouts with those of DTensor.
//! - `resave FOLDER NAME...` reads each `NAME.pt` of `torch.save` and writes it in every form.

mod expected;
mod hugging_face;
mod layout;
#[cfg(feature = "megatron")]
mod megatron;
mod mesh;
#[cfg(feature = "olmo")]
mod olmo;
#[cfg(feature = "state")]
mod state_dict;
#[cfg(feature = "state")]
mod state_ranks;
mod torch_save;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dcp::collectives::TcpConfig;
use dcp::core::StorageReader;
use dcp::core::metadata::Entry;
use dcp::core::registry::Access;
use dcp::formats::dcp::{DcpReader, DcpWriter, FileLayout, Zstd};
use dcp::planner::set_at_path;
use dcp::{Checkpointer, Collective, DType, LoadMode, StateDict, Storage, Tensor, Value};
use expected::Contents;
use serde_json::Value as Json;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let group = TcpConfig::from_env()?.deadline(Duration::from_secs(60)).connect()?;
    let group: Arc<dyn Collective> = Arc::new(group);
    let work = async {
        match *args {
            ["load", ref checkpoints @ ..] => {
                for checkpoint in checkpoints {
                    let loaded = load(checkpoint, checkpoint, &group).await;
                    loaded.map_err(|e| format!("{checkpoint}: {e}"))?;
                }
                Ok(())
            }
            ["load-from", url, folder, ref names @ ..] => {
                for name in names {
                    let (from, expected) = (format!("{url}/{name}"), format!("{folder}/{name}"));
                    let loaded = load(&from, &expected, &group).await;
                    loaded.map_err(|e| format!("{from}: {e}"))?;
                }
                Ok(())
            }
            ["save", state, checkpoint, files, salt] => {
                save(state, checkpoint, files, salt.parse()?, &group).await
            }
            ["rewrite", from, to] => rewrite(from, to, &group).await,
            #[cfg(feature = "olmo")]
            ["olmo", from, to, layout] => olmo::resave(from, to, layout, &group).await,
            #[cfg(feature = "state")]
            ["state-dict", folder] => state_dict::run(folder, &group).await,
            #[cfg(feature = "state")]
            ["state-ranks", folder] => state_ranks::run(folder, &group).await,
            #[cfg(feature = "megatron")]
            ["megatron", ref args @ ..] => megatron::run(args, &group).await,
            ["hugging-face", from, to] => hugging_face::resave(from, to, &group).await,
            ["mesh", file] => mesh::run(file),
            ["resave", folder, ref names @ ..] => {
                for name in names {
                    for form in ["zip", "zip-2.1", "legacy"] {
                        let (old, new) = (format!("{name}.pt"), format!("{name}.{form}.pt"));
                        let done = torch_save::resave(folder, &old, &new, form, &group).await;
                        done.map_err(|error| format!("{new}: {error}"))?;
                    }
                }
                Ok(())
            }
            _ => Err("usage: load DIR... | load-from URL DIR NAME... | save STATE DIR plain|by-size|zstd SALT | rewrite DIR DIR | \
                     resave FOLDER NAME..."
                .into()),
        }
    };
    dcp::block_on(work)?
}

async fn storage(path: &str, access: Access) -> Result<Arc<dyn Storage>> {
    Ok(dcp::default_storages().open(path, access).await?)
}

async fn load(checkpoint: &str, expected: &str, group: &Arc<dyn Collective>) -> Result {
    let expected = Contents::read(Path::new(expected))?;
    let reader = DcpReader::new(storage(checkpoint, Access::Read).await?);

    let metadata = reader.metadata().await?;
    let mut state = StateDict::new();
    for (number, (fqn, entry)) in metadata.iter().enumerate() {
        let target = match entry {
            Entry::Tensor(tensor) => {
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                let (rank, world) = (group.rank(), group.world_size());
                Value::from(match layout::any(number, &shape, rank, world)? {
                    None => Tensor::zeros(dtype, shape)?,
                    Some(regions) => Tensor::zeros_sharded(dtype, shape, regions)?,
                })
            }
            _ => Value::from("untouched"),
        };
        state.insert(Arc::clone(fqn), target);
    }

    let checkpointer = Checkpointer::in_group(Arc::clone(group));
    checkpointer.load(&mut state, checkpoint).mode(LoadMode::Exact).await?;
    expected.compare(&state)
}

async fn save(
    state: &str,
    checkpoint: &str,
    files: &str,
    salt: u32,
    group: &Arc<dyn Collective>,
) -> Result {
    let spec: Json = serde_json::from_slice(&std::fs::read(state)?)?;
    let list = |name: &str| spec.get(name).and_then(Json::as_array).cloned().unwrap_or_default();
    let mut state = StateDict::new();
    for tensor in list("tensors") {
        let value = tensor_of(&tensor, salt, group.rank(), group.world_size())?;
        set_at_path(&mut state, &expected::path(&tensor)?, value.into())?;
    }
    for object in list("objects") {
        let value = expected::value_of(object.get("value").unwrap_or(&Json::Null))?;
        set_at_path(&mut state, &expected::path(&object)?, value)?;
    }
    let (layout, zstd) = match files {
        "plain" => (FileLayout::default(), None),
        "by-size" => (FileLayout::SplitBySize(NonZeroUsize::MIN.saturating_add(2)), None),
        "zstd" => (FileLayout::default(), Some(Zstd::new())),
        other => return Err(format!("unknown way to save: {other}").into()),
    };
    Checkpointer::in_group(Arc::clone(group))
        .writer(move |storage| DcpWriter::builder(storage).files(layout).zstd(zstd).build())
        .save(&state, checkpoint)
        .await?;
    Ok(())
}

/// This rank's part of a tensor whose bytes follow from its name.
fn tensor_of(spec: &Json, salt: u32, rank: u32, world: u32) -> Result<Tensor> {
    let shape = expected::numbers(Some(spec), "shape")?;
    let fqn = expected::text(spec, "fqn")?;
    let dtype: DType = expected::text(spec, "dtype")?.parse()?;
    let whole = formula(fqn, dtype, &shape, salt);
    Ok(match layout::by_name(expected::text(spec, "layout")?, &shape, rank, world)? {
        None => Tensor::replicated(dtype, shape, whole)?,
        Some(regions) => layout::cut(dtype, &shape, &whole, regions)?,
    })
}

/// The bytes of a tensor, in row-major order, which follow from its name.
fn formula(fqn: &str, dtype: DType, shape: &[u64], salt: u32) -> Vec<u8> {
    let count: u64 = shape.iter().product::<u64>() * dtype.size() as u64;
    let start = crc32(fqn.as_bytes()).wrapping_add(salt);
    (0..count)
        .map(|index| {
            let byte = (u64::from(start) + 31 * index + index / 251) as u8;
            if dtype == DType::Bool { byte & 1 } else { byte }
        })
        .collect()
}

/// CRC-32 as zlib computes it: what both halves derive a tensor's contents from.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    })
}

async fn rewrite(from: &str, to: &str, group: &Arc<dyn Collective>) -> Result {
    let reader = DcpReader::new(storage(from, Access::Read).await?);
    let metadata = reader.metadata().await?;
    let mut state = StateDict::new();
    for (fqn, entry) in metadata.iter() {
        let target = match entry {
            Entry::Tensor(tensor) => Tensor::zeros(tensor.dtype, tensor.shape.clone())?.into(),
            _ => Value::from("untouched"),
        };
        state.insert(Arc::clone(fqn), target);
    }
    let checkpointer = Checkpointer::in_group(Arc::clone(group));
    checkpointer.load(&mut state, from).await?;
    checkpointer.save(&state, to).await?;
    Ok(())
}
