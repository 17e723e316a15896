//! Checkpoints of Megatron-Core as a target, with its options.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Storage};
use dcp_jobs::framework::{
    Concern, FrameworkOptions, FrameworkTarget, Options, TargetLayout, TargetRequest,
};
use dcp_jobs::write::ConversionReport;
use dcp_jobs::{Checkpoint, Error, Format, Source};

use crate::disk::common_state::COMMON_STATE;
use crate::jobs::to_torch_dist::to_torch_dist;
use crate::open::checkpoint::MegatronCheckpoint;
use crate::partition::{ParallelLayout, PipelineSplit};
use crate::writer::{MegatronForm, MegatronWriter};

/// The name of the target.
const NAME: &str = "torch-dist";

/// A directory of Megatron-Core's `torch_dist`, as the target of a conversion.
pub const TORCH_DIST: Format = Format::Registered(NAME);

/// The layout and form of a checkpoint of Megatron-Core to write. Sizes that are `None` are those
/// of the source, where it is one of Megatron-Core, otherwise 1.
///
/// ```
/// use dcp_megatron::framework::MegatronTarget;
/// let target = MegatronTarget::new().tp(4).pp(2).integrity(true);
/// ```
#[derive(Clone, Debug, Default)]
pub struct MegatronTarget {
    /// Tensor-parallel ranks.
    tp: Option<u32>,
    /// Pipeline stages.
    pp: Option<u32>,
    /// Expert-parallel ranks.
    ep: Option<u32>,
    /// Ranks that share each expert; by default as many as tensor-parallel ranks, or as the source
    /// has where that is another number there.
    etp: Option<u32>,
    /// The division of the layers of the decoder among the stages.
    split: PipelineSplit,
    /// Which versions of Megatron-Core can read it; all since 0.6 by default.
    form: Option<MegatronForm>,
    /// Whether to write an `integrity.json`, which Megatron-Core 0.17.1 and later compare.
    integrity: bool,
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
}

impl FrameworkOptions for MegatronTarget {
    fn taken_by(&self) -> &'static str {
        super::NAME
    }

    fn concern(&self) -> Concern {
        Concern::Target(NAME)
    }

    fn subject(&self) -> &'static str {
        "the layout of Megatron-Core"
    }

    fn given(&self) -> Option<&'static str> {
        let split = &self.split;
        let given = [
            (self.form.is_some(), "`MegatronTarget::form`"),
            (self.integrity, "`MegatronTarget::integrity`"),
            (
                split.decoder_first_pipeline_num_layers.is_some(),
                "`PipelineSplit::decoder_first_pipeline_num_layers`",
            ),
            (
                split.decoder_last_pipeline_num_layers.is_some(),
                "`PipelineSplit::decoder_last_pipeline_num_layers`",
            ),
            (
                split.account_for_embedding_in_pipeline_split,
                "`PipelineSplit::account_for_embedding_in_pipeline_split`",
            ),
            (
                split.account_for_loss_in_pipeline_split,
                "`PipelineSplit::account_for_loss_in_pipeline_split`",
            ),
            (
                split.virtual_pipeline_model_parallel_size.is_some(),
                "`PipelineSplit::virtual_pipeline_model_parallel_size`",
            ),
        ];
        let other = given.into_iter().find_map(|(given, option)| given.then_some(option));
        self.size_given().or(other)
    }
}

impl MegatronTarget {
    /// The first of the numbers of ranks that is chosen.
    fn size_given(&self) -> Option<&'static str> {
        let sizes = [
            (self.tp.is_some(), "`MegatronTarget::tp`"),
            (self.pp.is_some(), "`MegatronTarget::pp`"),
            (self.ep.is_some(), "`MegatronTarget::ep`"),
            (self.etp.is_some(), "`MegatronTarget::etp`"),
        ];
        sizes.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// The ranks to write for: as chosen, else as `source` was laid out.
    async fn layout(&self, source: &Checkpoint) -> Result<ParallelLayout, Error> {
        let sizes = match source.downcast::<MegatronCheckpoint>() {
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
}

/// The target `torch-dist` of conversions.
#[derive(Debug)]
pub(super) struct TorchDist;

#[async_trait]
impl FrameworkTarget for TorchDist {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "A directory of Megatron-Core's torch_dist"
    }

    /// Megatron-Core loads no checkpoint that has no common state.
    fn required_object(&self) -> Option<&'static str> {
        Some(COMMON_STATE)
    }

    /// Whether tensors have names by which models of Megatron-Core request them: `decoder.layers.…`, one
    /// tensor for all layers or one each, or those of the embedding, without a prefix.
    fn has_own_names(&self, tensors: &CheckpointMetadata) -> bool {
        let roots = ["decoder.", "encoder.", "embedding.", "output_layer."];
        let is_tensor = |entry: &Entry| entry.as_tensor().is_some();
        tensors.iter().any(|(name, entry)| {
            is_tensor(entry) && roots.iter().any(|root| name.starts_with(root))
        })
    }

    async fn layout(
        &self,
        source: &Checkpoint,
        options: &Options,
    ) -> Result<Box<dyn TargetLayout>, Error> {
        let usual = MegatronTarget::new();
        let target = options.get::<MegatronTarget>().unwrap_or(&usual);
        Ok(Box::new(TorchDistLayout {
            ranks: target.layout(source).await?,
            form: target.form.unwrap_or(MegatronForm::CommonFile),
            integrity: target.integrity,
            divides: target.size_given(),
        }))
    }
}

/// A checkpoint of `torch_dist` to write.
struct TorchDistLayout {
    ranks: ParallelLayout,
    form: MegatronForm,
    integrity: bool,
    /// The number of ranks that was chosen, which may be what it is without an option.
    divides: Option<&'static str>,
}

impl fmt::Debug for TorchDistLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchDistLayout")
            .field("ranks", &self.ranks)
            .field("form", &self.form)
            .field("integrity", &self.integrity)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl TargetLayout for TorchDistLayout {
    fn tensor_parallel(&self) -> u32 {
        self.ranks.tp
    }

    fn divides(&self) -> Option<&'static str> {
        self.divides
    }

    async fn write(
        &self,
        source: &Source,
        storage: Arc<dyn Storage>,
        request: TargetRequest<'_>,
    ) -> Result<ConversionReport, Error> {
        let mut writer = MegatronWriter::builder(storage)
            .upload_bytes(0)
            .form(self.form)
            .integrity(self.integrity)
            .overwrite(request.writer.overwrite)
            .compression(request.writer.compression.clone())?;
        if let Some(common) = request.object {
            writer = writer.common(common);
        }
        Ok(to_torch_dist(source, writer, self.ranks, request.job).await?)
    }
}
