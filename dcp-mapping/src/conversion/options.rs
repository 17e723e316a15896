//! Options of the mapping between names of Megatron-Core and of Hugging Face.

use std::io;
use std::path::Path;

use dcp_jobs::framework::{Concern, FrameworkOptions};
use dcp_jobs::{Error, ErrorKind, read_at_most};

use crate::map::options::LayerSpec;
use crate::mapping::Mapping;

/// Bytes of a mapping that are read at most.
const MAPPING_MAX: u64 = 16 << 20;

/// The family of models by which weights get other names and shapes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Architecture {
    /// The family that is recognized by arguments, configuration and shapes.
    Auto,
    /// None: names and shapes stay.
    Keep,
    /// A family by its name or `model_type`, or a mapping of the caller's own.
    Of(Box<Mapping>),
}

impl Architecture {
    /// `auto`, `none`, the name of a family, or the path of a mapping in TOML.
    ///
    /// # Errors
    ///
    /// When there is no such family, or the file cannot be read or is no mapping.
    pub fn named(name: &str) -> Result<Self, Error> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::Keep,
            name if name.ends_with(".toml") || name.contains('/') => {
                let bytes = read_at_most(Path::new(name), MAPPING_MAX);
                let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(invalid));
                let text = text.map_err(|error| {
                    Error::new(ErrorKind::Io, format!("cannot read the mapping {name:?}"))
                        .because(error)
                })?;
                Self::Of(Box::new(Mapping::parse(&text, name)?))
            }
            name => Self::Of(Box::new(Mapping::builtin(name)?)),
        })
    }
}

/// Which mapping is applied, and how.
///
/// By default a checkpoint of Megatron-Core becomes a Hugging Face model, and a Hugging Face
/// folder with a `config.json` a checkpoint of Megatron-Core, under the names of the other side.
///
/// ```
/// use dcp_mapping::{Architecture, MappingOptions};
/// let mapping = MappingOptions::new().arch(Architecture::named("llama")?).untie(true);
/// # Ok::<(), dcp_jobs::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct MappingOptions {
    /// The family; by default recognized where names have to change.
    pub(super) arch: Option<Architecture>,
    /// The vocabulary is padded to a multiple of this times the tensor-parallel size; 128 by
    /// default.
    pub(super) vocab_divisor: Option<u64>,
    /// The layers that load what is written; those of Transformer Engine by default.
    pub(super) layers: Option<LayerSpec>,
    /// Whether tensors without a rule are left out instead of refused.
    pub(super) allow_left_over: bool,
    /// Whether arguments that the other side cannot express are ignored, with a note.
    pub(super) ignore_args: bool,
    /// Whether an output embedding is written where the model shares the input embedding.
    pub(super) untie: bool,
}

impl FrameworkOptions for MappingOptions {
    fn taken_by(&self) -> &'static str {
        super::NAME
    }

    fn concern(&self) -> Concern {
        Concern::Names
    }

    fn subject(&self) -> &'static str {
        "the mapping of names"
    }

    fn given(&self) -> Option<&'static str> {
        let given = [
            (self.arch.is_some(), "`MappingOptions::arch`"),
            (self.vocab_divisor.is_some(), "`MappingOptions::vocab_divisor`"),
            (self.layers.is_some(), "`MappingOptions::layers`"),
            (self.allow_left_over, "`MappingOptions::allow_left_over`"),
            (self.ignore_args, "`MappingOptions::ignore_args`"),
            (self.untie, "`MappingOptions::untie`"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }
}

impl MappingOptions {
    /// The mapping that the two formats need.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the family.
    #[must_use]
    pub fn arch(mut self, arch: impl Into<Option<Architecture>>) -> Self {
        self.arch = arch.into();
        self
    }

    /// Sets that the vocabulary is padded to a multiple of `divisor` times the tensor-parallel
    /// size.
    #[must_use]
    pub fn vocab_divisor(mut self, divisor: impl Into<Option<u64>>) -> Self {
        self.vocab_divisor = divisor.into();
        self
    }

    /// Sets the kind of layers.
    #[must_use]
    pub fn layers(mut self, layers: impl Into<Option<LayerSpec>>) -> Self {
        self.layers = layers.into();
        self
    }

    /// The same, with tensors without a rule left out or refused.
    #[must_use]
    pub fn allow_left_over(mut self, allow: bool) -> Self {
        self.allow_left_over = allow;
        self
    }

    /// The same, with arguments that the other side cannot express ignored or refused.
    #[must_use]
    pub fn ignore_args(mut self, ignore: bool) -> Self {
        self.ignore_args = ignore;
        self
    }

    /// The same, with an output embedding of its own or a shared one.
    #[must_use]
    pub fn untie(mut self, untie: bool) -> Self {
        self.untie = untie;
        self
    }
}

fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
