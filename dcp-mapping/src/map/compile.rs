//! Compiles resolved rules to pieces of target tensors.

use std::collections::HashMap;

use dcp_core::dims::checked_volume;
use dcp_core::{CheckpointMetadata, DType, Dims, Region};
use dcp_jobs::view::{Piece, PieceFrom};
use indexmap::IndexMap;

use crate::error::MappingError;
use crate::facts::Facts;
use crate::layout::{Known, Layout};
use crate::map::options::{Direction, LayerForm, LayerSpec, MapOptions};
use crate::map::resolve::{Instance, Resolved};
use crate::map::tensor_lookup::SourceRef;
use crate::mapping::{Mapping, Rule};
use crate::template::{Hole, Naming, Numbers, Template};

/// A tensor to be made.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    /// The number of its axes that count layers and experts.
    pub(crate) lead: usize,
    pub(crate) pieces: Vec<Piece>,
    /// The source entry that it is, element for element.
    pub(crate) same_as: Option<usize>,
    /// The dtype that it is cast to.
    pub(crate) cast: Option<DType>,
    /// Rows added, and rows left out.
    pub(crate) padded: u64,
    pub(crate) trimmed: u64,
}

/// A tensor in the making: the positions on its leading axes come one by one.
struct Building {
    rule: usize,
    rank: (u8, Numbers, usize),
    dtype: DType,
    element: Dims,
    lead: Vec<Hole>,
    positions: Vec<Vec<u64>>,
    pieces: Vec<Piece>,
    cast: Option<DType>,
    padded: u64,
    trimmed: u64,
}

pub(crate) struct Compiler<'a> {
    pub(crate) mapping: &'a Mapping,
    pub(crate) metadata: &'a CheckpointMetadata,
    pub(crate) facts: &'a Facts,
    pub(crate) options: &'a MapOptions,
    pub(crate) direction: Direction,
    pub(crate) resolved: &'a Resolved<'a>,
}

/// One side of a rule's use: a template, its shape and its pieces' boxes.
struct Made<'a> {
    template: &'a Template,
    naming: &'a Naming,
    numbers: Numbers,
    element: &'a Dims,
    dtype: DType,
    cast: Option<DType>,
    pieces: Vec<(Region, PieceFrom)>,
    padded: u64,
    trimmed: u64,
}

impl Compiler<'_> {
    /// All tensors of the other side, in the order that a model is read.
    pub(crate) fn compile(&self) -> Result<IndexMap<String, Target>, MappingError> {
        let stacked = self.stacks_layers()?;
        let mut building: IndexMap<String, Building> = IndexMap::new();
        let mut seen_layers = false;
        for active in &self.resolved.active {
            let rule = active.rule;
            let in_layers = active.instances.iter().any(|i| i.numbers.layer.is_some());
            seen_layers |= in_layers;
            let section = match (in_layers, seen_layers) {
                (false, false) => 0,
                (true, _) => 1,
                (false, true) => 2,
            };
            let written = self.written(rule, stacked);
            let mut layouts: HashMap<Vec<Dims>, Layout> = HashMap::new();
            for instance in &active.instances {
                let shapes = self.element_shapes(rule, instance)?;
                let layout = match layouts.get(&shapes) {
                    Some(layout) => layout,
                    None => {
                        let layout = self.layout(rule, instance, &shapes)?;
                        layouts.entry(shapes).or_insert(layout)
                    }
                };
                for mut made in self.make(rule, instance, layout, &written)? {
                    if active.copies {
                        made.pieces = in_two(made.pieces, None);
                    }
                    self.add(&mut building, rule, (section, active.order), made)?;
                }
            }
        }
        if self.direction == Direction::ToHf {
            self.copy(&mut building);
        }
        building.sort_by(|_, a, _, b| a.rank.cmp(&b.rank));
        building
            .into_iter()
            .map(|(name, built)| Ok((name.clone(), self.target(&name, built)?)))
            .collect()
    }

    /// Adds what Hugging Face has for each layer for multi-token prediction, and Megatron once.
    fn copy(&self, building: &mut IndexMap<String, Building>) {
        for copied in &self.mapping.copies {
            let of = copied.of.name(&Numbers::default(), &self.resolved.hf);
            for mtp in 0..self.resolved.mtp_layers {
                let numbers = Numbers { mtp: Some(mtp), ..Numbers::default() };
                let Some(built) = building.get(&of) else { break };
                let pieces = built.pieces.iter().map(|p| (p.region.clone(), p.from.clone()));
                let pieces = in_two(pieces.collect(), Some(mtp + 1));
                let copy = Building {
                    rule: built.rule,
                    rank: (2, numbers, usize::MAX),
                    dtype: built.dtype,
                    element: built.element.clone(),
                    lead: built.lead.clone(),
                    positions: built.positions.clone(),
                    pieces: pieces
                        .into_iter()
                        .map(|(region, from)| Piece { region, from })
                        .collect(),
                    cast: built.cast,
                    padded: 0,
                    trimmed: 0,
                };
                building.insert(copied.hf.name(&numbers, &self.resolved.hf), copy);
            }
        }
    }

    /// Whether layers are written as one tensor with a leading axis.
    fn stacks_layers(&self) -> Result<bool, MappingError> {
        let resolved = self.resolved;
        let moe = resolved.moe_layers.len() as u64;
        let alike = moe == 0 || moe == resolved.layers;
        match self.options.layers {
            LayerForm::PerLayer => Ok(false),
            LayerForm::Auto => Ok(alike),
            LayerForm::Stacked if alike => Ok(true),
            LayerForm::Stacked => {
                let of = resolved.layers;
                let value = serde_json::Value::from(of);
                let problem = format!(
                    "{moe} of {of} layers have experts, so they cannot be one tensor; they have \
                     to be written layer by layer"
                );
                Err(crate::facts::bad("num_layers", &value, &problem))
            }
        }
    }

    /// The names that a rule writes.
    fn written(&self, rule: &Rule, stacked: bool) -> Vec<Template> {
        if self.direction == Direction::ToHf {
            return rule.hf.clone();
        }
        let local = rule.local.filter(|_| self.options.spec == LayerSpec::Local);
        let Some(name) = rule.megatron.get(local.unwrap_or(0)) else { return Vec::new() };
        let mut axes = Vec::new();
        if stacked && name.has(Hole::Layer) {
            axes.push(Hole::Layer);
        }
        if name.has(Hole::Expert) {
            axes.push(Hole::Expert);
        }
        vec![name.stacked(&axes).unwrap_or_else(|| name.clone())]
    }

    /// The shapes of a rule's source tensors, without leading axes.
    fn element_shapes(&self, rule: &Rule, instance: &Instance) -> Result<Vec<Dims>, MappingError> {
        let shape = |source: &SourceRef| {
            let tensor = self.metadata.at(source.entry)?.1.as_tensor()?;
            tensor.shape.get(source.lead.len()..).map(Dims::from)
        };
        let shapes: Option<Vec<_>> = instance.sources.iter().map(shape).collect();
        shapes.ok_or_else(|| self.mapping.error(rule, "one of its tensors is none"))
    }

    fn layout(
        &self,
        rule: &Rule,
        instance: &Instance,
        shapes: &[Dims],
    ) -> Result<Layout, MappingError> {
        let slices: Vec<&[u64]> = shapes.iter().map(|shape| &**shape).collect();
        let known = match self.direction {
            Direction::ToHf => Known::Megatron(slices.first().copied().unwrap_or_default()),
            Direction::ToMegatron => Known::Hf(&slices),
        };
        let layout = rule.op.layout(known, rule.hf.len(), rule.transpose, self.facts);
        layout.map_err(|problem| {
            let names = instance.sources.iter().filter_map(|s| self.metadata.at(s.entry));
            let names = names.map(|(name, _)| format!("{name:?}")).collect::<Vec<_>>().join(", ");
            self.mapping.error(rule, format!("{names}: {problem}"))
        })
    }

    fn dtype(&self, rule: &Rule, source: &SourceRef) -> Result<DType, MappingError> {
        let tensor = self.metadata.at(source.entry).and_then(|(_, entry)| entry.as_tensor());
        tensor.map(|t| t.dtype).ok_or_else(|| self.mapping.error(rule, "its tensor is none"))
    }

    /// Returns the tensors that one use of a rule adds to the other side.
    fn make<'m>(
        &'m self,
        rule: &Rule,
        instance: &Instance,
        layout: &'m Layout,
        written: &'m [Template],
    ) -> Result<Vec<Made<'m>>, MappingError> {
        let numbers = instance.numbers;
        let source = |part: usize| {
            let source = instance.sources.get(part);
            source.ok_or_else(|| self.mapping.error(rule, "it has too few tensors"))
        };
        let refuse =
            |error: dcp_core::region::RegionError| self.mapping.error(rule, error.to_string());
        let mut all = Vec::new();
        if self.direction == Direction::ToHf {
            let from = source(0)?;
            let dtype = self.dtype(rule, from)?;
            for (part, (template, element)) in written.iter().zip(&layout.hf).enumerate() {
                let mut pieces = Vec::new();
                for link in layout.links.iter().filter(|link| link.part == part) {
                    let taken = below(&from.lead, &link.megatron).map_err(refuse)?;
                    pieces.push((link.hf.clone(), self.from(rule, from, taken, element.ndim())));
                }
                let trimmed = layout.padding.as_ref().and_then(|p| p.sizes().first().copied());
                all.push(Made {
                    template,
                    naming: &self.resolved.hf,
                    numbers,
                    element,
                    dtype,
                    cast: rule.hf_dtype.filter(|to| *to != dtype),
                    pieces,
                    padded: 0,
                    trimmed: trimmed.unwrap_or(0),
                });
            }
            return Ok(all);
        }
        let Some(template) = written.first() else { return Ok(all) };
        let dtype = self.dtype(rule, source(0)?)?;
        let mut pieces = Vec::new();
        for link in &layout.links {
            let from = source(link.part)?;
            if self.dtype(rule, from)? != dtype {
                let problem = format!(
                    "its tensors differ in dtype, {dtype} and {}; convert them to one before",
                    self.dtype(rule, from)?
                );
                return Err(self.mapping.error(rule, problem));
            }
            let taken = below(&from.lead, &link.hf).map_err(refuse)?;
            let axes = layout.megatron.ndim();
            pieces.push((link.megatron.clone(), self.from(rule, from, taken, axes)));
        }
        let padding = layout.padding.clone();
        let padded = padding.as_ref().and_then(|p| p.sizes().first().copied()).unwrap_or(0);
        pieces.extend(padding.map(|region| (region, PieceFrom::Zeros)));
        all.push(Made {
            template,
            naming: &self.resolved.megatron,
            numbers,
            element: &layout.megatron,
            dtype,
            cast: rule.megatron_dtype.filter(|to| *to != dtype),
            pieces,
            padded,
            trimmed: 0,
        });
        Ok(all)
    }

    /// A box of a source tensor along the axes of the tensor that is made of it; leading axes of
    /// that are put in front later.
    fn from(&self, rule: &Rule, source: &SourceRef, region: Region, axes: usize) -> PieceFrom {
        let lead = source.lead.len();
        let mut along: Vec<Option<usize>> = (0..axes).map(|axis| Some(lead + axis)).collect();
        if rule.transpose && axes >= 2 {
            along.swap(axes - 2, axes - 1);
        }
        PieceFrom::Box { part: 0, entry: source.entry, region, axes: along }
    }

    fn add(
        &self,
        building: &mut IndexMap<String, Building>,
        rule: &Rule,
        (section, order): (u8, usize),
        made: Made<'_>,
    ) -> Result<(), MappingError> {
        let name = made.template.name(&made.numbers, made.naming);
        let lead = &made.template.lead;
        let position: Vec<u64> = lead.iter().filter_map(|hole| made.numbers.get(*hole)).collect();
        let mut rank_numbers = made.numbers;
        for hole in lead {
            match hole {
                Hole::Layer => rank_numbers.layer = None,
                Hole::Expert => rank_numbers.expert = None,
                Hole::Mtp => rank_numbers.mtp = None,
            }
        }
        let begin = || Building {
            rule: rule.line,
            rank: (section, rank_numbers, order),
            dtype: made.dtype,
            element: made.element.clone(),
            lead: lead.clone(),
            positions: Vec::new(),
            pieces: Vec::new(),
            cast: made.cast,
            padded: made.padded,
            trimmed: made.trimmed,
        };
        let built = building.entry(name.clone()).or_insert_with(begin);
        if built.rule != rule.line || (lead.is_empty() && !built.positions.is_empty()) {
            let problem = format!("{name:?} is written by the rule at line {} too", built.rule);
            return Err(self.mapping.error(rule, problem));
        }
        if built.element != *made.element || built.dtype != made.dtype {
            let problem = format!(
                "{name:?} would be of {} {} and of {} {}: the parts do not fit together",
                built.dtype, built.element, made.dtype, made.element
            );
            return Err(self.mapping.error(rule, problem));
        }
        let refuse =
            |error: dcp_core::region::RegionError| self.mapping.error(rule, error.to_string());
        for (region, from) in made.pieces {
            if region.is_empty() {
                continue;
            }
            let region = below(&position, &region).map_err(refuse)?;
            let from = match from {
                PieceFrom::Box { part, entry, region, axes } => {
                    let axes = std::iter::repeat_n(None, position.len()).chain(axes).collect();
                    PieceFrom::Box { part, entry, region, axes }
                }
                other => other,
            };
            built.pieces.push(Piece { region, from });
        }
        built.positions.push(position);
        Ok(())
    }

    fn target(&self, name: &str, built: Building) -> Result<Target, MappingError> {
        let extents = (0..built.lead.len()).map(|axis| {
            let last = built.positions.iter().filter_map(|position| position.get(axis)).max();
            last.map_or(0, |last| last + 1)
        });
        let extents: Vec<u64> = extents.collect();
        if checked_volume(&extents) != Some(built.positions.len() as u64) {
            let rule = self.mapping.rules.iter().find(|rule| rule.line == built.rule);
            let problem = format!("{name:?} has {} of {extents:?} parts", built.positions.len());
            return Err(match rule {
                Some(rule) => self.mapping.error(rule, problem),
                None => MappingError::LeftOver { family: String::new(), tensors: vec![problem] },
            });
        }
        let shape: Dims = extents.into_iter().chain(built.element.iter().copied()).collect();
        let same_as = match built.pieces.as_slice() {
            [Piece { region, from: PieceFrom::Box { entry, region: of, axes, .. } }] => {
                let tensor = self.metadata.at(*entry).and_then(|(_, entry)| entry.as_tensor());
                let straight = axes.iter().enumerate().all(|(at, axis)| *axis == Some(at));
                let whole = tensor.is_some_and(|tensor| tensor.shape == shape);
                (straight && whole && region == of && *region.sizes() == shape).then_some(*entry)
            }
            _ => None,
        };
        Ok(Target {
            dtype: built.dtype,
            shape,
            lead: built.lead.len(),
            pieces: built.pieces,
            same_as,
            cast: built.cast,
            padded: built.padded,
            trimmed: built.trimmed,
        })
    }
}

/// Divides each piece in two, behind `first` rows or in the middle: tensors of the same pieces are
/// written once, but a copy that an option requests stays a copy.
fn in_two(pieces: Vec<(Region, PieceFrom)>, first: Option<u64>) -> Vec<(Region, PieceFrom)> {
    let part = |region: &Region, axis: usize, from: u64, len: u64| {
        let (mut offsets, mut sizes) = (region.offsets().clone(), region.sizes().clone());
        *offsets.get_mut(axis)? += from;
        *sizes.get_mut(axis)? = len;
        Region::new(offsets, sizes).ok()
    };
    let halves = |(region, from): &(Region, PieceFrom)| {
        let axis = region.sizes().iter().position(|size| *size > 1)?;
        let len = *region.sizes().get(axis)?;
        let half = first.map_or(len / 2, |first| first.min(len - 1));
        let PieceFrom::Box { part: source, entry, region: of, axes } = from else { return None };
        let there = (*axes.get(axis)?)?;
        let piece = |from, len| {
            let region = part(region, axis, from, len)?;
            let of = part(of, there, from, len)?;
            let (part, entry, axes) = (*source, *entry, axes.clone());
            Some((region, PieceFrom::Box { part, entry, region: of, axes }))
        };
        Some([piece(0, half)?, piece(half, len - half)?])
    };
    pieces
        .into_iter()
        .flat_map(|piece| halves(&piece).map_or_else(|| vec![piece], |halves| halves.into()))
        .collect()
}

/// A box at a position on axes in front.
fn below(lead: &[u64], region: &Region) -> Result<Region, dcp_core::region::RegionError> {
    let offsets: Dims = lead.iter().chain(&**region.offsets()).copied().collect();
    let sizes: Dims =
        std::iter::repeat_n(1, lead.len()).chain(region.sizes().iter().copied()).collect();
    Region::new(offsets, sizes)
}
