//! Splits fused tensors as distributed checkpoints do: the experts of a rank, projections and
//! convolutions of Mamba and of gated delta networks.

use std::collections::HashMap;

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::path::PathItem;
use dcp_core::{Dims, Region};
use dcp_jobs::view::{Assembled, Piece, PieceFrom};
use dcp_jobs::{JobOptions, Source};

use super::leaves::{Found, Leaf};
use super::model_chunk;
use super::names::LocalName;
use crate::args::MegatronArgs;
use crate::error::MegatronError;

/// More experts than any rank ever had.
const EXPERTS_MAX: u64 = 1 << 16;
/// The two matrices of `GroupedMLP`, and what each expert's is called.
const GROUPED: [(&str, &str); 2] = [
    ("experts.weight1", "experts.experts.linear_fc1.weight"),
    ("experts.weight2", "experts.experts.linear_fc2.weight"),
];

/// `source` with the matrices of `GroupedMLP` in the shape that they mean, `[experts, in, out]`,
/// where the number of a rank's experts is known: by the rows of the layer's router, or by the
/// arguments. Every entry keeps its position.
///
/// `GroupedMLP` declares them as `[in, experts · out]` and `[experts · in, out]`, but uses the
/// elements as one matrix after the other.
pub(super) async fn grouped(
    source: Source,
    groups: u32,
    args: Option<&MegatronArgs>,
    job: &JobOptions,
) -> Result<Source, MegatronError> {
    let metadata = source.metadata().await?;
    let tensors = |entry: &Entry| match (entry, entry.path().map(|path| &**path)) {
        (Entry::Tensor(tensor), Some([PathItem::Key(first), rest @ ..]))
            if model_chunk(first).is_some() =>
        {
            Some((format!("{first}.{}", PathItem::flat_name(rest)), tensor.shape.clone()))
        }
        _ => None,
    };
    let is_grouped = |name: &str| GROUPED.iter().any(|(own, _)| name.ends_with(&format!(".{own}")));
    let shapes: HashMap<String, Dims> =
        metadata.iter().filter_map(|(_, entry)| tensors(entry)).collect();
    if !shapes.keys().any(|name| is_grouped(name)) {
        return Ok(source);
    }
    let of_args = args.and_then(MegatronArgs::num_experts);
    let mut view = Assembled::builder(std::slice::from_ref(&source), job).await?;
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let shape = tensors(entry).and_then(|(name, _)| {
            let (layer, weight) = name.rsplit_once("experts.").filter(|_| is_grouped(&name))?;
            let router = shapes.get(&format!("{layer}router.weight")).and_then(|s| s.first());
            let all = router.copied().or(of_args)?;
            let second = shapes.get(&format!("{layer}experts.weight2"))?;
            let first = shapes.get(&format!("{layer}experts.weight1"))?;
            let [first, second] = by_expert(all, groups, first, second)?;
            Some(if weight == "weight1" { first } else { second })
        });
        match (entry, shape) {
            (Entry::Tensor(tensor), Some(shape)) => {
                let (path, piece) = (tensor.path.clone(), reshaped(tensor, at, &shape));
                let piece = piece.map_err(|error| MegatronError::Legacy {
                    folder: "mp_rank_*".to_owned(),
                    problem: format!("{fqn:?}: {error}"),
                })?;
                view.tensor(fqn.clone(), path, tensor.dtype, shape, vec![piece])?;
            }
            (entry, _) => view.pass(fqn.clone(), entry.path().cloned(), 0, at)?,
        }
    }
    Ok(view.finish()?)
}

fn reshaped(
    tensor: &TensorEntry,
    entry: usize,
    shape: &Dims,
) -> Result<Piece, dcp_core::region::RegionError> {
    let from = Region::full(tensor.shape.clone())?;
    let from = PieceFrom::Reshaped { part: 0, entry, region: from };
    Ok(Piece { region: Region::full(shape.clone())?, from })
}

/// The shapes that the two matrices mean; `None` when they are not those of whole experts.
fn by_expert(all: u64, groups: u32, first: &Dims, second: &Dims) -> Option<[Dims; 2]> {
    let ([width, out], [taken, back]) = (&**first, &**second) else { return None };
    let experts = all.checked_div(groups.into()).filter(|n| (1..=EXPERTS_MAX).contains(n))?;
    let each = |len: u64| (len > 0 && len.is_multiple_of(experts)).then_some(len / experts);
    let (out, taken) = (each(*out)?, each(*taken)?);
    let whole = all.is_multiple_of(u64::from(groups));
    (whole && width == back && (out == taken || taken.checked_mul(2) == Some(out)))
        .then(|| [Dims::from([experts, *width, out]), Dims::from([experts, taken, *width])])
}

/// Every leaf as distributed checkpoints have it: fused ones in their parts, where the shapes of
/// their sibling tensors have these.
pub(super) fn taken_apart(found: Vec<Found>) -> Vec<Found> {
    let sections = Sections::of_all(&found);
    let mut all = Vec::with_capacity(found.len());
    for leaf in found {
        if let Some(experts) = experts(&leaf) {
            all.extend(experts);
        } else if let Some(parts) = sections.get(&Module::of(&leaf)).and_then(|s| s.apply(&leaf)) {
            all.extend(parts);
        } else {
            all.push(leaf);
        }
    }
    all
}

/// The experts in a matrix of all experts of a rank, each as a linear layer has it: transposed.
fn experts(found: &Found) -> Option<Vec<Found>> {
    let name = &found.local.name;
    let (before, to) = GROUPED.iter().find_map(|(own, to)| {
        let before = name.strip_suffix(own)?;
        (before.is_empty() || before.ends_with('.')).then_some((before, to))
    })?;
    let (dtype, shape) = found.leaf.tensor.as_ref()?;
    let [count, rows, columns] = **shape else { return None };
    let matrix = to.strip_suffix(".weight").unwrap_or(to);
    // Distributed checkpoints have a state of every expert, which is nothing here.
    let state = |n: u64| {
        let name = format!("{before}{matrix}._extra_state");
        let local = LocalName { expert: Some(n), name, ..found.local.clone() };
        Found { local, leaf: Leaf::nowhere(found.place), ..*found }
    };
    let expert = |n: u64| {
        let name = format!("{before}{to}");
        let local = LocalName { expert: Some(n), name, ..found.local.clone() };
        let leaf = Leaf {
            tensor: Some((*dtype, Dims::from([columns, rows]))),
            start: Dims::from([n, 0, 0]),
            axes: vec![2, 1],
            ..found.leaf.clone()
        };
        Found { local, leaf, ..*found }
    };
    Some((0..count).flat_map(|n| [expert(n), state(n)]).collect())
}

/// The module that a leaf is in, of one layer of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Module {
    place: usize,
    chunk: u64,
    layer: Option<(String, u64)>,
    name: String,
}

impl Module {
    fn of(found: &Found) -> Self {
        let name = &found.local.name;
        let (name, _) = FUSED
            .iter()
            .chain(&TELLING)
            .find_map(|own| Some((name.strip_suffix(own)?, own)))
            .unwrap_or((name, &""));
        let (layer, name) = (found.local.layer.clone(), name.to_owned());
        Self { place: found.place, chunk: found.chunk, layer, name }
    }
}

/// The fused tensors of a Mamba or gated delta network module.
const FUSED: [&str; 3] = ["in_proj.weight", "conv1d.weight", "conv1d.bias"];
/// Other tensors with the sizes of its parts.
const TELLING: [&str; 2] = ["out_proj.weight", "dt_bias"];

/// The rows of the parts of fused tensors, and their names.
#[derive(Clone, Debug)]
struct Sections {
    projection: Vec<(&'static str, u64)>,
    convolution: Vec<(&'static str, u64)>,
}

impl Sections {
    fn of_all(found: &[Found]) -> HashMap<Module, Self> {
        let mut modules: HashMap<Module, HashMap<&str, &Dims>> = HashMap::new();
        for leaf in found {
            let name = &leaf.local.name;
            let Some(own) = FUSED.iter().chain(&TELLING).find(|own| name.ends_with(**own)) else {
                continue;
            };
            let Some((_, shape)) = &leaf.leaf.tensor else { continue };
            modules.entry(Module::of(leaf)).or_default().insert(own, shape);
        }
        let sections = modules.into_iter().filter_map(|(module, shapes)| {
            let len = |name: &str, axis: usize| shapes.get(name)?.get(axis).copied();
            let sections = Self::new(
                len("in_proj.weight", 0)?,
                len("conv1d.weight", 0)?,
                len("out_proj.weight", 1)?,
                len("dt_bias", 0)?,
            );
            Some((module, sections?))
        });
        sections.collect()
    }

    /// By the rows of the projection and of the convolution, the columns of the projection back,
    /// and the number of heads.
    fn new(rows: u64, channels: u64, inner: u64, heads: u64) -> Option<Self> {
        let pair = channels.checked_sub(inner).filter(|pair| *pair > 0 && pair % 2 == 0)?;
        let half = pair / 2;
        let left = rows.checked_sub(inner)?.checked_sub(channels)?;
        if inner == 0 || heads == 0 {
            return None;
        }
        if left == heads {
            return Some(Self {
                projection: vec![
                    ("z", inner),
                    ("x", inner),
                    ("B", half),
                    ("C", half),
                    ("dt", heads),
                ],
                convolution: vec![("x", inner), ("B", half), ("C", half)],
            });
        }
        // Of a gated delta network, which has two numbers for each head.
        (heads.checked_mul(2) == Some(left)).then(|| Self {
            projection: vec![
                ("query", half),
                ("key", half),
                ("value", inner),
                ("z", inner),
                ("beta", heads),
                ("alpha", heads),
            ],
            convolution: vec![("query", half), ("key", half), ("value", inner)],
        })
    }

    /// The parts of a leaf, if it is fused.
    fn apply(&self, found: &Found) -> Option<Vec<Found>> {
        let name = &found.local.name;
        let own = FUSED.iter().find(|own| name.ends_with(**own))?;
        let parts = if *own == "in_proj.weight" { &self.projection } else { &self.convolution };
        let (dtype, shape) = found.leaf.tensor.as_ref()?;
        let rows = parts.iter().map(|(_, rows)| *rows).sum::<u64>();
        if shape.first() != Some(&rows) {
            return None;
        }
        let mut at = 0;
        let parts = parts.iter().map(|(part, rows)| {
            let (mut start, mut shape) = (found.leaf.start.clone(), shape.clone());
            start.iter_mut().take(1).for_each(|start| *start = at);
            shape.iter_mut().take(1).for_each(|len| *len = *rows);
            at += rows;
            let local = LocalName { name: format!("{name}.{part}"), ..found.local.clone() };
            let leaf = Leaf { tensor: Some((*dtype, shape)), start, ..found.leaf.clone() };
            Found { local, leaf, ..*found }
        });
        Some(parts.collect())
    }
}
