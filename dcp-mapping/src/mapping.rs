//! A mapping: the names, operations and arguments of one family of models.

use dcp_core::DType;
use indexmap::IndexMap;
use serde_json::{Map, Value};

use crate::error::MappingError;
use crate::layout::Op;
use crate::template::{Naming, Template};

/// A mapping of one family of models: the names and layouts of its weights in Megatron-Core and in
/// Hugging Face's transformers. One mapping serves both directions.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub(crate) file: String,
    pub(crate) family: Family,
    pub(crate) recognize: Recognize,
    pub(crate) drop: Drop,
    pub(crate) rules: Vec<Rule>,
    pub(crate) copies: Vec<Copied>,
    pub(crate) config: ConfigRules,
}

/// A tensor that every layer for multi-token prediction has in Hugging Face, and which is another
/// one of the model: Megatron has it once.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    pub(crate) hf: Template,
    pub(crate) of: Template,
}

#[derive(Clone, Debug)]
pub(crate) struct Family {
    pub(crate) name: String,
    pub(crate) title: String,
    /// The program whose names the other side has, where it is not Megatron-Core.
    pub(crate) program: Option<String>,
    pub(crate) model_types: Vec<String>,
    pub(crate) hf_prefixes: Vec<String>,
    pub(crate) megatron_prefixes: Vec<String>,
}

/// The features that identify a Megatron checkpoint of the family.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recognize {
    pub(crate) has: Vec<Template>,
    pub(crate) lacks: Vec<Template>,
    pub(crate) gated: Option<bool>,
    /// Values that arguments have, or `"set"`.
    pub(crate) args: Map<String, Value>,
}

/// Tensors that may be left out, as globs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drop {
    pub(crate) hf: Vec<String>,
    pub(crate) megatron: Vec<String>,
}

/// The rules between arguments of Megatron and fields of `config.json`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConfigRules {
    pub(crate) constants: Map<String, Value>,
    /// Fields that are written when no argument has them.
    pub(crate) defaults: Map<String, Value>,
    /// Fields of `config.json` and Megatron's arguments; `!` in front of one negates it.
    pub(crate) fields: IndexMap<String, String>,
    /// Fields that have to be written: what transformers takes instead is that of another model.
    pub(crate) required: Vec<String>,
    /// The values that transformers uses for fields that `config.json` lacks.
    pub(crate) absent: Map<String, Value>,
    /// The values of Megatron's arguments for every model of the family.
    pub(crate) args: Map<String, Value>,
    /// The usual values of arguments that change nothing, or nothing beyond the tensors.
    pub(crate) usual: Map<String, Value>,
    pub(crate) rope: Option<String>,
    pub(crate) moe_layers: Option<String>,
    /// Whether attention may be within a window.
    pub(crate) window: bool,
    /// The field that says which GELU it is.
    pub(crate) gelu: Option<String>,
    /// The number of its best experts by which transformers scores a group of experts.
    pub(crate) group_score: Option<u64>,
}

/// One Megatron tensor, and what it is in Hugging Face.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) line: usize,
    pub(crate) name: String,
    pub(crate) hf: Vec<Template>,
    /// The name that is written, and others that are read as well.
    pub(crate) megatron: Vec<Template>,
    /// The index of the name that Megatron's local layer specification writes, where it is another.
    pub(crate) local: Option<usize>,
    pub(crate) op: Op,
    pub(crate) transpose: bool,
    /// For each axis of the tensor, the settings of `config.json` whose product it is.
    pub(crate) shape: Vec<Vec<String>>,
    pub(crate) optional: bool,
    pub(crate) layers: Layers,
    pub(crate) instead: Option<String>,
    pub(crate) tied_to: Option<String>,
    pub(crate) hf_dtype: Option<DType>,
    pub(crate) megatron_dtype: Option<DType>,
}

/// The layers that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Layers {
    All,
    Dense,
    Moe,
}

impl Mapping {
    /// The family's name, such as `llama`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.family.name
    }

    /// The family's name for people, such as `Llama 2 and 3`.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.family.title
    }

    /// The program whose names the mapping gives to tensors of Hugging Face and takes from others, where
    /// it is not Megatron-Core. Its checkpoints have no padding, stacked layers or arguments.
    #[must_use]
    pub fn program(&self) -> Option<&str> {
        self.family.program.as_deref()
    }

    /// Whether a tensor has this name in the program that the other side is of.
    #[must_use]
    pub fn names_in_program(&self, fqn: &str) -> bool {
        let names = self.rules.iter().flat_map(|rule| &rule.megatron);
        let prefixes = &self.family.megatron_prefixes;
        let namings = prefixes.iter().map(|prefix| Naming { prefix: prefix.clone(), mtp_from: 0 });
        let namings: Vec<_> = namings.collect();
        let mut both = names.flat_map(|name| namings.iter().map(move |naming| (name, naming)));
        both.any(|(name, naming)| name.numbers(fqn, naming).is_some())
    }

    /// The `model_type`s in transformers' `config.json` that this mapping is for.
    #[must_use]
    pub fn model_types(&self) -> &[String] {
        &self.family.model_types
    }

    /// Whether a tensor of the family has this name in transformers, below any prefix or without
    /// that of the model, as in a base model.
    #[must_use]
    pub fn names_in_hf(&self, fqn: &str) -> bool {
        let naming = Naming::default();
        let has = |name: &str| {
            let mut forms = self.rules.iter().flat_map(|rule| &rule.hf);
            forms.any(|form| form.numbers(name, &naming).is_some())
        };
        let dots = fqn.match_indices('.').map(|(at, _)| at + 1);
        [0].into_iter().chain(dots).any(|start| has(&fqn[start..])) || has(&format!("model.{fqn}"))
    }

    pub(crate) fn error(&self, rule: &Rule, problem: impl Into<String>) -> MappingError {
        MappingError::Rule {
            file: self.file.clone(),
            line: rule.line,
            rule: rule.name.clone(),
            problem: problem.into(),
        }
    }
}

impl ConfigRules {
    /// Whether positions may be interpolated linearly.
    pub(crate) fn linear_rope(&self) -> bool {
        matches!(self.rope.as_deref(), Some("plain" | "llama3"))
    }
}
