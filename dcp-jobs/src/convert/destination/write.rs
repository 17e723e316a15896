//! The writing of a source to its destination.

use std::sync::Arc;

use dcp_core::format::WriterOptions;
use dcp_core::{CheckpointMetadata, DType, Value};
use dcp_formats::torch_save::{TorchSaveForm, TorchSaveOptions};
use dcp_planner::KeyFilter;

use crate::cast::{CastOptions, exact_tensors};
use crate::checkpoint::format::Format;
use crate::checkpoint::framework::{TargetLayout, TargetRequest};
use crate::checkpoint::model_files::Files;
use crate::checkpoint::{Checkpoint, model_files};
use crate::convert::model_folder::write_model_folder;
use crate::error::Error;
use crate::keys::{UnmatchedPattern, unmatched_patterns};
use crate::options::JobOptions;
use crate::place::same_place::SharedTarget;
use crate::place::target::{Place, TargetOptions};
use crate::source::Source;
use crate::view;
use crate::write::ConversionReport;

use super::{Destination, MAX_SHARD_BYTES, RANKS, cast_to};

/// The facts of the source that decide how it is written.
#[derive(Debug, Default)]
pub(crate) struct SourceFacts {
    /// The files that a Hugging Face model gets where no others were chosen.
    pub(crate) files: Files,
    /// The division of a target of a framework.
    pub(crate) layout: Option<Box<dyn TargetLayout>>,
    /// The object that it gets, if not the one among the keys.
    pub(crate) object: Option<Value>,
}

impl Destination {
    /// Which dtype a tensor of `metadata` gets, by its name and the dtype it has, where floats are cast.
    pub(crate) fn cast_rule(
        &self,
        metadata: &CheckpointMetadata,
    ) -> Option<impl Fn(&str, DType) -> Option<DType> + Send + Sync + use<>> {
        let (dtype, kept) = (self.dtype?, KeyFilter::any_of(&self.keep_dtype));
        let exact = exact_tensors(metadata);
        let stays = move |fqn: &str| kept.selects(fqn, None) || exact.contains(fqn);
        Some(move |fqn: &str, from| cast_to(dtype, fqn, from).filter(|_| !stays(fqn)))
    }

    fn target_options(&self, job: &JobOptions) -> TargetOptions {
        TargetOptions::default()
            .with_overwrite(self.overwrite)
            .with_dry_run(job.dry_run)
            .with_rollback(&self.rollback)
    }

    /// Writes `source`, which is made of `checkpoint`.
    pub(crate) async fn write(
        &self,
        source: &Source,
        checkpoint: &Checkpoint,
        how: SourceFacts,
        job: &JobOptions,
    ) -> Result<ConversionReport, Error> {
        let (source, cast, unmatched) = self.cast(source, job).await?;
        let source = &source;
        let place_options = self.target_options(job);
        let format = self.format()?;
        let (shared, folders) =
            SharedTarget::begin(job, format.shape(), &self.uri, &self.rollback).await?;
        let place = Place::new(&checkpoint.opener, &self.uri, &place_options);
        let place = place.held_by_rank_0(job.is_coordinator());
        let options = WriterOptions::default()
            .with_overwrite(self.overwrite)
            .with_compression(self.compression.clone());
        let mut report = match format {
            // One file is written by one process.
            Format::Safetensors | Format::TorchSave if !job.is_coordinator() => {
                ConversionReport::default()
            }
            Format::Safetensors => {
                let target = place.file().await?;
                let job = job.of_coordinator().unwrap_or_default();
                crate::convert::to_safetensors(source, &target, &job).await?
            }
            Format::TorchSave => {
                let job = &job.of_coordinator().unwrap_or_default();
                let target = place.file().await?;
                let zip = TorchSaveForm::default();
                let form = if self.legacy { TorchSaveForm::Legacy } else { zip };
                let mut how = TorchSaveOptions::from(form);
                how.device.clone_from(&self.device);
                crate::convert::to_torch_save(source, &target, how, job).await?
            }
            Format::HuggingFace => {
                let mut files = match &self.config {
                    Some(from) => model_files::files_in(&checkpoint.opener, from).await?,
                    None => Vec::new(),
                };
                if let Some(from) = &self.config {
                    model_files::refuse_damaged(&files, from)?;
                }
                model_files::complete(&mut files, how.files);
                model_files::refuse_pointers(&files)?;
                if self.config.is_some()
                    && let Some(config) = model_files::configuration(&files)
                {
                    let tensors = source.metadata().await?;
                    checkpoint.opener.frameworks.refuse_other_names(&config, &tensors)?;
                }
                if let Some(dtype) = self.dtype {
                    model_files::say_dtype(&mut files, dtype)?;
                }
                let folder = place.model().await?;
                shared.agree(&self.uri, &folder).await?;
                let folder = (&folder, &*self.uri);
                let max_bytes = self.max_shard_bytes.unwrap_or(MAX_SHARD_BYTES);
                write_model_folder(source, folder, files, max_bytes, self.overwrite, job).await?
            }
            Format::Dcp | Format::Registered(_) => {
                let target = self.target_of(&checkpoint.opener, format)?;
                if self.compression.is_some() && !target.compresses() {
                    return Err(self.not_compressed(format));
                }
                let storage = place.checkpoint(target).await?;
                shared.agree(&self.uri, &storage).await?;
                match how.layout {
                    Some(layout) => {
                        let object = how.object;
                        let request = TargetRequest { object, writer: &options, job };
                        layout.write(source, storage, request).await?
                    }
                    None => {
                        let writer = target.writer(storage, &options)?;
                        let ranks = self.ranks.unwrap_or(RANKS);
                        crate::write::reshard::reshard(source, &*writer, ranks, job).await?
                    }
                }
            }
        };
        place.release();
        if !job.dry_run {
            folders.keep();
        }
        if let (Some(cast), Some(group)) = (&cast, &job.group) {
            cast.gather_counts(group).await?;
        }
        report.cast = cast.map(|cast| cast.report());
        report.unmatched = unmatched;
        Ok(report)
    }

    /// The source with its floats cast, the cast, and patterns that match no tensor.
    async fn cast(
        &self,
        source: &Source,
        job: &JobOptions,
    ) -> Result<(Source, Option<Arc<view::Cast>>, Vec<UnmatchedPattern>), Error> {
        let metadata = source.metadata().await?;
        let tensors = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some());
        let tensors: Vec<_> = tensors.map(|(fqn, _)| (&**fqn, None)).collect();
        let unmatched = unmatched_patterns("keep-dtype", &self.keep_dtype, &tensors);
        let Some(rule) = self.cast_rule(&metadata) else {
            return Ok((source.clone(), None, unmatched));
        };
        let (source, cast) = view::Cast::apply(source, rule, CastOptions::default(), job).await?;
        Ok((source, Some(cast), unmatched))
    }
}
