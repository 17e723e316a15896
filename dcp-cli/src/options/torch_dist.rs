//! Options for writing Megatron-Core checkpoints.

use clap::{Args, ValueEnum};
use dcp::megatron::MegatronForm;
use dcp::megatron::framework::MegatronTarget;
use dcp::megatron::partition::PipelineSplit;

/// How a checkpoint of Megatron-Core is written.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct TorchDist {
    /// Tensor-parallel ranks to write for; by default as many as the source has, else 1.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tp: Option<u32>,

    /// Pipeline stages to write for.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pp: Option<u32>,

    /// Expert-parallel ranks to write for.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ep: Option<u32>,

    /// Ranks that share each expert, to write for; by default as many as --tp, or as the source has
    /// where that has another number than its --tp.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    etp: Option<u32>,

    #[command(flatten)]
    split: Split,

    /// The versions of Megatron-Core that can read it.
    #[arg(hide_short_help = true, long, value_name = "FORM")]
    form: Option<Form>,

    /// Write an integrity.json with the SHA-256 of every file, which Megatron-Core 0.17.1 and
    /// later compare on request.
    #[arg(hide_short_help = true, long)]
    integrity: bool,
}

/// How the decoder's layers are divided among pipeline stages, by the names that Megatron-LM has for
/// it.
#[derive(Args, Clone, Copy, Debug, Default)]
struct Split {
    /// Layers of the first pipeline stage; the other stages share what is left. Without any of
    /// these options stages are as in the source, where it has as many of them, else equal.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    decoder_first_pipeline_num_layers: Option<u32>,

    /// Layers of the last pipeline stage.
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    decoder_last_pipeline_num_layers: Option<u32>,

    /// Count the embedding as a layer of the first pipeline stage.
    #[arg(hide_short_help = true, long)]
    account_for_embedding_in_pipeline_split: bool,

    /// Count the loss as a layer of the last pipeline stage.
    #[arg(hide_short_help = true, long)]
    account_for_loss_in_pipeline_split: bool,

    /// Chunks of layers of each pipeline stage, for an interleaved schedule.
    #[arg(
        hide_short_help = true,
        long,
        value_name = "N",
        alias = "num-virtual-stages-per-pipeline-rank",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    vpp: Option<u32>,
}

impl Split {
    fn of_layers(&self) -> PipelineSplit {
        let mut split = PipelineSplit::default();
        split.decoder_first_pipeline_num_layers = self.decoder_first_pipeline_num_layers;
        split.decoder_last_pipeline_num_layers = self.decoder_last_pipeline_num_layers;
        split.account_for_embedding_in_pipeline_split =
            self.account_for_embedding_in_pipeline_split;
        split.account_for_loss_in_pipeline_split = self.account_for_loss_in_pipeline_split;
        split.virtual_pipeline_model_parallel_size = self.vpp;
        split
    }
}

/// A form of `torch_dist`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Every version since 0.6: with a common.pt.
    Compatible,
    /// Only 0.19 and later: with the common state among the objects.
    Newest,
}

impl TorchDist {
    /// The library's options for these.
    pub(crate) fn target(&self) -> MegatronTarget {
        MegatronTarget::new()
            .tp(self.tp)
            .pp(self.pp)
            .ep(self.ep)
            .etp(self.etp)
            .split(self.split.of_layers())
            .form(self.form.map(|form| match form {
                Form::Compatible => MegatronForm::CommonFile,
                Form::Newest => MegatronForm::CommonInside,
            }))
            .integrity(self.integrity)
    }
}
