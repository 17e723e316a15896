//! Presents the files of ranks as one state dict of whole tensors.
//!
//! `model` has the master weights under the names of the model, and where there are none what the model states or
//! the files of layers and experts have: buffers, frozen parameters, training without ZeRO. `optimizer` has the
//! state by name, as PyTorch's `get_optimizer_state_dict` does. `trainer_state` has the rest of the model states.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointError, Dims, Value};
use dcp_jobs::view::{Assembled, AssembledBuilder};
use dcp_jobs::{JobOptions, Source};
use indexmap::IndexMap;

use crate::error::{bad, of_job};
use crate::flat::pieces;
use crate::model_states::ModelStates;
use crate::opened::OpenedFiles;
use crate::parameter::{Parameter, State};
use crate::rank_file::as_strs;
use crate::zero3;

/// The roots of the state dict.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const TRAINER: &str = "trainer_state";

/// Builds the state dict.
pub(crate) async fn assemble(
    opened: &OpenedFiles,
) -> Result<(Source, Vec<String>), CheckpointError> {
    let sources: Vec<Source> = opened.files.iter().map(|file| file.source.clone()).collect();
    let view = Assembled::builder(&sources, &JobOptions::default()).await.map_err(of_job)?;
    let mut state = StateDict { opened, view, names: HashSet::new(), notes: Vec::new() };
    state.view.format("deepspeed");
    state.model()?;
    state.optimizer()?;
    state.groups()?;
    state.plain_optimizers()?;
    state.trainer().await?;
    let source = state.view.finish().map_err(of_job)?;
    Ok((source, state.notes))
}

struct StateDict<'o> {
    opened: &'o OpenedFiles,
    view: AssembledBuilder,
    /// Names of the model that were added.
    names: HashSet<Arc<str>>,
    notes: Vec<String>,
}

fn path<'a>(steps: impl IntoIterator<Item = &'a str>) -> Vec<PathItem> {
    steps.into_iter().map(|step| PathItem::Key(step.into())).collect()
}

impl StateDict<'_> {
    /// Adds an entry of a file under another path.
    fn pass(
        &mut self,
        path: Vec<PathItem>,
        part: usize,
        entry: usize,
    ) -> Result<(), CheckpointError> {
        let name = PathItem::flat_name(&path);
        let path: StatePath = path.into();
        self.view.pass(name, Some(path), part, entry).map_err(of_job)
    }

    /// Adds a tensor, wherever its elements are.
    fn tensor(
        &mut self,
        path: Vec<PathItem>,
        shape: &Dims,
        state: &State,
    ) -> Result<(), CheckpointError> {
        let runs = match state {
            State::Entry { part, entry } => return self.pass(path, *part, *entry),
            State::Elements(runs) => runs,
        };
        let name = PathItem::flat_name(&path);
        let first = runs.first().and_then(|run| self.opened.files.get(run.part)?.tensor(run.entry));
        let dtype = first.map_or(dcp_core::DType::Float32, |tensor| tensor.dtype);
        let pieces = pieces(shape, runs);
        let pieces = pieces
            .ok_or_else(|| bad(format!("{name:?} has other elements than its shape {shape}")))?;
        self.view.tensor(name, Some(path.into()), dtype, shape.clone(), pieces).map_err(of_job)
    }

    fn weights(&mut self, name: &str, parameter: &Parameter) -> Result<(), CheckpointError> {
        if !self.names.insert(name.into()) {
            return Ok(());
        }
        self.tensor(path([MODEL, name]), &parameter.shape, &parameter.weights)
    }

    fn stored(&mut self, name: &str, part: usize, entry: usize) -> Result<(), CheckpointError> {
        if !self.names.insert(name.into()) {
            return Ok(());
        }
        self.pass(path([MODEL, name]), part, entry)
    }

    fn model(&mut self) -> Result<(), CheckpointError> {
        let opened = self.opened;
        let masters = &opened.masters.parameters;
        let of_all: Vec<&ModelStates> = opened.models.iter().collect();
        let frozen = match opened.is_stage3 {
            true => zero3::frozen(&of_all, &opened.files)?,
            false => IndexMap::new(),
        };
        let shared: IndexMap<&Arc<str>, &Arc<str>> =
            opened.models.iter().flat_map(|model| &model.shared).collect();
        let find = |name: &str| {
            let name = shared.get(&Arc::from(name)).map_or(name, |stored| &***stored);
            masters.get(name).or_else(|| frozen.get(name))
        };
        // Of stage 3, every rank's file has the names.
        let models = opened.models.iter().take(if opened.is_stage3 { 1 } else { usize::MAX });
        let mut left_out = 0_usize;
        for model in models.clone() {
            for (name, entry) in model.module.iter().flatten() {
                let is_empty = || {
                    let tensor = opened.files.get(model.part).and_then(|file| file.tensor(*entry));
                    tensor.is_some_and(|tensor| tensor.shape.checked_volume() == Some(0))
                };
                match find(name) {
                    Some(parameter) => self.weights(name, parameter)?,
                    None if opened.is_stage3 && !model.buffers.contains(name) && is_empty() => {
                        left_out += 1;
                    }
                    None => self.stored(name, model.part, *entry)?,
                }
            }
        }
        if left_out > 0 {
            self.notes.push(format!(
                "{left_out} frozen parameters are in none of the files: the save excluded them"
            ));
        }
        self.layers()?;
        for part in &opened.experts {
            for (entry, steps, _) in opened.file(*part)?.entries() {
                let name = as_strs(&steps).join(".");
                match find(&name) {
                    Some(parameter) => self.weights(&name, parameter)?,
                    None => self.stored(&name, *part, entry)?,
                }
            }
        }
        for (name, parameter) in masters.iter().chain(&frozen) {
            self.weights(name, parameter)?;
        }
        for alias in shared.keys() {
            if let Some(parameter) = find(alias) {
                self.weights(alias, parameter)?;
            }
        }
        Ok(())
    }

    /// The layers of a pipeline: a file names what its layer calls it, the model puts the number of the layer before.
    /// The layer that others are tied to is stored as a layer and named as a tied module.
    fn layers(&mut self) -> Result<(), CheckpointError> {
        const TIED: &str = "tied_modules.";
        let opened = self.opened;
        let masters = &opened.masters.parameters;
        let tied: Vec<(&str, &str, &Parameter)> = masters
            .iter()
            .filter_map(|(name, of)| {
                let (_, own) = name.strip_prefix(TIED)?.split_once('.')?;
                Some((&**name, own, of))
            })
            .collect();
        for (layer, part) in &opened.layers {
            let file = opened.file(*part)?;
            for (entry, steps, found) in file.entries() {
                let own = as_strs(&steps).join(".");
                let name = format!("{layer}.{own}");
                let shape = found.as_tensor().map(|tensor| &tensor.shape);
                let is_tied = |(_, name, of): &&(&str, &str, &Parameter)| {
                    *name == own && shape == Some(&of.shape)
                };
                match masters.get(name.as_str()) {
                    Some(parameter) => self.weights(&name, parameter)?,
                    None => match tied.iter().find(is_tied) {
                        Some((tied, _, parameter)) => self.weights(tied, parameter)?,
                        None => self.stored(&name, *part, entry)?,
                    },
                }
            }
        }
        Ok(())
    }

    fn optimizer(&mut self) -> Result<(), CheckpointError> {
        let opened = self.opened;
        for (name, parameter) in &opened.masters.parameters {
            for (key, state) in &parameter.states {
                let path = path([OPTIMIZER, "state", name, key]);
                self.tensor(path, &parameter.shape, state)?;
            }
        }
        Ok(())
    }

    /// The groups of the optimizer: their settings, and the names of their parameters.
    fn groups(&mut self) -> Result<(), CheckpointError> {
        const GROUPS: &str = "param_groups";
        const PARAMS: &str = "params";
        let groups = &self.opened.masters.groups;
        let list = |group: u64, key: &str| {
            let mut path = path([OPTIMIZER, GROUPS]);
            path.extend([PathItem::Index(group), PathItem::Key(key.into())]);
            path
        };
        for (steps, part, entry) in &groups.settings {
            let [group, rest @ ..] = &**steps else { continue };
            let Ok(group) = group.parse() else { continue };
            match rest {
                [] => continue,
                [key, ..] if key == PARAMS => continue,
                rest => self.pass(list(group, &rest.join(".")), *part, *entry)?,
            }
        }
        for (group, names) in (0..).zip(&groups.names) {
            let path = list(group, PARAMS);
            let names = names.iter().map(|name| Value::Str(Arc::clone(name))).collect();
            let (fqn, path) = (PathItem::flat_name(&path), path.into());
            self.view.object(fqn, Some(path), Value::List(names)).map_err(of_job)?;
        }
        Ok(())
    }

    /// The optimizers of training without ZeRO, which name no parameters: as they are stored.
    fn plain_optimizers(&mut self) -> Result<(), CheckpointError> {
        let opened = self.opened;
        if !opened.masters.parameters.is_empty() {
            return Ok(());
        }
        let mut parts: Vec<(Option<String>, usize)> = Vec::new();
        for (rank, part) in &opened.expert_optimizers {
            parts.push((Some(format!("expp_rank_{rank}")), *part));
        }
        if parts.is_empty() {
            let with = opened.models.iter().filter(|model| model.has_optimizer);
            for (rank, model) in with.enumerate() {
                let rank = (opened.mp_ranks > 1).then(|| format!("mp_rank_{rank:02}"));
                parts.push((rank, model.part));
            }
        }
        if !parts.is_empty() {
            self.notes.push(
                "the optimizer's state is in lists that name no parameters, as training without ZeRO stores it; it \
                 is kept as it is"
                    .to_owned(),
            );
        }
        for (rank, part) in parts {
            let file = opened.file(part)?;
            for (entry, (_, found)) in file.metadata.iter().enumerate() {
                let Some([PathItem::Key(root), rest @ ..]) = found.path().map(|path| &**path)
                else {
                    continue;
                };
                if &**root != OPTIMIZER || rest.is_empty() {
                    continue;
                }
                let roots = std::iter::once(OPTIMIZER).chain(rank.as_deref());
                let mut path = path(roots);
                path.extend(rest.iter().cloned());
                self.pass(path, part, entry)?;
            }
        }
        Ok(())
    }

    /// All else that the first rank's model states have, and the scale of the loss.
    async fn trainer(&mut self) -> Result<(), CheckpointError> {
        const SCALER: &str = "loss_scaler";
        let opened = self.opened;
        let Some(model) = opened.models.first() else { return Ok(()) };
        let file = opened.file(model.part)?;
        for (entry, (fqn, found)) in file.metadata.iter().enumerate() {
            let own = [PathItem::Key(Arc::clone(fqn))];
            let own = found.path().map_or(&own[..], |path| path);
            match own.first() {
                Some(PathItem::Key(key)) if ModelStates::is_trainer_state(key) => {}
                _ => continue,
            }
            let mut path = path([TRAINER]);
            path.extend(own.iter().cloned());
            self.pass(path, model.part, entry)?;
        }
        let Some((part, at)) = opened.masters.loss_scaler else { return Ok(()) };
        let file = opened.file(part)?;
        let objects = file.objects(|steps| steps.last().is_some_and(|step| step == SCALER)).await?;
        let scaler = objects.into_iter().next().and_then(|(_, value)| value.attributes().cloned());
        let name = format!("{TRAINER}.{SCALER}");
        if let (Some(scaler), None, Some(_)) =
            (scaler, self.view.metadata().get(&name), file.metadata.at(at))
        {
            let path: StatePath = path([TRAINER, SCALER]).into();
            self.view.object(name, Some(path), Value::Dict(scaler)).map_err(of_job)?;
        }
        Ok(())
    }
}
