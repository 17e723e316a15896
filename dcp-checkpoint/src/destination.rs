//! Formats and options of a written checkpoint, and the writing.

use std::fmt;
use std::path::{Path, PathBuf};

use dcp_convert::cast::{CastOptions, exact_tensors, is_exact};
use dcp_convert::keys::unmatched_patterns;
use dcp_convert::{ConversionReport, JobOptions, Source, view};
use dcp_core::format::{CheckpointTarget, Compression, WriterOptions};
use dcp_core::text::without_secrets;
use dcp_core::{CheckpointMetadata, DType, Value};
use dcp_formats::hf::CONFIG_NAME;
use dcp_formats::torch_save::{TorchSaveForm, TorchSaveOptions};
use dcp_mapping::MappingReport;
use dcp_megatron::partition::ParallelLayout;
use dcp_planner::KeyFilter;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::format::Format;
use crate::mapping::has_megatron_names;
use crate::megatron_target::MegatronTarget;
use crate::model_files::{self, Files};
use crate::new_folders::NewFolders;
use crate::opener::Opener;
use crate::overlap_guard::keep_apart;
use crate::rollback::Rollback;
use crate::same_place::{SharedTarget, Work};
use crate::target::{Place, TargetOptions};

/// The most bytes of tensors in a file of a Hugging Face model, as transformers has it.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;
/// The ranks that a checkpoint is written for without an option.
const RANKS: u32 = 1;

/// The URL and the format of a written checkpoint. A text alone is a file or directory of the format
/// that its name says.
///
/// ```
/// use dcp_checkpoint::{Destination, Format};
/// use dcp_core::DType;
///
/// let model = Destination::new("my-model").to(Format::HuggingFace).dtype(DType::BFloat16);
/// let model = model.keep_dtype("*.norm.weight").config("original-model").overwrite(true);
/// # drop(model);
/// ```
#[derive(Clone)]
pub struct Destination {
    uri: String,
    format: Option<Format>,
    ranks: Option<u32>,
    dtype: Option<DType>,
    keep_dtype: Vec<String>,
    max_shard_bytes: Option<u64>,
    config: Option<PathBuf>,
    legacy: bool,
    device: Option<String>,
    pub(crate) megatron: MegatronTarget,
    compression: Option<Compression>,
    overwrite: bool,
    rollback: Rollback,
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination")
            .field("uri", &without_secrets(&self.uri))
            .field("format", &self.format)
            .field("dtype", &self.dtype)
            .field("overwrite", &self.overwrite)
            .finish_non_exhaustive()
    }
}

impl From<&str> for Destination {
    fn from(uri: &str) -> Self {
        Self::new(uri)
    }
}

impl From<String> for Destination {
    fn from(uri: String) -> Self {
        Self::new(uri)
    }
}

impl From<&String> for Destination {
    fn from(uri: &String) -> Self {
        Self::new(uri)
    }
}

impl Destination {
    /// A file or directory of the format that its name says.
    #[must_use]
    pub fn new(uri: impl Into<String>) -> Self {
        Self {
            uri: uri.into(),
            format: None,
            ranks: None,
            dtype: None,
            keep_dtype: Vec::new(),
            max_shard_bytes: None,
            config: None,
            legacy: false,
            device: None,
            megatron: MegatronTarget::default(),
            compression: None,
            overwrite: false,
            rollback: Rollback::new(),
        }
    }

    /// Writes this format; by default the one that the name says.
    #[must_use]
    pub fn to(mut self, format: impl Into<Option<Format>>) -> Self {
        self.format = format.into();
        self
    }

    /// Writes for this number of ranks, each of which gets a file. For [`Format::Dcp`] and
    /// [`Format::Registered`].
    #[must_use]
    pub fn ranks(mut self, ranks: impl Into<Option<u32>>) -> Self {
        self.ranks = ranks.into();
        self
    }

    /// Casts floats to this dtype, as [`cast_to`] says of each.
    #[must_use]
    pub fn dtype(mut self, dtype: impl Into<Option<DType>>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// Keeps the dtype of keys that match this pattern of new names.
    #[must_use]
    pub fn keep_dtype(mut self, pattern: impl Into<String>) -> Self {
        self.keep_dtype.push(pattern.into());
        self
    }

    /// The most bytes of tensors in a file; 5 GB by default. For [`Format::HuggingFace`].
    #[must_use]
    pub fn max_shard_bytes(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.max_shard_bytes = bytes.into();
        self
    }

    /// Copies configuration and tokenizer from this directory, or the one with this `config.json`; by
    /// default those of a Hugging Face source. For [`Format::HuggingFace`], and for
    /// [`Format::TorchDist`] with a mapping, which reads the model from it.
    #[must_use]
    pub fn config(mut self, directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        let is_file = directory.file_name().is_some_and(|name| name == CONFIG_NAME);
        let folder = directory.parent().filter(|_| is_file && directory.is_file());
        self.config = Some(match folder {
            Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
            Some(folder) => folder.to_owned(),
            None => directory,
        });
        self
    }

    /// Writes the stream that PyTorch before 1.6 reads. For [`Format::TorchSave`].
    #[must_use]
    pub fn legacy(mut self, legacy: bool) -> Self {
        self.legacy = legacy;
        self
    }

    /// Records this device for all tensors; by default those of a `torch.save` file keep theirs,
    /// such as `cuda:0`. For [`Format::TorchSave`].
    #[must_use]
    pub fn device(mut self, device: impl Into<Option<String>>) -> Self {
        self.device = device.into();
        self
    }

    /// The layout and form of Megatron-Core's. For [`Format::TorchDist`].
    #[must_use]
    pub fn megatron(mut self, megatron: MegatronTarget) -> Self {
        self.megatron = megatron;
        self
    }

    /// Compresses the data. For [`Format::Dcp`], [`Format::TorchDist`], and a
    /// [`Format::Registered`] that does.
    #[must_use]
    pub fn compression(mut self, compression: impl Into<Option<Compression>>) -> Self {
        self.compression = compression.into();
        self
    }

    /// Replaces a target of the same format; until the new one is complete, the old one stays.
    #[must_use]
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Records what is created in `rollback`.
    #[must_use]
    pub fn rollback(mut self, rollback: &Rollback) -> Self {
        self.rollback = rollback.clone();
        self
    }

    /// The URL that is written.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The format that is written.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) when neither an option nor the name says the
    /// format, and for options of another one.
    pub fn format(&self) -> Result<Format, Error> {
        let format = match self.format {
            Some(format) => format,
            None => Format::of_name(&self.uri)?,
        };
        let megatron = self.megatron.given();
        let has_ranks = matches!(format, Format::Dcp | Format::Registered(_));
        if self.compression.is_some() && format.registered().is_none() {
            return Err(self.not_compressed(format));
        }
        for (given, option, of) in [
            (self.ranks.is_some() && !has_ranks, "--ranks", Format::Dcp),
            (self.max_shard_bytes.is_some(), "--max-shard-size", Format::HuggingFace),
            (self.config.is_some() && format != Format::TorchDist, "--config", Format::HuggingFace),
            (megatron.is_some(), megatron.unwrap_or_default(), Format::TorchDist),
            (self.legacy, "--legacy", Format::TorchSave),
            (self.device.is_some(), "--device", Format::TorchSave),
        ] {
            if given && of != format {
                let message = format!("{option} is for {of}, and {:?} becomes {format}", self.uri);
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint(format!("leave it out, or say --to {of}")));
            }
        }
        Ok(format)
    }

    /// A job with this destination and no other option yet. Options count by what they mean, so that
    /// a default which one rank names is that of the others.
    ///
    /// # Errors
    ///
    /// When the layout of `checkpoint` cannot be read.
    pub(crate) async fn work(
        &self,
        name: &str,
        checkpoint: &Checkpoint,
        job: &JobOptions,
    ) -> Result<Work, Error> {
        let format = self.format.or_else(|| Format::of_name(&self.uri).ok());
        // Read for other ranks alone.
        let config = self.config.as_deref().filter(|_| job.group.is_some());
        let megatron = match job.group.is_some() {
            true => Some((self.megatron.layout(checkpoint).await?, self.megatron.written_form())),
            false => None,
        };
        Ok(Work::new(name, job)
            .option("--to", &format)
            .option("--ranks", &self.ranks.unwrap_or(RANKS))
            .option("--dtype", &(self.dtype, &self.keep_dtype))
            .option("--max-shard-size", &self.max_shard_bytes.unwrap_or(MAX_SHARD_BYTES))
            .option("--legacy", &self.legacy)
            .option("--device", &self.device)
            .option("the layout of Megatron-Core", &megatron)
            .option("--compress", &self.compression)
            .option("--overwrite", &self.overwrite)
            .option("--config", &config.map(model_files::configuration_of)))
    }

    fn not_compressed(&self, format: Format) -> Error {
        let message = format!(
            "--compress is for {} and {}, and {:?} becomes {format}",
            Format::Dcp,
            Format::TorchDist,
            self.uri
        );
        let hint = format!("leave it out, or say --to {}", Format::Dcp);
        Error::new(ErrorKind::InvalidOption, message).with_hint(hint)
    }

    pub(crate) fn config_folder(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    pub(crate) fn cast_dtype(&self) -> Option<DType> {
        self.dtype
    }

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

    /// Refuses numbers of ranks for tensors that Megatron-Core does not divide among ranks, because
    /// their names are none of its own.
    pub(crate) async fn refuse_idle_sizes(
        &self,
        format: Format,
        checkpoint: &Checkpoint,
        mapping: &Option<MappingReport>,
        source: &Source,
    ) -> Result<(), Error> {
        let Some(option) = self.megatron.size_given() else { return Ok(()) };
        let is_named = checkpoint.megatron.is_some() || mapping.is_some();
        if format != Format::TorchDist || is_named || has_megatron_names(source).await? {
            return Ok(());
        }
        let message =
            format!("{option} divides tensors of Megatron-Core, and none has a name of those");
        let hint =
            "leave it out, or give a Hugging Face model the names of Megatron-Core with --arch";
        Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint))
    }

    /// Refuses a target that would touch a source.
    pub(crate) async fn keep_apart(&self, source: &Checkpoint) -> Result<(), Error> {
        keep_apart(source, &self.uri, self.format()?.shape()).await
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
        let shared = SharedTarget::begin(job, format.shape()).await?;
        let folders = NewFolders::before(&self.uri, &self.rollback);
        let place = Place::new(&checkpoint.opener, &self.uri, &place_options);
        let place = place.held_by_rank_0(job.is_coordinator());
        let options = WriterOptions::default()
            .with_overwrite(self.overwrite)
            .with_compression(self.compression);
        let mut report = match format {
            // One file is written by one process.
            Format::Safetensors | Format::TorchSave if !job.is_coordinator() => {
                ConversionReport::default()
            }
            Format::Safetensors => {
                let target = place.file().await?;
                let job = job.of_coordinator().unwrap_or_default();
                dcp_convert::to_safetensors(source, &target, &job).await?
            }
            Format::TorchSave => {
                let job = &job.of_coordinator().unwrap_or_default();
                let target = place.file().await?;
                let zip = TorchSaveForm::default();
                let form = if self.legacy { TorchSaveForm::Legacy } else { zip };
                let mut how = TorchSaveOptions::from(form);
                how.device.clone_from(&self.device);
                dcp_convert::to_torch_save(source, &target, how, job).await?
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
                if self.config.is_some() {
                    model_files::refuse_other_names(&files, &*source.metadata().await?)?;
                }
                if let Some(dtype) = self.dtype {
                    model_files::say_dtype(&mut files, dtype)?;
                }
                let folder = place.model().await?;
                shared.agree(&self.uri, &folder).await?;
                let folder = (&folder, &*self.uri);
                let max_bytes = self.max_shard_bytes.unwrap_or(MAX_SHARD_BYTES);
                model_files::write(source, folder, files, max_bytes, self.overwrite, job).await?
            }
            Format::Dcp | Format::Registered(_) => {
                let target = target_of(&checkpoint.opener, format)?;
                if self.compression.is_some() && !target.compresses() {
                    return Err(self.not_compressed(format));
                }
                let storage = place.checkpoint(target).await?;
                shared.agree(&self.uri, &storage).await?;
                let writer = target.writer(storage, &options)?;
                dcp_convert::reshard(source, &*writer, self.ranks.unwrap_or(RANKS), job).await?
            }
            Format::TorchDist => {
                let storage = place.checkpoint(target_of(&checkpoint.opener, format)?).await?;
                shared.agree(&self.uri, &storage).await?;
                let layout = how.layout.unwrap_or_else(|| ParallelLayout::new(1, 1));
                let what = (layout, how.common);
                self.megatron.write(source, storage, what, &options, job).await?
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
    ) -> Result<
        (Source, Option<std::sync::Arc<view::Cast>>, Vec<dcp_convert::keys::UnmatchedPattern>),
        Error,
    > {
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

/// Returns the writer of a format, by the opener's formats.
fn target_of(opener: &Opener, format: Format) -> Result<&dyn CheckpointTarget, Error> {
    let registered = format.registered().and_then(|name| opener.formats.by_name(name));
    registered.and_then(|format| format.target()).ok_or_else(|| {
        let problem = match registered {
            Some(_) => "can only be read",
            None => "is not one of the opener's formats",
        };
        Error::new(ErrorKind::InvalidOption, format!("the format {format} {problem}"))
    })
}

/// The facts of the source that decide how it is written.
#[derive(Debug, Default)]
pub(crate) struct SourceFacts {
    /// The files that a Hugging Face model gets where no others were chosen.
    pub(crate) files: Files,
    /// The ranks that a checkpoint of Megatron-Core is written for.
    pub(crate) layout: Option<ParallelLayout>,
    /// The common state that it gets, if not the one among the keys.
    pub(crate) common: Option<Value>,
}

/// The dtype that a tensor of this name and dtype gets where floats are cast to `dtype`; `None`
/// where it keeps its own: float8 and narrower ones, scales of block-scaled weights, biases that
/// balance experts, steps that an optimizer counts. A conversion also leaves packed weights and their
/// scales as they are, which the tensors around them show
/// ([`exact_tensors`](dcp_convert::cast::exact_tensors)).
///
/// ```
/// use dcp_checkpoint::cast_to;
/// use dcp_core::DType;
///
/// let bf16 = |name| cast_to(DType::BFloat16, name, DType::Float32);
/// assert_eq!(bf16("decoder.layers.mlp.linear_fc1.weight"), Some(DType::BFloat16));
/// assert_eq!(bf16("decoder.layers.mlp.router.expert_bias"), None);
/// ```
#[must_use]
pub fn cast_to(dtype: DType, fqn: &str, from: DType) -> Option<DType> {
    let wide = [DType::Float64, DType::Float32, DType::Float16, DType::BFloat16];
    (wide.contains(&from) && !is_exact(fqn)).then_some(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_balances_experts_keeps_its_dtype() {
        let cast = |name| cast_to(DType::BFloat16, name, DType::Float32);
        for name in [
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "decoder.layers.mlp.router.expert_bias",
            "optim.state.w.step",
            "w.weight_scale_inv",
        ] {
            assert_eq!(cast(name), None, "{name}");
        }
        for name in
            ["model.layers.3.mlp.gate.weight", "decoder.layers.mlp.router.weight", "w.steps"]
        {
            assert_eq!(cast(name), Some(DType::BFloat16), "{name}");
        }
    }

    #[test]
    fn options_of_another_format_are_refused() {
        let file = Destination::new("model.safetensors");
        assert_eq!(file.format().unwrap(), Format::Safetensors);
        let error = file.ranks(2).format().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().starts_with("--ranks is for dcp"), "{error}");
        let folder = Destination::new("x").to(Format::Dcp).ranks(2);
        assert_eq!(folder.format().unwrap(), Format::Dcp);
        assert!(folder.megatron(MegatronTarget::new().tp(2)).format().is_err());
        for (name, to, is_refused) in [
            ("model.pt", None, true),
            ("x", Some(Format::HuggingFace), true),
            ("x", Some(Format::TorchDist), false),
        ] {
            let compressed = Destination::new(name).to(to).compression(Compression::ZSTD);
            assert_eq!(compressed.format().is_err(), is_refused, "{name}");
        }
    }
}
