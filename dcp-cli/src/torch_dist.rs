//! Options of checkpoints of Megatron-Core that are written, and the writing.

use clap::{Args, ValueEnum};
use dcp::convert::{JobOptions, Selection, Source, StatePart, WriteReport, read_object};
use dcp::core::Value;
use dcp::megatron::{COMMON_STATE, MegatronForm, MegatronWriter, ParallelLayout, to_torch_dist};

use crate::failure::Failure;
use crate::open::Opened;
use crate::target;

/// How a checkpoint of Megatron-Core is written.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct TorchDist {
    /// Tensor-parallel ranks to write for; by default as many as the source says, else 1. For
    /// torch-dist, as are the next ones.
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

    /// Which versions of Megatron-Core are to read it.
    #[arg(long, value_name = "FORM")]
    form: Option<Form>,

    /// Write an integrity.json with the SHA-256 of every file, which Megatron-Core 0.17.1 and
    /// later compare on request.
    #[arg(long)]
    integrity: bool,
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
        given.into_iter().find_map(|(given, option)| given.then_some(option))
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
        let mut layout = ParallelLayout::new(tp, pp).with_ep(size(self.ep, sizes.expert));
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
