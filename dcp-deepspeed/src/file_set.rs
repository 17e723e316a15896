//! The files of a checkpoint, and what their names say of its completeness.
//!
//! DeepSpeed writes every file under its last name, in no order, and marks no save as finished: `latest` is
//! written by rank 0 as soon as its own files are. So the set of files is the only sign. Ranks count from 0, so a
//! gap is a file that is missing; that the last ranks are missing only the files themselves say.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::format::Folder;

use crate::file_name::{FP32, FileName, UNIVERSAL};

/// The files of a folder by their kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileSet {
    /// By model-parallel rank, and of stage 3 by data-parallel rank.
    pub(crate) models: BTreeMap<(u64, Option<u64>), String>,
    pub(crate) optimizers: BTreeMap<(u64, u64), String>,
    pub(crate) expert_optimizers: BTreeMap<(u64, u64), String>,
    pub(crate) experts: BTreeMap<(u64, u64, u64), String>,
    pub(crate) layers: BTreeMap<(u64, Option<u64>), String>,
    /// Names with numbers that no rank has, and second files of one rank.
    absurd: Vec<String>,
    /// Whether the folder is a universal one.
    pub(crate) universal: bool,
}

impl FileSet {
    /// The files of a folder.
    pub(crate) fn of(folder: &Folder<'_>) -> Self {
        let mut files = Self::default();
        for (name, _) in folder.files() {
            let owned = name.to_owned();
            let twice = match FileName::parse(name) {
                None => continue,
                Some(FileName::Model { mp, dp }) => files.models.insert((mp, dp), owned),
                Some(FileName::Optimizer { mp, dp }) => files.optimizers.insert((mp, dp), owned),
                Some(FileName::ExpertOptimizer { mp, rank }) => {
                    files.expert_optimizers.insert((mp, rank), owned)
                }
                Some(FileName::Expert { layer, expert, mp }) => {
                    files.experts.insert((layer, expert, mp), owned)
                }
                Some(FileName::Layer { layer, tp }) => files.layers.insert((layer, tp), owned),
                Some(FileName::Absurd) => Some(owned),
            };
            files.absurd.extend(twice);
        }
        files.universal = folder
            .folder(UNIVERSAL)
            .is_some_and(|zero| zero.folders().any(|below| below.has(FP32)));
        files
    }

    /// Whether there is a file of DeepSpeed.
    pub(crate) fn is_any(&self) -> bool {
        let ranks = self.models.len() + self.optimizers.len() + self.expert_optimizers.len();
        self.universal || ranks + self.experts.len() + self.absurd.len() > 0
    }

    /// Model-parallel ranks of which there is a file.
    pub(crate) fn mp_ranks(&self) -> BTreeSet<u64> {
        let models = self.models.keys().map(|(mp, _)| *mp);
        models.chain(self.optimizers.keys().map(|(mp, _)| *mp)).collect()
    }

    /// Whether the model states are of every data-parallel rank, as those of stage 3 are.
    pub(crate) fn is_stage3(&self) -> bool {
        self.models.keys().any(|(_, dp)| dp.is_some())
    }

    /// The first thing that the names contradict, or promise and lack.
    pub(crate) fn problem(&self) -> Option<String> {
        if let Some(name) = self.absurd.first() {
            return Some(format!("no rank writes {name:?}, or another file is of the same rank"));
        }
        if self.models.is_empty() {
            return Some("there is no *_model_states.pt of a rank".to_owned());
        }
        let ranks = self.mp_ranks();
        for (expected, mp) in (0..).zip(&ranks) {
            if *mp != expected {
                return Some(format!("there is no file of mp_rank_{expected:02}"));
            }
        }
        if self.is_stage3() && self.models.keys().any(|(_, dp)| dp.is_none()) {
            return Some(
                "there are model states of stage 3 and of another stage: two saves are mixed"
                    .to_owned(),
            );
        }
        for mp in ranks {
            let models: BTreeSet<u64> =
                self.models.keys().filter(|(of, _)| *of == mp).filter_map(|(_, dp)| *dp).collect();
            let optimizers: BTreeSet<u64> =
                self.optimizers.keys().filter(|(of, _)| *of == mp).map(|(_, dp)| *dp).collect();
            if let Some(dp) = gap(&optimizers) {
                return Some(format!(
                    "zero_pp_rank_{dp}_mp_rank_{mp:02}_optim_states.pt is missing"
                ));
            }
            if self.is_stage3() {
                let other = if self.universal { models.clone() } else { &models | &optimizers };
                if let Some(dp) = gap(&models).or_else(|| other.difference(&models).next().copied())
                {
                    return Some(format!(
                        "zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt is missing"
                    ));
                }
                if let Some(dp) = other.difference(&optimizers).next().filter(|_| !self.universal) {
                    return Some(format!(
                        "zero_pp_rank_{dp}_mp_rank_{mp:02}_optim_states.pt is missing"
                    ));
                }
            } else if !self.models.contains_key(&(mp, None)) {
                return Some(format!("mp_rank_{mp:02}_model_states.pt is missing"));
            }
        }
        let expp: BTreeSet<u64> = self.expert_optimizers.keys().map(|(_, rank)| *rank).collect();
        if let Some(rank) = gap(&expp) {
            return Some(format!("expp_rank_{rank}_mp_rank_00_optim_states.pt is missing"));
        }
        let layers: BTreeSet<u64> = self.experts.keys().map(|(layer, ..)| *layer).collect();
        if let Some(layer) = gap(&layers) {
            return Some(format!("the files of the experts of layer {layer} are missing"));
        }
        for layer in layers {
            let of =
                self.experts.keys().filter(|(l, ..)| *l == layer).map(|(_, expert, _)| *expert);
            if let Some(expert) = gap(&of.collect()) {
                return Some(format!(
                    "layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt is missing"
                ));
            }
        }
        None
    }

    /// Whether a file is one of these.
    pub(crate) fn has(name: &str) -> bool {
        FileName::parse(name).is_some()
    }
}

/// The first number that is missing below the highest one.
fn gap(numbers: &BTreeSet<u64>) -> Option<u64> {
    (0..).zip(numbers).find(|(expected, number)| expected != *number).map(|(absent, _)| absent)
}

#[cfg(test)]
mod tests {
    use dcp_core::Key;
    use dcp_core::format::Listing;
    use dcp_core::storage::ObjectMeta;

    use super::*;

    fn problem(names: &[&str]) -> Option<String> {
        let key = |name: &&str| Key::new(*name).unwrap();
        let listing = Listing::new(names.iter().map(|name| ObjectMeta::new(key(name), 1)));
        FileSet::of(&listing.root()).problem()
    }

    #[test]
    fn names_promise_others() {
        let model = "mp_rank_00_model_states.pt";
        let optimizer = |rank: u32| format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        let (first, second, last) = (optimizer(0), optimizer(1), optimizer(2));
        assert_eq!(problem(&[model, &first, &second, &last]), None);
        assert!(problem(&[model, &first, &last]).unwrap().contains(&*second));
        assert!(problem(&[&first, &second]).unwrap().contains("model_states"));
        assert!(problem(&["mp_rank_01_model_states.pt"]).unwrap().contains("mp_rank_00"));
        let third = |rank: u32| format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
        assert_eq!(problem(&[&third(0), &third(1), &first, &second]), None);
        assert!(
            problem(&[&third(0), &first, &second]).unwrap().contains("rank_1_mp_rank_00_model")
        );
        assert!(
            problem(&[&third(0), &third(1), &first]).unwrap().contains("rank_1_mp_rank_00_optim")
        );
        assert!(problem(&[&third(0), model, &first]).unwrap().contains("mixed"));
        let bf16 = format!("bf16_{first}");
        assert!(problem(&[model, &first, &bf16]).unwrap().contains("same rank"));
        let huge = "zero_pp_rank_18446744073709551615_mp_rank_00_optim_states.pt";
        assert!(problem(&[model, &first, huge]).unwrap().contains("no rank writes"));
        let expert = |n: u32| format!("layer_0_expert_{n}_mp_rank_00_model_states.pt");
        assert!(problem(&[model, &expert(0), &expert(2)]).unwrap().contains("expert_1"));
    }
}
