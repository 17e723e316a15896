//! What a trainer would do with Megatron-Core's checkpoints: describe its part of the state for
//! any parallel layout, save it, load it. `xtask/interop/python/interop_megatron.py` builds the same from
//! the same description.

mod compare;
mod description;
mod part;

use std::sync::Arc;

use compare::{compare, compare_common};
use dcp::core::registry::Access;
use dcp::jobs::read::{TensorReader, read_object};
use dcp::megatron::disk::COMMON_STATE;
use dcp::megatron::parallel::{ParallelReader, ParallelSave};
use dcp::megatron::sharded::ObjectKey;
use dcp::megatron::{
    MegatronCheckpoint, MegatronForm, MegatronLoadOptions, MegatronOpenOptions,
    MegatronSaveOptions, StrictHandling, load, save,
};
use dcp::{Collective, Region, Value};
use description::{Description, Spec};
use part::Place;

use crate::{Result, expected, storage};

/// These objects exist once per rank or model-parallel rank, so other layouts cannot request them.
const TIED_TO_RANKS: [&str; 2] = ["rerun_state_machine_state", "rng_state"];

const USAGE: &str = "usage: megatron open STATE DIR... | load STATE LAYOUT DIR=SAVED... | \
                     save STATE LAYOUT FORM DIR";

/// One of the subcommands. A layout is TP by PP, such as `2x4`; with `SAVED`, the number of ranks
/// follows. Where the layout is `1x1`, all ranks are replicas, and share the work. `FORM` is
/// `file` or `inside`, where the common state goes.
pub(crate) async fn run(args: &[&str], group: &Arc<dyn Collective>) -> Result {
    match *args {
        ["open", state, ref checkpoints @ ..] => {
            let description = Description::read(state)?;
            for checkpoint in checkpoints {
                let opened = open(&description, checkpoint).await;
                opened.map_err(|error| format!("{checkpoint}: {error}"))?;
            }
            Ok(())
        }
        ["load", state, layout, ref checkpoints @ ..] => {
            let job = Job::new(state, layout, group)?;
            for checkpoint in checkpoints {
                let (path, saved) = checkpoint.split_once('=').ok_or(USAGE)?;
                let tied = saved == format!("{layout}x{}", group.world_size());
                let loaded = job.load(path, tied).await;
                loaded.map_err(|error| format!("{checkpoint} as {}: {error}", job.place))?;
            }
            Ok(())
        }
        ["save", state, layout, form, to] => Job::new(state, layout, group)?.save(form, to).await,
        _ => Err(USAGE.into()),
    }
}

/// A trainer's rank: its group and layout.
struct Job {
    description: Description,
    place: Place,
    group: Arc<dyn Collective>,
}

impl Job {
    fn new(state: &str, layout: &str, group: &Arc<dyn Collective>) -> Result<Self> {
        let description = Description::read(state)?;
        let place = Place::new(layout, group.rank(), group.world_size())?;
        Ok(Self { description, place, group: Arc::clone(group) })
    }

    /// Loads strictly into this layout, and compares.
    async fn load(&self, from: &str, tied: bool) -> Result {
        let part = self.description.part(self.place, false, tied)?;
        let options = MegatronLoadOptions::new().group(Arc::clone(&self.group));
        let mut options = options.strict(StrictHandling::ReturnAll);
        if self.place.is_replicated() {
            let group = Arc::clone(&self.group);
            options = options
                .reader(move |inner| Arc::new(ParallelReader::new(inner, Arc::clone(&group))));
        }
        let storage = storage(from, Access::Read).await?;
        let loaded = load(&part.state, &storage, &options).await?;
        let missing: Vec<String> =
            loaded.missing.into_iter().flatten().map(|key| key.to_string()).collect();
        let wanted: &[&str] = if tied { &[] } else { &TIED_TO_RANKS };
        if missing != wanted || loaded.unexpected.is_none_or(|keys| !keys.is_empty()) {
            return Err(format!("the keys differ: {missing:?} are missing").into());
        }
        let mut common = compare(&loaded.state, &part.wanted)?;
        let content = common.remove("content_metadata").ok_or("no content metadata")?;
        if !expected::matches(content.view(), self.description.content()) {
            return Err(format!("content metadata is {content:?}").into());
        }
        let whole = common.get("random").is_some();
        compare_common(&common, self.description.common(whole))
    }

    async fn save(&self, form_name: &str, to: &str) -> Result {
        let mut part = self.description.part(self.place, true, true)?;
        part.merge(&self.description.made()?)?;
        let options =
            MegatronSaveOptions::new().group(Arc::clone(&self.group)).form(form(form_name)?);
        let options = options.content_metadata(self.description.content_to_save()?);
        let options = if self.place.is_replicated() {
            options.distribution(Arc::new(ParallelSave::new(Arc::clone(&self.group))))
        } else {
            options
        };
        save(&part.state, &storage(to, Access::Write).await?, &options).await?;
        Ok(())
    }
}

fn form(name: &str) -> Result<MegatronForm> {
    match name {
        "file" => Ok(MegatronForm::CommonFile),
        "inside" => Ok(MegatronForm::CommonInside),
        other => Err(format!("unknown form {other}").into()),
    }
}

/// Opens a checkpoint as offline jobs do, and compares every tensor, every object and the common
/// state with the description.
async fn open(description: &Description, checkpoint: &str) -> Result {
    let storage = storage(checkpoint, Access::Read).await?;
    let opened = MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default()).await?;
    let mut common = opened.common().clone();
    let content = common.remove("content_metadata").ok_or("no content metadata")?;
    if !expected::matches(content.view(), description.content()) {
        return Err(format!("content metadata is {content:?}").into());
    }
    compare_common(&common, description.common(true))?;
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
