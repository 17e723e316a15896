//! The direction and options of a mapping.

use dcp_core::DType;
use dcp_core::value::Dict;
use serde::Serialize;

/// The direction of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Direction {
    /// From Megatron-Core to Hugging Face.
    ToHf,
    /// From Hugging Face to Megatron-Core.
    ToMegatron,
}

/// Options of a mapping.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MapOptions {
    /// The form of layers in a Megatron checkpoint.
    pub layers: LayerForm,
    /// The layer specification whose names for layer norms are written to Megatron.
    pub spec: LayerSpec,
    /// The treatment of an output embedding.
    pub tying: Tying,
    /// More source tensors to leave out, as globs.
    pub drop: Vec<String>,
    /// Whether source tensors without a rule are left out instead of refused.
    pub allow_left_over: bool,
    /// Whether arguments that transformers cannot express are only noted: for a model that will be
    /// opened with a `config.json` of its own, or because the caller has it.
    pub ignore_arguments: bool,
    /// The dtype to which a later cast brings the weights, for the arguments and `config.json`; by
    /// default these have the dtype of the weights.
    pub params_dtype: Option<DType>,
    /// More for the common state of a Megatron checkpoint; entries here replace those made from
    /// the facts.
    pub common: Option<Dict>,
}

/// The form of layers in a Megatron checkpoint.
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

/// The layer specification whose names for layer norms are written to Megatron.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerSpec {
    /// The names of models with Transformer Engine.
    #[default]
    TransformerEngine,
    /// The names of the local layer specification.
    Local,
}

/// The treatment of an output embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tying {
    /// It is there when it is in the source (and no configuration says that it counts for
    /// nothing).
    #[default]
    AsItIs,
    /// It is left out.
    Tie,
    /// A copy of the input embedding replaces a missing one.
    Untie,
}
