//! Resolves the rules of a mapping against the tensors of a checkpoint.
//!
//! Rules of multi-token prediction are matched after all others: Hugging Face numbers their layers
//! behind those of the decoder, whose number must be found first. A rule with `instead` is used only
//! where the rule that it replaces matches nothing. Invariant: every source tensor is used by an
//! instance, dropped or left over, and a tensor left over is an error unless the options allow it.

use std::cell::Cell;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use dcp_core::CheckpointMetadata;
use dcp_core::text::counted;

use crate::error::MappingError;
use crate::facts::Facts;
use crate::map::options::{Direction, MapOptions, Tying};
use crate::map::tensor_lookup::{Found, SourceRef, TensorLookup};
use crate::mapping::{Layers, Mapping, Rule};
use crate::template::{Hole, NUMBER_MAX, Naming, Numbers, Template, glob};

/// The entries of every Megatron checkpoint that belong to no model, as globs.
const MEGATRON_DROPS: &[&str] = &[
    "optimizer.*",
    "chained_*optimizer.*",
    "*._extra_state*",
    "*.inv_freq",
    "rng_state*",
    "rerun_state_machine*",
];

/// One use of a rule.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) numbers: Numbers,
    /// The Megatron tensor, or all Hugging Face tensors of the rule.
    pub(crate) sources: Vec<SourceRef>,
}

/// A rule, and everything in the source that it is about.
#[derive(Debug)]
pub(crate) struct Active<'a> {
    /// The rule that says how to read.
    pub(crate) rule: &'a Rule,
    /// Its position in the mapping.
    pub(crate) order: usize,
    /// Whether it makes copies of tensors that another rule has, too.
    pub(crate) copies: bool,
    pub(crate) instances: Vec<Instance>,
}

/// The uses of rules that were found in a source.
#[derive(Debug)]
pub(crate) struct Resolved<'a> {
    pub(crate) active: Vec<Active<'a>>,
    pub(crate) hf: Naming,
    pub(crate) megatron: Naming,
    pub(crate) layers: u64,
    pub(crate) moe_layers: BTreeSet<u64>,
    pub(crate) mtp_layers: u64,
    /// Whether input and output embeddings are one.
    pub(crate) tied: bool,
    pub(crate) dropped: Vec<Arc<str>>,
    pub(crate) left_over: Vec<Arc<str>>,
    /// A stored output embedding that the configuration ties to the input embedding, and that one.
    pub(crate) untaken: Option<(Arc<str>, Arc<str>)>,
    pub(crate) notes: Vec<String>,
}

impl Resolved<'_> {
    /// Returns the layers with experts, in the form of Megatron's `--moe-layer-freq`: 1 for all, or
    /// a list.
    pub(crate) fn moe_layer_freq(&self) -> Option<serde_json::Value> {
        match self.moe_layers.len() as u64 {
            0 => None,
            all if all == self.layers => Some(1.into()),
            _ => {
                let moe = (0..self.layers).map(|at| u64::from(self.moe_layers.contains(&at)));
                Some(moe.collect::<Vec<_>>().into())
            }
        }
    }
}

/// The entry of the first tensor that was found.
fn first_of(found: &Found) -> Option<usize> {
    found.values().flatten().flatten().next().map(|source| source.entry)
}

/// Brings the rules of a mapping and the tensors of a source together.
pub(crate) struct Resolver<'a> {
    finder: TensorLookup<'a>,
    facts: &'a Facts,
    options: &'a MapOptions,
    dropped: Vec<Arc<str>>,
}

impl<'a> Resolver<'a> {
    pub(crate) fn new(
        mapping: &'a Mapping,
        metadata: &'a CheckpointMetadata,
        facts: &'a Facts,
        options: &'a MapOptions,
        direction: Direction,
    ) -> Self {
        let (mut tensors, mut dropped) = (Vec::new(), Vec::new());
        let (own, usual): (_, &[&str]) = match direction {
            Direction::ToHf => (&mapping.drop.megatron, MEGATRON_DROPS),
            Direction::ToMegatron => (&mapping.drop.hf, &[]),
        };
        let own = own.iter().chain(&options.drop).map(String::as_str);
        let globs: Vec<&str> = own.chain(usual.iter().copied()).collect();
        for (index, (fqn, entry)) in metadata.iter().enumerate() {
            match entry.as_tensor() {
                Some(tensor) if !globs.iter().any(|pattern| glob(pattern, fqn)) => {
                    tensors.push((index, fqn, tensor));
                }
                _ => dropped.push(Arc::clone(fqn)),
            }
        }
        let naming = Naming::default();
        let mut finder =
            TensorLookup { mapping, metadata, direction, tensors, naming, instances: Cell::new(0) };
        finder.naming.prefix = finder.prefix();
        Self { finder, facts, options, dropped }
    }

    pub(crate) fn resolve(mut self) -> Result<Resolved<'a>, MappingError> {
        let rules = &self.finder.mapping.rules;
        let is_mtp = |rule: &Rule| rule.megatron.first().is_some_and(|name| name.has(Hole::Mtp));
        let mut found: Vec<Found> = Vec::with_capacity(rules.len());
        for rule in rules {
            found.push(if is_mtp(rule) { Found::new() } else { self.finder.find(rule)? });
        }
        let layers = self.layers(&found)?;
        self.finder.naming.mtp_from =
            if self.finder.direction == Direction::ToMegatron { layers } else { 0 };
        for (rule, found) in rules.iter().zip(&mut found).filter(|(rule, _)| is_mtp(rule)) {
            *found = self.finder.find(rule)?;
        }
        let moe_layers = self.moe_layers(layers)?;
        for (rule, found) in rules.iter().zip(&mut found) {
            found.retain(|numbers, _| match numbers.layer {
                None => true,
                Some(layer) if layer >= layers => false,
                Some(layer) => match rule.layers {
                    Layers::All => true,
                    Layers::Dense => !moe_layers.contains(&layer),
                    Layers::Moe => moe_layers.contains(&layer),
                },
            });
        }
        let experts = self.experts(&found)?;
        let mtp_layers = found.iter().flat_map(|f| f.keys()).filter_map(|n| n.mtp).max();
        let mtp_layers = mtp_layers.map_or(0, |last| last + 1);
        let (mut active, mut tied, mut notes) = (Vec::new(), false, Vec::new());
        let mut untaken = None;
        for (order, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.instead.is_none()) {
            let mut readers = vec![(order, rule)];
            if found.get(order).is_none_or(Found::is_empty) {
                let instead: Vec<_> = (rules.iter().enumerate())
                    .filter(|(at, other)| {
                        other.instead.as_deref() == Some(&rule.name)
                            && found.get(*at).is_some_and(|found| !found.is_empty())
                    })
                    .collect();
                if !instead.is_empty() {
                    readers = instead;
                }
            }
            let mut is_tied = false;
            for (at, reader) in readers {
                let mut here = found.get_mut(at).map(std::mem::take).unwrap_or_default();
                let mut copies = false;
                if rule.tied_to.is_some() {
                    copies = here.is_empty();
                    let stored = first_of(&here);
                    is_tied = self.tie(rule, &mut here, &mut notes)?;
                    if is_tied && let (Some(stored), Some(other)) = (stored, self.tied_to(rule)) {
                        untaken = first_of(&self.finder.find(other)?)
                            .and_then(|other| Some((self.name(stored)?, self.name(other)?)));
                    }
                    tied |= is_tied;
                }
                let needed = Needed { layers, moe_layers: &moe_layers, mtp_layers, experts };
                let optional = rule.optional || is_tied;
                let instances = self.instances(reader, here, optional, &needed)?;
                if !instances.is_empty() {
                    active.push(Active { rule: reader, order: at, copies, instances });
                }
            }
        }
        let resolved = self.finish(active, notes, (layers, mtp_layers), moe_layers, tied)?;
        Ok(Resolved { untaken, ..resolved })
    }

    /// The rule of the tensor that this one may be.
    fn tied_to(&self, rule: &Rule) -> Option<&'a Rule> {
        self.finder.mapping.rules.iter().find(|other| Some(&other.name) == rule.tied_to.as_ref())
    }

    fn name(&self, entry: usize) -> Option<Arc<str>> {
        Some(Arc::clone(self.finder.metadata.at(entry)?.0))
    }

    fn finish(
        mut self,
        active: Vec<Active<'a>>,
        notes: Vec<String>,
        (layers, mtp_layers): (u64, u64),
        moe_layers: BTreeSet<u64>,
        tied: bool,
    ) -> Result<Resolved<'a>, MappingError> {
        let instances = active.iter().flat_map(|active| &active.instances);
        let used: HashSet<usize> =
            instances.flat_map(|i| i.sources.iter().map(|source| source.entry)).collect();
        let mut left_over = Vec::new();
        for &(entry, name, _) in &self.finder.tensors {
            if used.contains(&entry) {
                continue;
            }
            if self.is_tied_copy(name, tied) || self.is_copy(name) {
                self.dropped.push(Arc::clone(name));
            } else {
                left_over.push(Arc::clone(name));
            }
        }
        if !left_over.is_empty() && !self.options.allow_left_over {
            let tensors = left_over.iter().map(ToString::to_string).collect();
            return Err(MappingError::LeftOver {
                family: self.finder.mapping.family.name.clone(),
                tensors,
            });
        }
        let first = |prefixes: &[String]| prefixes.first().cloned().unwrap_or_default();
        let (mut hf, mut megatron) = (Naming::default(), Naming::default());
        hf.prefix = first(&self.finder.mapping.family.hf_prefixes);
        megatron.prefix = first(&self.finder.mapping.family.megatron_prefixes);
        hf.mtp_from = layers;
        let naming = self.finder.naming;
        match self.finder.direction {
            Direction::ToHf => megatron = naming,
            Direction::ToMegatron => hf = naming,
        }
        Ok(Resolved {
            active,
            hf,
            megatron,
            layers,
            moe_layers,
            mtp_layers,
            tied,
            dropped: self.dropped,
            left_over,
            untaken: None,
            notes,
        })
    }

    /// Whether a tensor is the output embedding of a model that has none of its own.
    fn is_tied_copy(&self, name: &str, tied: bool) -> bool {
        let mut rules =
            self.finder.mapping.rules.iter().filter(|rule| tied && rule.tied_to.is_some());
        rules.any(|rule| {
            self.finder
                .slots(rule)
                .into_iter()
                .flatten()
                .any(|template| template.numbers(name, &self.finder.naming).is_some())
        })
    }

    /// Whether a tensor of Hugging Face's is one that Megatron has once.
    fn is_copy(&self, name: &str) -> bool {
        let finder = &self.finder;
        let mut copies = finder.mapping.copies.iter();
        finder.direction == Direction::ToMegatron
            && copies.any(|copied| copied.hf.numbers(name, &finder.naming).is_some())
    }

    /// The number of layers: what the arguments say, else what there is.
    fn layers(&self, found: &[Found]) -> Result<u64, MappingError> {
        let last = found.iter().flat_map(|found| found.keys()).filter_map(|n| n.layer).max();
        let there = last.map_or(0, |last| last + 1);
        let Some(known) = self.facts.get_u64("num_layers")? else { return Ok(there) };
        if self.finder.direction == Direction::ToHf && there > known {
            let problem = format!("the checkpoint has {}", counted(there, "layer"));
            return Err(crate::facts::bad("num_layers", &known.into(), &problem));
        }
        if known > NUMBER_MAX {
            return Err(crate::facts::bad("num_layers", &known.into(), "that is too many"));
        }
        Ok(known)
    }

    /// The number of experts.
    fn experts(&self, found: &[Found]) -> Result<Option<u64>, MappingError> {
        let last = found.iter().flat_map(|found| found.keys()).filter_map(|n| n.expert).max();
        let there = last.map(|last| last + 1);
        match (there, self.facts.get_u64("num_experts")?) {
            (Some(there), Some(known)) if there > known => {
                let problem = format!("the checkpoint has {}", counted(there, "expert"));
                Err(crate::facts::bad("num_experts", &known.into(), &problem))
            }
            (Some(_), Some(known)) => Ok(Some(known)),
            (there, _) => Ok(there),
        }
    }

    /// The layers with tensors that only layers with experts have.
    fn moe_layers(&self, layers: u64) -> Result<BTreeSet<u64>, MappingError> {
        let mut moe = BTreeSet::new();
        let rules = &self.finder.mapping.rules;
        let names = |rule| self.finder.slots(rule).into_iter().flatten();
        let others: HashSet<String> = (rules.iter())
            .filter(|rule| rule.layers != Layers::Moe)
            .flat_map(|rule| names(rule).map(Template::text))
            .collect();
        for rule in rules.iter().filter(|rule| rule.layers == Layers::Moe) {
            let own = names(rule).filter(|name| !others.contains(&name.text()));
            for form in own.flat_map(|name| self.finder.forms(name)) {
                let found = self.finder.matches(rule, &form)?;
                moe.extend(found.into_iter().filter_map(|(numbers, _)| numbers.layer));
            }
        }
        moe.retain(|layer| *layer < layers);
        Ok(moe)
    }

    /// Decides about an output embedding that may be the input embedding. Returns whether it is.
    fn tie(
        &self,
        rule: &Rule,
        found: &mut Found,
        notes: &mut Vec<String>,
    ) -> Result<bool, MappingError> {
        let tied = self.facts.get_bool("untie_embeddings_and_output_weights").map(|untied| !untied);
        let stored = !found.is_empty();
        let source = |rule: &Rule| {
            let name = self.finder.slots(rule)[0].first().map_or_else(String::new, |t| t.text());
            name.replace("{prefix}", "")
        };
        match (self.options.tying, stored) {
            (Tying::Tie, _) => {
                found.clear();
                Ok(true)
            }
            (Tying::Untie, true) => Ok(false),
            (Tying::Untie, false) => {
                if let Some(other) = self.tied_to(rule) {
                    *found = self.finder.find(other)?;
                    notes.push(format!(
                        "the output embedding is written as a copy of {:?}",
                        source(other)
                    ));
                }
                Ok(false)
            }
            (Tying::AsItIs, true)
                if tied == Some(true)
                    && (self.finder.direction == Direction::ToMegatron
                        || self.finder.mapping.program().is_some()) =>
            {
                notes.push(format!(
                    "{:?} is left out: the configuration ties it to the input embedding",
                    source(rule)
                ));
                found.clear();
                Ok(true)
            }
            (Tying::AsItIs, true) => Ok(false),
            (Tying::AsItIs, false) if tied == Some(false) => {
                let problem = format!(
                    "there is no {:?}, though the arguments say that input and output embeddings \
                     are not tied",
                    source(rule)
                );
                Err(self.finder.mapping.error(rule, problem))
            }
            (Tying::AsItIs, false) => Ok(true),
        }
    }

    /// Every use of a rule, after making sure that none is missing.
    fn instances(
        &self,
        rule: &Rule,
        found: Found,
        optional: bool,
        needed: &Needed<'_>,
    ) -> Result<Vec<Instance>, MappingError> {
        let names = rule.megatron.first();
        let has = |hole| names.is_some_and(|name| name.has(hole));
        let numbers: Vec<Option<u64>> = match (has(Hole::Layer), has(Hole::Mtp)) {
            (false, false) => vec![None],
            (true, _) => needed.layers_of(rule.layers).map(Some).collect(),
            (_, true) => (0..needed.mtp_layers).map(Some).collect(),
        };
        let experts = if has(Hole::Expert) { needed.experts.map_or(0, |n| n) } else { 1 };
        if numbers.is_empty() || (optional && found.is_empty()) {
            return Ok(Vec::new());
        }
        if found.is_empty() {
            let source = self.sources_text(rule);
            return Err(self
                .finder
                .mapping
                .error(rule, format!("it matches nothing: there is no {source}")));
        }
        let mut instances = Vec::with_capacity(found.len());
        for number in numbers {
            for expert in 0..experts {
                let mut at = Numbers::default();
                if let Some(number) = number {
                    at.set(if has(Hole::Mtp) { Hole::Mtp } else { Hole::Layer }, number);
                }
                if has(Hole::Expert) {
                    at.set(Hole::Expert, expert);
                }
                let row = found.get(&at);
                let mut sources = Vec::new();
                for (slot, templates) in self.finder.slots(rule).into_iter().enumerate() {
                    match row.and_then(|row| row.get(slot)?.clone()) {
                        Some(source) => sources.push(source),
                        None => {
                            let name = templates
                                .first()
                                .map_or_else(String::new, |t| t.name(&at, &self.finder.naming));
                            let problem = format!("there is no tensor {name:?}");
                            return Err(self.finder.mapping.error(rule, problem));
                        }
                    }
                }
                instances.push(Instance { numbers: at, sources });
            }
        }
        Ok(instances)
    }

    fn sources_text(&self, rule: &Rule) -> String {
        let slots = self.finder.slots(rule);
        let names =
            slots.iter().flatten().map(|t| format!("{:?}", t.text().replace("{prefix}", "")));
        names.collect::<Vec<_>>().join(" or ")
    }
}

/// The layers and experts that the source must have.
struct Needed<'a> {
    layers: u64,
    moe_layers: &'a BTreeSet<u64>,
    mtp_layers: u64,
    experts: Option<u64>,
}

impl Needed<'_> {
    fn layers_of(&self, kind: Layers) -> impl Iterator<Item = u64> {
        (0..self.layers).filter(move |layer| match kind {
            Layers::All => true,
            Layers::Dense => !self.moe_layers.contains(layer),
            Layers::Moe => self.moe_layers.contains(layer),
        })
    }
}
