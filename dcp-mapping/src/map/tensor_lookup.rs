//! Looks up tensors by the names of a mapping.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::TensorEntry;

use crate::error::MappingError;
use crate::map::options::Direction;
use crate::mapping::{Mapping, Rule};
use crate::template::{Hole, INSTANCES_MAX, NUMBER_MAX, Naming, Numbers, Template};

/// A tensor of the source, or a position on its leading axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceRef {
    pub(crate) entry: usize,
    pub(crate) lead: Vec<u64>,
}

/// For each use of a rule the tensors that it takes, as far as they are there.
pub(crate) type Found = BTreeMap<Numbers, Vec<Option<SourceRef>>>;

/// An entry of the index, with its position.
type Candidate<'a> = (usize, &'a Arc<str>, &'a TensorEntry);

/// The tensors of a source that rules may be about.
pub(crate) struct TensorLookup<'a> {
    pub(crate) mapping: &'a Mapping,
    pub(crate) metadata: &'a CheckpointMetadata,
    pub(crate) direction: Direction,
    /// In the order of the index.
    pub(crate) tensors: Vec<Candidate<'a>>,
    /// Of the source's names.
    pub(crate) naming: Naming,
    /// The number of uses of rules so far.
    pub(crate) instances: Cell<u64>,
}

impl<'a> TensorLookup<'a> {
    /// The first prefix under which there is anything.
    pub(crate) fn prefix(&self) -> String {
        let prefixes = match self.direction {
            Direction::ToHf => &self.mapping.family.megatron_prefixes,
            Direction::ToMegatron => &self.mapping.family.hf_prefixes,
        };
        let forms: Vec<_> = (self.mapping.rules.iter())
            .flat_map(|rule| self.slots(rule).into_iter().flatten().flat_map(|t| self.forms(t)))
            .filter(|form| form.prefixed && !form.has(Hole::Mtp))
            .collect();
        let any = |prefix: &str| {
            let naming = Naming { prefix: prefix.to_owned(), mtp_from: 0 };
            let below = self.tensors.iter().filter(|(_, name, _)| name.starts_with(prefix));
            below
                .into_iter()
                .any(|(_, name, _)| forms.iter().any(|form| form.numbers(name, &naming).is_some()))
        };
        let found = prefixes.iter().find(|prefix| any(prefix)).or_else(|| prefixes.first());
        found.cloned().unwrap_or_default()
    }

    /// The names that each tensor of a rule may have in the source.
    pub(crate) fn slots<'r>(&self, rule: &'r Rule) -> Vec<Vec<&'r Template>> {
        match self.direction {
            Direction::ToHf => vec![rule.megatron.iter().collect()],
            Direction::ToMegatron => rule.hf.iter().map(|name| vec![name]).collect(),
        }
    }

    /// The forms that a name may have: in Megatron, numbers may be axes instead.
    pub(crate) fn forms(&self, template: &Template) -> Vec<Template> {
        if self.direction == Direction::ToMegatron {
            return vec![template.clone()];
        }
        let holes: Vec<Hole> =
            [Hole::Layer, Hole::Expert].into_iter().filter(|h| template.has(*h)).collect();
        let mut forms = Vec::new();
        for taken in (0..1_usize << holes.len()).rev() {
            let axes: Vec<Hole> = (holes.iter().enumerate())
                .filter(|(bit, _)| taken >> bit & 1 == 1)
                .map(|(_, hole)| *hole)
                .collect();
            forms.extend(template.stacked(&axes));
        }
        forms
    }

    /// All tensors that a rule is about.
    pub(crate) fn find(&self, rule: &Rule) -> Result<Found, MappingError> {
        let slots = self.slots(rule);
        let mut found = Found::new();
        for (slot, templates) in slots.iter().enumerate() {
            for form in templates.iter().flat_map(|template| self.forms(template)) {
                for (numbers, source) in self.matches(rule, &form)? {
                    if self.instances.get().saturating_add(found.len() as u64) >= INSTANCES_MAX {
                        return Err(self.mapping.error(rule, "it is about too many tensors"));
                    }
                    let row = found.entry(numbers).or_insert_with(|| vec![None; slots.len()]);
                    let Some(place) = row.get_mut(slot) else { continue };
                    if let Some(first) = place.replace(source.clone()) {
                        let problem = format!(
                            "it finds two tensors in one place, {:?} and {:?}",
                            self.name(first.entry),
                            self.name(source.entry)
                        );
                        return Err(self.mapping.error(rule, problem));
                    }
                }
            }
        }
        self.instances.set(self.instances.get().saturating_add(found.len() as u64));
        Ok(found)
    }

    pub(crate) fn name(&self, entry: usize) -> &str {
        self.metadata.at(entry).map_or("", |(name, _)| name)
    }

    /// All tensors of a form, each position on its leading axes on its own.
    pub(crate) fn matches(
        &self,
        rule: &Rule,
        form: &Template,
    ) -> Result<Vec<(Numbers, SourceRef)>, MappingError> {
        let mut all = Vec::new();
        for &(entry, name, tensor) in self.candidates(form).iter() {
            let Some(numbers) = form.numbers(name, &self.naming) else { continue };
            let Some(extents) = tensor.shape.get(..form.lead.len()) else {
                let problem = format!(
                    "{name:?} has the shape {}, and no axis for {}",
                    tensor.shape,
                    form.lead.iter().map(|hole| hole.text()).collect::<String>()
                );
                return Err(self.mapping.error(rule, problem));
            };
            let count = dcp_core::dims::checked_volume(extents).filter(|count| {
                let total = (all.len() as u64).saturating_add(*count);
                let total = total.saturating_add(self.instances.get());
                total <= INSTANCES_MAX && extents.iter().all(|extent| *extent <= NUMBER_MAX)
            });
            let Some(count) = count else {
                let problem = format!("{name:?} has the shape {}, too many", tensor.shape);
                return Err(self.mapping.error(rule, problem));
            };
            for position in 0..count {
                let (mut lead, mut rest) = (vec![0; extents.len()], position);
                for (slot, extent) in lead.iter_mut().zip(extents).rev() {
                    *slot = rest % extent;
                    rest /= extent;
                }
                let mut numbers = numbers;
                let fits =
                    form.lead.iter().zip(&lead).all(|(hole, number)| numbers.set(*hole, *number));
                if fits {
                    all.push((numbers, SourceRef { entry, lead }));
                }
            }
        }
        Ok(all)
    }

    fn candidates(&self, form: &Template) -> Cow<'_, [Candidate<'a>]> {
        if !form.is_plain() {
            return (&self.tensors).into();
        }
        let name = form.name(&Numbers::default(), &self.naming);
        let at = self.metadata.index_of(&name);
        let at =
            at.and_then(|at| self.tensors.binary_search_by_key(&at, |(entry, ..)| *entry).ok());
        at.map_or(&[][..], |at| &self.tensors[at..=at]).into()
    }
}
