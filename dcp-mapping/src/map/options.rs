//! The direction and options of a mapping.

use dcp_core::DType;
use dcp_core::value::Dict;
use serde::Serialize;

/// Which way a checkpoint goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Direction {
    /// From Megatron-Core to Hugging Face.
    ToHf,
    /// From Hugging Face to Megatron-Core.
    ToMegatron,
}

/// How a mapping is applied.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MapOptions {
    /// How layers are written to Megatron.
    pub layers: LayerForm,
    /// Which of Megatron's names for layer norms are written.
    pub spec: LayerSpec,
    /// What happens to an output embedding.
    pub tying: Tying,
    /// More source tensors to leave out, as globs.
    pub drop: Vec<String>,
    /// Whether source tensors without a rule are left out instead of refused.
    pub allow_left_over: bool,
    /// Whether arguments that transformers cannot express are only noted: for a model that will be
    /// opened with a `config.json` of its own, or because the caller has it.
    pub ignore_arguments: bool,
    /// What the weights will be cast to behind the mapping, for the arguments and `config.json`; by
    /// default they say what the weights are.
    pub params_dtype: Option<DType>,
    /// More for the common state of a Megatron checkpoint; entries here replace those made from
    /// the facts.
    pub common: Option<Dict>,
}

/// How layers are written to Megatron.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerForm {
    /// As Megatron itself does it: one tensor with a leading axis when all layers have the same
    /// tensors, else layer by layer.
    #[default]
    Auto,
    /// One tensor with a leading axis.
    Stacked,
    /// `decoder.layers.3.…`, a tensor for each layer.
    PerLayer,
}

/// Which of Megatron's names for layer norms are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerSpec {
    /// Those of models with Transformer Engine.
    #[default]
    TransformerEngine,
    /// Those of the local layer specification.
    Local,
}

/// What happens to an output embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tying {
    /// It is there when it is in the source (and no configuration says that it counts for
    /// nothing).
    #[default]
    AsItIs,
    /// It is left out.
    Tie,
    /// Where it is missing, it is a copy of the input embedding.
    Untie,
}
