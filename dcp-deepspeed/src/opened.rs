//! Opens every file of a checkpoint, and compares what they say of the save.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::format::Folder;
use dcp_core::{CheckpointError, Storage};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use indexmap::IndexMap;

use crate::error::{bad, bad_file};
use crate::file_name::{OPTIMIZER_STATE, UNIVERSAL};
use crate::file_set::FileSet;
use crate::model_states::ModelStates;
use crate::optimizer;
use crate::parameter::Masters;
use crate::rank_file::{RankFile, as_strs};
use crate::rank_optimizer::RankOptimizer;
use crate::rounding;
use crate::universal::{self, ValueFiles};

/// Files that are opened at once.
const AT_ONCE: usize = 8;
/// The most files of a checkpoint.
const FILES_MAX: usize = 1 << 20;

/// The files of a checkpoint and what they hold.
#[derive(Debug)]
pub(crate) struct OpenedFiles {
    pub(crate) files: Vec<RankFile>,
    pub(crate) models: Vec<ModelStates>,
    pub(crate) masters: Masters,
    /// Files of experts, of layers with their numbers, and of optimizers without ZeRO, by position.
    pub(crate) experts: Vec<usize>,
    pub(crate) layers: Vec<(u64, usize)>,
    pub(crate) expert_optimizers: Vec<(u64, usize)>,
    /// Data-parallel ranks of the optimizer.
    pub(crate) ranks: usize,
    pub(crate) mp_ranks: usize,
    pub(crate) is_universal: bool,
    pub(crate) is_stage3: bool,
}

/// Collects the names of files and opens them together.
#[derive(Default)]
struct Names(Vec<String>);

impl Names {
    fn add(&mut self, name: &str) -> usize {
        self.0.push(name.to_owned());
        self.0.len() - 1
    }
}

impl OpenedFiles {
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        folder: &Folder<'_>,
    ) -> Result<Self, CheckpointError> {
        let set = FileSet::of(folder);
        if let Some(problem) = set.problem() {
            return Err(bad(problem));
        }
        let mut names = Names::default();
        let models: Vec<(u64, usize)> =
            set.models.iter().map(|((mp, _), name)| (*mp, names.add(name))).collect();
        let optimizers: Vec<(u64, usize)> =
            set.optimizers.iter().map(|((mp, _), name)| (*mp, names.add(name))).collect();
        let expert_optimizers: Vec<_> = set
            .expert_optimizers
            .iter()
            .map(|((_, rank), name)| (*rank, names.add(name)))
            .collect();
        let experts: Vec<_> = set.experts.values().map(|name| names.add(name)).collect();
        if set.layers.keys().any(|(_, tp)| tp.is_some()) {
            return Err(bad(TENSOR_PARALLEL));
        }
        let layers: Vec<_> =
            set.layers.iter().map(|((layer, _), name)| (*layer, names.add(name))).collect();
        let (folders, settings) = match set.universal {
            true => universal_files(folder, &mut names),
            false => (BTreeMap::new(), None),
        };
        if names.0.len() > FILES_MAX {
            return Err(bad(format!("it has {} files, too many", names.0.len())));
        }
        let opened = names.0.into_iter().map(|name| RankFile::open(storage, name));
        let files: Vec<RankFile> = stream::iter(opened).buffered(AT_ONCE).try_collect().await?;
        let mut opened = Self {
            models: Vec::new(),
            masters: Masters::default(),
            experts,
            layers,
            expert_optimizers,
            ranks: optimizers.iter().filter(|(mp, _)| *mp == 0).count(),
            mp_ranks: set.mp_ranks().len(),
            is_universal: set.universal,
            is_stage3: set.is_stage3(),
            files,
        };
        for (_, part) in &models {
            let file = opened.file(*part)?;
            opened.models.push(ModelStates::read(*part, file).await?);
        }
        opened.same_save()?;
        if set.universal {
            opened.masters = universal::masters(&folders, &opened.models, &opened.files)?;
            if let Some(part) = settings {
                opened.universal_settings(part);
            }
            opened.refuse_wrong_masters(WRONG_UNIVERSAL).await?;
            return Ok(opened);
        }
        for mp in set.mp_ranks() {
            let mut ranks = Vec::new();
            for (_, part) in optimizers.iter().filter(|(of, _)| *of == mp) {
                ranks.push(RankOptimizer::read(*part, opened.file(*part)?).await?);
            }
            let first = models.iter().position(|(of, _)| *of == mp);
            let Some(model) = first.and_then(|first| opened.models.get(first)) else { continue };
            if ranks.is_empty() {
                if model.groups.is_some() && opened.expert_optimizers.is_empty() {
                    let problem = format!(
                        "it is of ZeRO, and there is no zero_pp_rank_0_mp_rank_{mp:02}_optim_states.pt: the save \
                         did not finish, or not all files are here"
                    );
                    return Err(bad_file(&model.name, problem));
                }
                continue;
            }
            if set.is_stage3() {
                let count = models.iter().filter(|(of, _)| *of == mp).count();
                if count != ranks.len() {
                    return Err(bad(format!(
                        "there are {count} files of models and {} of optimizers",
                        ranks.len()
                    )));
                }
            }
            opened.same_steps(&ranks).await?;
            let mut found = optimizer::masters(model, &ranks, &opened.files)?;
            optimizer::join_groups(&mut opened.masters.groups, std::mem::take(&mut found.groups));
            opened.masters.loss_scaler = opened.masters.loss_scaler.or(found.loss_scaler);
            for (name, parameter) in found.parameters {
                // Tied layers are in every stage of a pipeline that uses them.
                opened.masters.parameters.entry(name).or_insert(parameter);
            }
        }
        opened.all_layers()?;
        opened.all_experts()?;
        Ok(opened)
    }

    pub(crate) fn file(&self, part: usize) -> Result<&RankFile, CheckpointError> {
        self.files.get(part).ok_or_else(|| bad("a file was not opened"))
    }

    /// Refuses files of different steps and versions, and slices of tensor parallelism.
    fn same_save(&self) -> Result<(), CheckpointError> {
        let Some(first) = self.models.first() else { return Ok(()) };
        for model in &self.models {
            if model.global_steps != first.global_steps || model.version != first.version {
                let show = |model: &ModelStates| {
                    let steps =
                        model.global_steps.map_or("no step".to_owned(), |n| format!("step {n}"));
                    format!(
                        "{steps} of DeepSpeed {}",
                        model.version.as_deref().unwrap_or("of no version")
                    )
                };
                let (own, of, name) = (show(model), show(first), &first.name);
                let problem = format!(
                    "it is of {own}, and {name:?} of {of}: the files are of different saves"
                );
                return Err(bad_file(&model.name, problem));
            }
            if model.groups.as_ref().map(Vec::len) != first.groups.as_ref().map(Vec::len)
                && self.is_stage3
            {
                let problem = format!("its param_shapes are not those of {:?}", first.name);
                return Err(bad_file(&model.name, problem));
            }
        }
        match self.mp_ranks > 1 && self.models.iter().any(|model| model.module.is_some()) {
            true => Err(bad(TENSOR_PARALLEL)),
            false => Ok(()),
        }
    }

    /// Refuses files of optimizers that counted different steps.
    async fn same_steps(&self, ranks: &[RankOptimizer]) -> Result<(), CheckpointError> {
        const STEP: &str = "step";
        let mut first: BTreeMap<u64, (Vec<u8>, &str)> = BTreeMap::new();
        for rank in ranks {
            let file = self.file(rank.part)?;
            for (group, states) in &rank.states {
                let Some(entry) = states.get(STEP).filter(|entry| file.tensor(**entry).is_some())
                else {
                    continue;
                };
                let step = file.first_elements(*entry, 1).await?;
                let (known, of) = first.entry(*group).or_insert_with(|| (step.clone(), &rank.name));
                if *known != step {
                    let problem = format!(
                        "its optimizer has counted other steps than that of {of:?}: the files are of different saves"
                    );
                    return Err(bad_file(&rank.name, problem));
                }
            }
        }
        Ok(())
    }

    /// Refuses a pipeline of which the file of a layer is missing.
    fn all_layers(&self) -> Result<(), CheckpointError> {
        if self.layers.is_empty() {
            return match self.models.iter().all(|model| model.module.is_none()) {
                true => Err(bad(
                    "there are neither weights in the model states nor files of layers (layer_NN-model_states.pt)",
                )),
                false => Ok(()),
            };
        }
        for name in self.masters.parameters.keys() {
            let layer = name.split('.').next().and_then(|layer| layer.parse::<u64>().ok());
            let Some(layer) = layer else { continue };
            if !self.layers.iter().any(|(known, _)| *known == layer) {
                return Err(bad(format!(
                    "layer_{layer:02}-model_states.pt is missing, the layer of {name:?}"
                )));
            }
        }
        Ok(())
    }

    /// Refuses experts that are fewer than the model states count.
    fn all_experts(&self) -> Result<(), CheckpointError> {
        let Some(counts) = self.models.first().and_then(|model| model.experts.as_ref()) else {
            return Ok(());
        };
        let said: u64 = counts.iter().fold(0, |sum, count| sum.saturating_add(*count));
        let found = self.experts.len() as u64;
        match said == found || counts.iter().all(|count| *count <= 1) {
            true => Ok(()),
            false => Err(bad(format!(
                "the model states count {said} experts, and there are files of {found}: files layer_L_expert_E are missing"
            ))),
        }
    }

    /// The settings of the optimizer of a universal folder.
    fn universal_settings(&mut self, part: usize) {
        let Some(file) = self.files.get(part) else { return };
        // Of stage 3 the file has the groups twice: those of the optimizer, and in what is left of a rank's file.
        let mut settings: IndexMap<Vec<String>, usize> = IndexMap::new();
        for (at, steps, _) in file.entries() {
            let steps = as_strs(&steps);
            if let Some(begin) = steps.iter().position(|step| *step == "param_groups") {
                let below = steps.iter().skip(begin + 1).map(ToString::to_string);
                settings.entry(below.collect()).or_insert(at);
            }
        }
        let settings = settings.into_iter().map(|(steps, at)| (steps, part, at)).collect();
        self.masters.groups.settings = settings;
    }

    /// The weights that the model computes with, of a parameter.
    pub(crate) fn rounded(&self, name: &str) -> Option<(usize, usize)> {
        let of = |model: &ModelStates| Some((model.part, *model.module.as_ref()?.get(name)?));
        self.models.iter().find_map(of)
    }

    async fn refuse_wrong_masters(&self, why: &str) -> Result<(), CheckpointError> {
        let rounded = |name: &str| self.rounded(name);
        let wrong = rounding::first_difference(&self.masters, &self.files, rounded).await?;
        wrong.map_or(Ok(()), |name| {
            Err(bad(format!("the float32 weights of {name:?} are not those that its model was trained with: {why}")))
        })
    }
}

/// The reason of wrong master weights in a universal folder.
const WRONG_UNIVERSAL: &str = "ds_to_universal of a run with round_robin_gradients writes the weights and the \
     optimizer's state of other parameters; read the folder that it was made of";
/// The reason to refuse slices.
const TENSOR_PARALLEL: &str = "its ranks hold slices of tensors (tensor parallelism), which are not joined; convert it \
     with DeepSpeed's ds_to_universal and read the result";

/// Adds the files of parameters, by parameter, and that of the settings.
fn universal_files(
    folder: &Folder<'_>,
    names: &mut Names,
) -> (BTreeMap<String, ValueFiles>, Option<usize>) {
    let mut folders = BTreeMap::new();
    let Some(zero) = folder.folder(UNIVERSAL) else { return (folders, None) };
    for below in zero.folders() {
        let mut of = ValueFiles::new();
        for (file, _) in below.files().filter(|(file, _)| file.ends_with(".pt")) {
            of.insert(file.to_owned(), names.add(&format!("{UNIVERSAL}/{}/{file}", below.name())));
        }
        folders.insert(below.name().to_owned(), of);
    }
    let settings = zero.has(OPTIMIZER_STATE);
    let settings = settings.then(|| names.add(&format!("{UNIVERSAL}/{OPTIMIZER_STATE}")));
    (folders, settings)
}
