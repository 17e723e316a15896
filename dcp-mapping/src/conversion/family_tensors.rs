//! Compares the names of tensors with those that the family of a `config.json` has.
//!
//! Transformers ignores a tensor that a model has no place for, and initializes one that is missing with random
//! numbers, each with a warning at most. Families share most names, so that a configuration of another one may fit
//! all shapes.

use std::collections::{BTreeSet, HashSet};

use dcp_core::CheckpointMetadata;
use dcp_jobs::Error;
use serde_json::Value;

use super::job_error::contradiction;
use crate::mapping::{Layers, Mapping, Rule};
use crate::template::{Hole, Naming, Template};

/// Refuses tensors that the family has no place for and another family has.
pub(super) fn refuse_homeless(
    family: &Mapping,
    metadata: &CheckpointMetadata,
) -> Result<(), Error> {
    let families = Mapping::builtins()?;
    let names = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some());
    for (fqn, _) in names.filter(|(fqn, _)| !family.names_in_hf(fqn)) {
        // Below another prefix it may be of another part of the model.
        let is_of = |other: &&Mapping| {
            let rules = other.rules.iter().flat_map(|rule| &rule.hf);
            rules.into_iter().any(|form| numbers(other, form, fqn).next().is_some())
        };
        if let Some(other) = families.iter().find(is_of) {
            let problem = format!(
                "{fqn:?} is a tensor of {}, for which {} has no place",
                other.title(),
                family.title()
            );
            return Err(contradiction("model_type", &family.name().into(), &problem));
        }
    }
    Ok(())
}

/// Refuses a whole model that lacks a tensor which every model of the family has. Layers from `layers` on are those for
/// multi-token prediction.
pub(super) fn refuse_missing(
    family: &Mapping,
    config: &Value,
    metadata: &CheckpointMetadata,
    layers: u64,
) -> Result<(), Error> {
    let found = Found::of(family, metadata);
    let all: BTreeSet<u64> = found.layers().filter(|layer| *layer < layers).collect();
    let with_experts: BTreeSet<u64> =
        all.iter().copied().filter(|layer| found.has_experts(*layer)).collect();
    for (at, rule) in family.rules.iter().enumerate().filter(|(_, rule)| is_required(rule)) {
        let missing = if rule.hf.iter().any(|form| form.has(Hole::Layer)) {
            let is_about = |layer: &&u64| match rule.layers {
                Layers::All => true,
                Layers::Dense => !with_experts.contains(layer),
                Layers::Moe => with_experts.contains(layer),
            };
            all.iter().filter(is_about).find_map(|layer| found.missing(at, Some(*layer)))
        } else {
            found.missing(at, None)
        };
        if let Some(name) = missing {
            let problem = format!("there is no {name:?}, which {} has", family.title());
            return Err(contradiction("model_type", &family.name().into(), &problem));
        }
    }
    let has_rules = family.rules.iter().any(|rule| rule.layers == Layers::Moe);
    if has_rules && with_experts.is_empty() && !all.is_empty() && !may_be_dense(config, layers) {
        let problem = format!("there are no experts, which {} has", family.title());
        return Err(contradiction("model_type", &family.name().into(), &problem));
    }
    Ok(())
}

/// Whether every layer may be without experts, by the settings of families.
fn may_be_dense(config: &Value, layers: u64) -> bool {
    let number = |setting: &str| config.get(setting).and_then(Value::as_u64);
    let has_none = ["num_experts", "n_routed_experts", "num_local_experts"]
        .iter()
        .any(|setting| number(setting) == Some(0) || config.get(*setting) == Some(&Value::Null));
    let dense = config.get("mlp_only_layers").and_then(Value::as_array).map_or(0, Vec::len);
    has_none
        || dense as u64 >= layers
        || number("first_k_dense_replace").is_some_and(|first| first >= layers)
        || number("decoder_sparse_step").is_some_and(|step| step > layers)
}

/// Whether every model of the family has the tensors of a rule, in the layers that it is about.
fn is_required(rule: &Rule) -> bool {
    let is_plain = |form: &Template| !form.has(Hole::Mtp);
    !rule.optional
        && rule.instead.is_none()
        && rule.tied_to.is_none()
        && rule.hf.iter().all(is_plain)
}

/// The layers that a name has, if it is one of this form, below any prefix of the family.
fn numbers<'a>(
    family: &'a Mapping,
    form: &'a Template,
    fqn: &'a str,
) -> impl Iterator<Item = Option<u64>> + 'a {
    let prefixes = family.family.hf_prefixes.iter().map(String::as_str);
    let first = if form.prefixed { None } else { Some("") };
    prefixes.filter(|_| form.prefixed).chain(first).filter_map(move |prefix| {
        let naming = Naming { prefix: prefix.to_owned(), mtp_from: 0 };
        Some(form.numbers(fqn, &naming)?.layer)
    })
}

/// The tensors that are there.
struct Found<'a> {
    family: &'a Mapping,
    /// By the rule, the form and the layer.
    all: HashSet<(usize, usize, Option<u64>)>,
}

impl<'a> Found<'a> {
    fn of(family: &'a Mapping, metadata: &CheckpointMetadata) -> Self {
        let mut all = HashSet::new();
        for (fqn, _) in metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some()) {
            for (rule, forms) in family.rules.iter().map(|rule| &rule.hf).enumerate() {
                for (at, form) in forms.iter().enumerate() {
                    all.extend(numbers(family, form, fqn).map(|layer| (rule, at, layer)));
                }
            }
        }
        Self { family, all }
    }

    fn layers(&self) -> impl Iterator<Item = u64> {
        self.all.iter().filter_map(|(_, _, layer)| *layer)
    }

    /// Whether a layer has what only layers with experts have.
    fn has_experts(&self, layer: u64) -> bool {
        let is_expert = |(rule, at, found): &(usize, usize, Option<u64>)| {
            let rule = self.family.rules.get(*rule).filter(|rule| rule.layers == Layers::Moe);
            let form = rule.and_then(|rule| rule.hf.get(*at));
            *found == Some(layer) && form.is_some_and(|form| form.has(Hole::Expert))
        };
        self.all.iter().any(is_expert)
    }

    /// The first name of a rule that is not there, nor what may be there instead.
    fn missing(&self, at: usize, layer: Option<u64>) -> Option<String> {
        let rule = self.family.rules.get(at)?;
        let lacks = |number: usize, rule: &Rule| {
            (0..rule.hf.len()).find(|form| !self.all.contains(&(number, *form, layer)))
        };
        let first = rule.hf.get(lacks(at, rule)?)?;
        let mut others = self.family.rules.iter().enumerate();
        let is_other = |(number, other): (usize, &Rule)| {
            other.instead.as_ref() == Some(&rule.name) && lacks(number, other).is_none()
        };
        if others.any(is_other) {
            return None;
        }
        let number = layer.map_or_else(String::new, |layer| layer.to_string());
        let name = first.text().replace("{prefix}", "").replace("{layer}", &number);
        Some(name.replace("{expert}", "0"))
    }
}
