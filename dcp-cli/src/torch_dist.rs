//! Options of checkpoints of Megatron-Core that are written, and the writing.

use clap::{Args, ValueEnum};
use dcp::convert::{JobOptions, Selection, Source, StatePart, WriteReport, read_object};
use dcp::core::Value;
use dcp::megatron::{
    COMMON_STATE, MegatronForm, MegatronWriter, ParallelLayout, PipelineSplit, to_torch_dist,
};

use crate::failure::Failure;
use crate::open::Opened;
use crate::target;

/// How a checkpoint of Megatron-Core is written.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct TorchDist {
    /// Tensor-parallel ranks to write for; by default as many as the source has, else 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tp: Option<u32>,

    /// Pipeline stages to write for.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pp: Option<u32>,

    /// Expert-parallel ranks to write for.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ep: Option<u32>,

    /// Ranks that share each expert, to write for; by default as many as --tp, or as the source has
    /// where that has another number than its --tp.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    etp: Option<u32>,

    #[command(flatten)]
    split: Split,

    /// Which versions of Megatron-Core are to read it.
    #[arg(long, value_name = "FORM")]
    form: Option<Form>,

    /// Write an integrity.json with the SHA-256 of every file, which Megatron-Core 0.17.1 and
    /// later compare on request.
    #[arg(long)]
    integrity: bool,
}

/// How the decoder's layers are divided among pipeline stages, by the names that Megatron-LM has for
/// it.
#[derive(Args, Clone, Copy, Debug, Default)]
struct Split {
    /// Layers of the first pipeline stage; the other stages share what is left. Without any of
    /// these options stages are as in the source, where it has as many of them, else equal.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    decoder_first_pipeline_num_layers: Option<u32>,

    /// Layers of the last pipeline stage.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    decoder_last_pipeline_num_layers: Option<u32>,

    /// Count the embedding as a layer of the first pipeline stage.
    #[arg(long)]
    account_for_embedding_in_pipeline_split: bool,

    /// Count the loss as a layer of the last pipeline stage.
    #[arg(long)]
    account_for_loss_in_pipeline_split: bool,

    /// Chunks of layers of each pipeline stage, for an interleaved schedule.
    #[arg(
        long,
        value_name = "N",
        alias = "num-virtual-stages-per-pipeline-rank",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    vpp: Option<u32>,
}

impl Split {
    fn given(&self) -> Option<&'static str> {
        let given = [
            (
                self.decoder_first_pipeline_num_layers.is_some(),
                "--decoder-first-pipeline-num-layers",
            ),
            (self.decoder_last_pipeline_num_layers.is_some(), "--decoder-last-pipeline-num-layers"),
            (
                self.account_for_embedding_in_pipeline_split,
                "--account-for-embedding-in-pipeline-split",
            ),
            (self.account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split"),
            (self.vpp.is_some(), "--vpp"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }

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
    /// The first of the options that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let given = [
            (self.tp.is_some(), "--tp"),
            (self.pp.is_some(), "--pp"),
            (self.ep.is_some(), "--ep"),
            (self.etp.is_some(), "--etp"),
            (self.form.is_some(), "--form"),
            (self.integrity, "--integrity"),
        ];
        let given = given.into_iter().find_map(|(given, option)| given.then_some(option));
        given.or_else(|| self.split.given())
    }

    /// The ranks to write for: as asked for, else as `source` was laid out.
    pub(crate) async fn layout(&self, source: &Opened) -> Result<ParallelLayout, Failure> {
        let sizes = match &source.megatron {
            Some(checkpoint) => checkpoint.describe().await?.parallel,
            None => Default::default(),
        };
        let size = |asked: Option<u32>, there: Option<u64>| {
            asked.or_else(|| there.and_then(|size| u32::try_from(size).ok())).unwrap_or(1)
        };
        let (tp, pp) = (size(self.tp, sizes.tensor), size(self.pp, sizes.pipeline));
        let mut layout = ParallelLayout::new(tp, pp)
            .with_ep(size(self.ep, sizes.expert))
            .with_split(self.split.of_layers());
        let of_source = sizes.expert_tensor.filter(|size| sizes.tensor != Some(*size));
        layout.etp = self.etp.or(of_source.and_then(|size| u32::try_from(size).ok()));
        Ok(layout)
    }

    /// The common state of `source`, where keys were chosen without a word of it: Megatron-Core
    /// loads no checkpoint that has none.
    pub(crate) async fn common(
        source: &Source,
        selection: &Selection,
    ) -> Result<Option<Value>, Failure> {
        let taken =
            selection.include.selects(COMMON_STATE, None) && selection.part != StatePart::Model;
        let excluded = selection.exclude.as_ref().is_some_and(|e| e.selects(COMMON_STATE, None))
            || selection.mapping.contains_key(COMMON_STATE);
        if taken || excluded || source.metadata().await?.get(COMMON_STATE).is_none() {
            return Ok(None);
        }
        Ok(Some(read_object(source, COMMON_STATE).await?))
    }

    /// Writes `source` to the directory `target` for the ranks of `layout`, with this common state
    /// instead of the one in `source`.
    pub(crate) async fn write(
        &self,
        source: &Source,
        target: &str,
        (layout, common): (ParallelLayout, Option<Value>),
        overwrite: bool,
        options: &JobOptions,
    ) -> Result<WriteReport, Failure> {
        let storage = target::megatron(target, overwrite, options.dry_run).await?;
        let mut writer = MegatronWriter::builder(storage)
            .form(match self.form {
                None | Some(Form::Compatible) => MegatronForm::CommonFile,
                Some(Form::Newest) => MegatronForm::CommonInside,
            })
            .integrity(self.integrity)
            .overwrite(overwrite);
        if let Some(common) = common {
            writer = writer.common(common);
        }
        Ok(to_torch_dist(source, writer, layout, options).await?)
    }
}
