//! The options of a written checkpoint of Megatron-Core.

use std::sync::Arc;

use dcp_convert::keys::StatePart;
use dcp_convert::read::read_object;
use dcp_convert::{ConversionReport, JobOptions, Selection, Source};
use dcp_core::format::WriterOptions;
use dcp_core::{Storage, Value};
use dcp_megatron::disk::COMMON_STATE;
use dcp_megatron::jobs::to_torch_dist;
use dcp_megatron::partition::{ParallelLayout, PipelineSplit};
use dcp_megatron::{MegatronForm, MegatronWriter};

use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// The layout and form of a checkpoint of Megatron-Core to write. Sizes that are `None` are those
/// of the source, where it is one of Megatron-Core, otherwise 1.
///
/// ```
/// use dcp_checkpoint::MegatronTarget;
/// let target = MegatronTarget::new().tp(4).pp(2).integrity(true);
/// ```
#[derive(Clone, Debug, Default)]
pub struct MegatronTarget {
    /// Tensor-parallel ranks.
    pub(crate) tp: Option<u32>,
    /// Pipeline stages.
    pub(crate) pp: Option<u32>,
    /// Expert-parallel ranks.
    pub(crate) ep: Option<u32>,
    /// Ranks that share each expert; by default as many as tensor-parallel ranks, or as the source
    /// has where that is another number there.
    pub(crate) etp: Option<u32>,
    /// The division of the layers of the decoder among the stages.
    pub(crate) split: PipelineSplit,
    /// Which versions of Megatron-Core can read it; all since 0.6 by default.
    pub(crate) form: Option<MegatronForm>,
    /// Whether to write an `integrity.json`, which Megatron-Core 0.17.1 and later compare.
    pub(crate) integrity: bool,
}

impl MegatronTarget {
    /// The layout of the source, in the form that all versions since 0.6 read.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of tensor-parallel ranks.
    #[must_use]
    pub fn tp(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.tp = ranks.into();
        self
    }

    /// Sets the number of pipeline stages.
    #[must_use]
    pub fn pp(mut self, stages: impl Into<Option<u32>>) -> Self {
        self.pp = stages.into();
        self
    }

    /// Sets the number of expert-parallel ranks.
    #[must_use]
    pub fn ep(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.ep = ranks.into();
        self
    }

    /// Sets the number of ranks that share each expert.
    #[must_use]
    pub fn etp(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.etp = ranks.into();
        self
    }

    /// Sets how the layers are divided among the stages.
    #[must_use]
    pub fn split(mut self, split: PipelineSplit) -> Self {
        self.split = split;
        self
    }

    /// Sets the form.
    #[must_use]
    pub fn form(mut self, form: impl Into<Option<MegatronForm>>) -> Self {
        self.form = form.into();
        self
    }

    /// Sets whether an `integrity.json` is written.
    #[must_use]
    pub fn integrity(mut self, integrity: bool) -> Self {
        self.integrity = integrity;
        self
    }

    /// The first of the options that is not the default.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let split = &self.split;
        let given = [
            (self.tp.is_some(), "--tp"),
            (self.pp.is_some(), "--pp"),
            (self.ep.is_some(), "--ep"),
            (self.etp.is_some(), "--etp"),
            (self.form.is_some(), "--form"),
            (self.integrity, "--integrity"),
            (
                split.decoder_first_pipeline_num_layers.is_some(),
                "--decoder-first-pipeline-num-layers",
            ),
            (
                split.decoder_last_pipeline_num_layers.is_some(),
                "--decoder-last-pipeline-num-layers",
            ),
            (
                split.account_for_embedding_in_pipeline_split,
                "--account-for-embedding-in-pipeline-split",
            ),
            (split.account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split"),
            (split.virtual_pipeline_model_parallel_size.is_some(), "--vpp"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// The first of the numbers of ranks that is chosen.
    pub(crate) fn size_given(&self) -> Option<&'static str> {
        let sizes = [
            (self.tp.is_some(), "--tp"),
            (self.pp.is_some(), "--pp"),
            (self.ep.is_some(), "--ep"),
            (self.etp.is_some(), "--etp"),
        ];
        sizes.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// The ranks to write for: as chosen, else as `source` was laid out.
    pub(crate) async fn layout(&self, source: &Checkpoint) -> Result<ParallelLayout, Error> {
        let sizes = match &source.megatron {
            Some(checkpoint) => checkpoint.describe().await?.parallel,
            None => Default::default(),
        };
        let size = |chosen: Option<u32>, there: Option<u64>| {
            chosen.or_else(|| there.and_then(|size| u32::try_from(size).ok())).unwrap_or(1)
        };
        let (tp, pp) = (size(self.tp, sizes.tensor), size(self.pp, sizes.pipeline));
        let mut layout =
            ParallelLayout::new(tp, pp).with_ep(size(self.ep, sizes.expert)).with_split(self.split);
        let of_source = sizes.expert_tensor.filter(|size| sizes.tensor != Some(*size));
        layout.etp = self.etp.or(of_source.and_then(|size| u32::try_from(size).ok()));
        Ok(layout)
    }

    /// The form that is written, and whether with an `integrity.json`.
    pub(crate) fn written_form(&self) -> (MegatronForm, bool) {
        (self.form.unwrap_or(MegatronForm::CommonFile), self.integrity)
    }

    /// Writes `source` to a folder for the ranks of `layout`, with this common state instead of
    /// the one in `source`.
    pub(crate) async fn write(
        &self,
        source: &Source,
        storage: Arc<dyn Storage>,
        (layout, common): (ParallelLayout, Option<Value>),
        options: &WriterOptions,
        job: &JobOptions,
    ) -> Result<ConversionReport, Error> {
        let (form, integrity) = self.written_form();
        let mut writer = MegatronWriter::builder(storage)
            .upload_bytes(0)
            .form(form)
            .integrity(integrity)
            .overwrite(options.overwrite)
            .compression(options.compression)?;
        if let Some(common) = common {
            writer = writer.common(common);
        }
        Ok(to_torch_dist(source, writer, layout, job).await?)
    }
}

/// The common state of `source`, where the choice of keys neither takes nor excludes it:
/// Megatron-Core loads no checkpoint that has none.
pub(crate) async fn common_state(
    source: &Source,
    selection: &Selection,
) -> Result<Option<Value>, Error> {
    let taken = selection.include.selects(COMMON_STATE, None) && selection.part != StatePart::Model;
    let excluded = selection.exclude.as_ref().is_some_and(|e| e.selects(COMMON_STATE, None))
        || selection.mapping.contains_key(COMMON_STATE);
    if taken || excluded || source.metadata().await?.get(COMMON_STATE).is_none() {
        return Ok(None);
    }
    Ok(Some(read_object(source, COMMON_STATE).await?))
}
