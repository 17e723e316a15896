//! Options of the mapping between Megatron-Core and Hugging Face.

use clap::{Args, ValueEnum};
use dcp::mapping::{Architecture, LayerSpec, MappingOptions};

use crate::failure::Failure;

/// Which mapping is applied, and how.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Megatron-Core and Hugging Face")]
pub(crate) struct Arch {
    /// Go from Megatron-Core's weights to Hugging Face's, or the other way with --to torch-dist:
    /// a family of models (`dcp arch` lists them), a TOML file of your own, auto to recognize it,
    /// or none to keep names and shapes. It is auto from Megatron-Core to hf, and from a Hugging
    /// Face folder with a config.json to torch-dist.
    #[arg(long, value_name = "FAMILY|FILE")]
    arch: Option<String>,

    /// Pad the vocabulary to a multiple of this times --tp; 128 by default, as Megatron-LM has it.
    #[arg(
        hide_short_help = true,
        long,
        value_name = "N",
        alias = "make-vocab-size-divisible-by",
        value_parser = clap::value_parser!(u64).range(1..=1 << 32)
    )]
    make_vocab_divisible_by: Option<u64>,

    /// The layer implementation that loads the new checkpoint; names of norms differ between the
    /// two. transformer_engine by default, as in Megatron-LM.
    #[arg(hide_short_help = true, long, value_name = "IMPL")]
    transformer_impl: Option<TransformerImpl>,

    /// Leave out tensors for which the mapping has no rule, instead of failing.
    #[arg(hide_short_help = true, long)]
    allow_left_over: bool,

    /// Convert also where the other side cannot express the arguments or config.json, with a note:
    /// the new model computes something else. To hf, --config DIR implies it.
    #[arg(hide_short_help = true, long)]
    ignore_args: bool,

    /// Write an output embedding also where the model has none of its own, as a copy of the input
    /// embedding.
    #[arg(hide_short_help = true, long)]
    untie: bool,
}

/// An implementation of layers in Megatron-Core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum TransformerImpl {
    /// Those of Transformer Engine.
    TransformerEngine,
    /// Megatron-Core's own.
    Local,
}

impl Arch {
    /// Whether a mapping was named.
    pub(crate) fn is_given(&self) -> bool {
        self.arch.is_some()
    }

    /// The library's options for these.
    pub(crate) fn options(&self) -> Result<MappingOptions, Failure> {
        let arch = self.arch.as_deref().map(Architecture::named).transpose()?;
        Ok(MappingOptions::new()
            .arch(arch)
            .vocab_divisor(self.make_vocab_divisible_by)
            .layers(self.transformer_impl.map(|layers| match layers {
                TransformerImpl::TransformerEngine => LayerSpec::TransformerEngine,
                TransformerImpl::Local => LayerSpec::Local,
            }))
            .allow_left_over(self.allow_left_over)
            .ignore_args(self.ignore_args)
            .untie(self.untie))
    }
}
