//! Maps a checkpoint to the names and layout of the other side.

mod common_state;
mod compile;
mod extra_state;
pub(crate) mod options;
mod resolve;
mod stated_shapes;
mod tensor_lookup;

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointMetadata, DType, Value};
use dcp_jobs::cast::CastOptions;
use dcp_jobs::view::{Assembled, Cast};
use dcp_jobs::{JobOptions, Source};
use serde::Serialize;

use crate::config::incompatibilities::{same, settle};
use crate::error::MappingError;
use crate::facts::{Facts, bad};
use crate::map::compile::Compiler;
use crate::map::extra_state::extra_states;
use crate::map::options::{Direction, LayerForm, MapOptions};
use crate::map::resolve::{Resolved, Resolver};
use crate::mapping::Mapping;
use crate::recognize::shapes::Shapes;

/// A mapped checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Mapped {
    /// The checkpoint as any job reads it.
    pub source: Source,
    /// The report of the mapping.
    pub report: MappingReport,
    /// The facts, with those from shapes.
    pub facts: Facts,
}

/// The report of a mapping: tensors used, made and left out.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MappingReport {
    /// The mapping's name.
    pub family: String,
    /// The program of the other side, where it is not Megatron-Core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The direction of the mapping.
    pub direction: Direction,
    /// Source tensors that were used.
    pub used: Vec<Arc<str>>,
    /// Source tensors and objects that belong to no model: optimizer, random states, buffers.
    pub dropped: Vec<Arc<str>>,
    /// Source tensors without a rule, when that is allowed.
    pub left_over: Vec<Arc<str>>,
    /// Tensors made.
    pub created: Vec<String>,
    /// Tensors with rows of zeros added, and how many.
    pub padded: Vec<(String, u64)>,
    /// Tensors with rows of padding left out, and how many.
    pub trimmed: Vec<(String, u64)>,
    /// Whether input and output embeddings are one.
    pub tied: bool,
    /// An output embedding of the source that is not taken because they are one, and the input embedding.
    /// Nothing says that they hold the same values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untaken: Option<(Arc<str>, Arc<str>)>,
    /// Other notes, such as arguments that differ from those of the family.
    pub notes: Vec<String>,
}

/// A Megatron checkpoint's weights as transformers has them. `source` is the logical view of it
/// (`dcp_megatron::MegatronCheckpoint::source`), `facts` come from its arguments.
///
/// # Errors
///
/// [`MappingError`] when a tensor is missing, left over or of a shape that does not fit, or when an
/// argument says what no model of the family does in transformers
/// ([`ignore_arguments`](MapOptions::ignore_arguments)).
pub async fn map_to_hf(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    options: &MapOptions,
    job: &JobOptions,
) -> Result<Mapped, MappingError> {
    map(source, mapping, facts, options, job, Direction::ToHf).await
}

/// A transformers model's weights as Megatron-Core has them, with a common state that holds the
/// model's arguments, or as the [program](Mapping::program) of the mapping has them. `facts` come from
/// its `config.json` ([`Mapping::facts_of_config`]).
///
/// # Errors
///
/// As [`map_to_hf`].
pub async fn map_to_megatron(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    options: &MapOptions,
    job: &JobOptions,
) -> Result<Mapped, MappingError> {
    map(source, mapping, facts, options, job, Direction::ToMegatron).await
}

async fn map(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    options: &MapOptions,
    job: &JobOptions,
    direction: Direction,
) -> Result<Mapped, MappingError> {
    let metadata = source.metadata().await?;
    let (mut known, mut notes) = (facts.clone(), Vec::new());
    let mut unlike = Vec::new();
    if direction == Direction::ToHf {
        let shapes = Shapes::of(&metadata, mapping);
        refuse_other_layouts(mapping, &shapes, facts)?;
        settle(mapping.beyond_hf(facts)?, options.ignore_arguments, &mut notes)?;
        shapes.complete(&mut known)?;
        unlike = crate::recognize::family_check::fit(mapping, &shapes, &mut known)?;
    }
    let stated = facts;
    let mut facts = known.clone();
    // Only checkpoints of Megatron-Core stack layers, and have arguments and states of layers.
    let is_megatron = mapping.program().is_none() && direction == Direction::ToMegatron;
    let mut options = options.clone();
    if mapping.program().is_some() {
        options.layers = LayerForm::PerLayer;
    }
    let options = &options;
    let resolved = Resolver::new(mapping, &metadata, &known, options, direction).resolve()?;
    stated_shapes::check(mapping, &metadata, &resolved, stated)?;
    let compiler = Compiler {
        mapping,
        metadata: &metadata,
        facts: &known,
        options,
        direction,
        resolved: &resolved,
    };
    let targets = compiler.compile()?;
    let mut report = report(mapping, direction, &resolved, &metadata);
    report.notes.append(&mut notes);
    report.notes.append(&mut unlike);
    let mut view = Assembled::builder(std::slice::from_ref(source), job).await?;
    let mut casts: HashMap<String, DType> = HashMap::new();
    for (name, target) in targets {
        if let Some(dtype) = target.cast {
            casts.insert(name.clone(), dtype);
        }
        if target.padded > 0 {
            report.padded.push((name.clone(), target.padded));
        }
        if target.trimmed > 0 {
            report.trimmed.push((name.clone(), target.trimmed));
        }
        if is_megatron {
            let grid = target.shape.get(..target.lead).unwrap_or_default();
            for key in extra_states(&name, grid, options.spec) {
                // Megatron has every object in a list of its own.
                view.object(key, None, Value::List(vec![Value::None]))?;
            }
        }
        report.created.push(name.clone());
        match target.same_as {
            Some(entry) => view.pass(name, None, 0, entry)?,
            None => view.tensor(name, None, target.dtype, target.shape, target.pieces)?,
        }
    }
    match direction {
        Direction::ToHf => {
            note_vocabulary(&facts, &report.trimmed, &mut report.notes)?;
            note_arguments(mapping, &facts, &mut report.notes);
        }
        Direction::ToMegatron if is_megatron => {
            learn(&mut facts, mapping, &resolved, view.metadata(), &report.padded)?;
        }
        _ => {}
    }
    facts.set("untie_embeddings_and_output_weights", !resolved.tied);
    if let Some(freq) = resolved.moe_layer_freq() {
        facts.set("moe_layer_freq", freq);
    }
    let stored = view.metadata().iter().find_map(|(_, e)| Some(e.as_tensor()?.dtype));
    if let Some(dtype) = options.params_dtype.or(stored) {
        facts.set("params_dtype", format!("torch.{dtype}"));
    }
    if is_megatron {
        let mut common = common_state::common_state(&facts);
        for (key, value) in options.common.clone().into_iter().flatten() {
            common.insert(key, value);
        }
        view.object("common_state", None, Value::Dict(common))?;
    }
    let mut source = view.finish()?;
    if !casts.is_empty() {
        let rule = |fqn: &str, _| casts.get(fqn).copied();
        source = Cast::apply(&source, rule, CastOptions::default(), job).await?.0;
    }
    Ok(Mapped { source, report, facts })
}

fn report(
    mapping: &Mapping,
    direction: Direction,
    resolved: &Resolved<'_>,
    metadata: &CheckpointMetadata,
) -> MappingReport {
    let instances = resolved.active.iter().flat_map(|active| &active.instances);
    let mut used: Vec<usize> =
        instances.flat_map(|i| i.sources.iter().map(|source| source.entry)).collect();
    used.sort_unstable();
    used.dedup();
    MappingReport {
        family: mapping.family.name.clone(),
        program: mapping.family.program.clone(),
        direction,
        used: used.iter().filter_map(|e| Some(Arc::clone(metadata.at(*e)?.0))).collect(),
        dropped: resolved.dropped.clone(),
        left_over: resolved.left_over.clone(),
        created: Vec::new(),
        padded: Vec::new(),
        trimmed: Vec::new(),
        tied: resolved.tied,
        untaken: resolved.untaken.clone(),
        notes: resolved.notes.clone(),
    }
}

/// Refuses weights that mean something else than the same ones in transformers.
fn refuse_other_layouts(
    mapping: &Mapping,
    shapes: &Shapes,
    facts: &Facts,
) -> Result<(), MappingError> {
    const OTHER: &[(&str, &str)] = &[
        ("layernorm_zero_centered_gamma", "the weights of norms are stored less 1"),
        ("apply_layernorm_1p", "the weights of norms are stored less 1"),
        ("rotary_interleaved", "rotary positions turn neighboring channels"),
        ("attention_output_gate", "attention has an output gate"),
        ("apply_residual_connection_post_layernorm", "residuals go past the norms"),
    ];
    for (arg, meaning) in OTHER {
        if facts.get_bool(arg) == Some(true) {
            let problem =
                format!("{meaning}, which no model of transformers does that is known here");
            return Err(bad(arg, &true.into(), &problem));
        }
    }
    if let (Some(expected), Some(found)) = (mapping.recognize.gated, shapes.gated())
        && expected != found
    {
        let has = |gated| if gated { "a gated MLP" } else { "an MLP without a gate" };
        let why = format!("it has {}, they have {}", has(found), has(expected));
        return Err(MappingError::OtherFamily { family: mapping.family.name.clone(), why });
    }
    Ok(())
}

/// Says which arguments are others than the family's.
fn note_arguments(mapping: &Mapping, facts: &Facts, notes: &mut Vec<String>) {
    for (arg, usual) in &mapping.config.usual {
        if let Some(value) = facts.get(arg).filter(|value| !same(value, usual)) {
            notes.push(format!(
                "the argument {arg} is {value}, where models of the family {:?} have {usual}",
                mapping.name()
            ));
        }
    }
}

/// Notes that padding looks like the vocabulary.
fn note_vocabulary(
    facts: &Facts,
    trimmed: &[(String, u64)],
    notes: &mut Vec<String>,
) -> Result<(), MappingError> {
    if trimmed.is_empty() && facts.vocab_size()?.is_none() {
        notes.push(
            "the vocabulary keeps all its rows, padding included if there is any: the arguments \
             have no size (vocab_size) that padding makes so many rows"
                .to_owned(),
        );
    }
    Ok(())
}

const INPUT_EMBEDDING: &str = "embedding.word_embeddings.weight";
const OUTPUT_EMBEDDING: &str = "output_layer.weight";

/// Facts from the tensors of a model, for the arguments of its Megatron checkpoint.
fn learn(
    facts: &mut Facts,
    mapping: &Mapping,
    resolved: &Resolved<'_>,
    made: &CheckpointMetadata,
    padded: &[(String, u64)],
) -> Result<(), MappingError> {
    let shapes = Shapes::of(made, mapping);
    shapes.complete(facts)?;
    facts.set("num_layers", resolved.layers);
    let without_padding = |name: &str| {
        let mut shape = shapes.get(name)?.to_vec();
        let added = padded.iter().find(|(padded, _)| padded.ends_with(name));
        let rows = shape.first_mut()?;
        *rows = rows.saturating_sub(added.map_or(0, |(_, added)| *added));
        Some(shape)
    };
    if let (Some(input), Some(output)) =
        (without_padding(INPUT_EMBEDDING), without_padding(OUTPUT_EMBEDDING))
        && input != output
    {
        let problem = format!(
            "the output embedding has shape {output:?} without padding, the input embedding {input:?}"
        );
        return Err(bad("vocab_size", &input.first().copied().into(), &problem));
    }
    if let Some(rows) = shapes.vocabulary() {
        facts.set("padded_vocab_size", rows);
        let added = padded.first().map_or(0, |(_, added)| *added);
        facts.set("vocab_size", rows.saturating_sub(added));
    }
    let mtp = Some(resolved.mtp_layers).filter(|layers| *layers > 0);
    facts.set("mtp_num_layers", serde_json::Value::from(mtp));
    Ok(())
}
