//! Formats and options of a written checkpoint, and the writing.

mod framework_target;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};

use dcp_core::DType;
use dcp_core::format::Compression;
use dcp_core::text::without_secrets;
use dcp_formats::hf::CONFIG_NAME;

use crate::cast::is_exact;
use crate::checkpoint::format::Format;
use crate::checkpoint::framework::{Concern, FrameworkOptions, Options};
use crate::checkpoint::overlap_guard::keep_apart;
use crate::checkpoint::{Checkpoint, model_files};
use crate::error::{Error, ErrorKind};
use crate::options::JobOptions;
use crate::place::same_place::Work;
use crate::rollback::Rollback;

pub(crate) use write::SourceFacts;

/// The most bytes of tensors in a file of a Hugging Face model, as transformers has it.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;
/// The ranks that a checkpoint is written for without an option.
const RANKS: u32 = 1;

/// The URL and the format of a written checkpoint. A text alone is a file or directory of the format
/// that its name says.
///
/// ```
/// use dcp_jobs::{Destination, Format};
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
    options: Options,
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
            options: Options::default(),
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

    /// Writes for this number of ranks, each of which gets a file. For [`Format::Dcp`], and for a
    /// [`Format::Registered`] that equal ranks write.
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
    /// default those of a Hugging Face source. For [`Format::HuggingFace`], and for a target of a framework
    /// with a mapping, which reads the model from it.
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

    /// Passes options on to the framework or the mapping that takes this type.
    #[must_use]
    pub fn with<T: FrameworkOptions>(mut self, options: T) -> Self {
        self.options.set(options);
        self
    }

    /// Compresses the data. For [`Format::Dcp`], and a [`Format::Registered`] that does.
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
        let has_ranks = matches!(format, Format::Dcp | Format::Registered(_));
        if self.compression.is_some() && format.registered().is_none() {
            return Err(self.not_compressed(format));
        }
        for (given, option, of) in [
            (self.ranks.is_some() && !has_ranks, "`Destination::ranks`", Format::Dcp),
            (self.max_shard_bytes.is_some(), "`Destination::max_shard_bytes`", Format::HuggingFace),
            (
                self.config.is_some() && !matches!(format, Format::Registered(_)),
                "`Destination::config`",
                Format::HuggingFace,
            ),
            (self.legacy, "`Destination::legacy`", Format::TorchSave),
            (self.device.is_some(), "`Destination::device`", Format::TorchSave),
        ] {
            if given && of != format {
                return Err(self.is_for(option, of, format));
            }
        }
        for (options, option) in self.options.given() {
            if let Concern::Target(name) = options.concern()
                && format != Format::Registered(name)
            {
                return Err(self.is_for(option, Format::Registered(name), format));
            }
        }
        Ok(format)
    }

    /// The error of an option of another format than the one that is written.
    fn is_for(&self, option: &str, of: Format, format: Format) -> Error {
        let message = format!("{option} is for {of}, and {:?} becomes {format}", self.uri);
        Error::new(ErrorKind::InvalidOption, message)
            .with_hint(format!("leave it out, or say `Destination::to` {of}"))
    }

    /// The options of frameworks and of the mapping.
    pub(crate) fn options(&self) -> &Options {
        &self.options
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
        let layout = match format.filter(|_| job.group.is_some()) {
            Some(format) => self.layout(format, checkpoint).await?,
            None => None,
        };
        let mut work = Work::new(name, job)
            .option("`Destination::to`", &format)
            .option("`Destination::ranks`", &self.ranks.unwrap_or(RANKS))
            .option("`Destination::dtype`", &(self.dtype, &self.keep_dtype))
            .option(
                "`Destination::max_shard_bytes`",
                &self.max_shard_bytes.unwrap_or(MAX_SHARD_BYTES),
            )
            .option("`Destination::legacy`", &self.legacy)
            .option("`Destination::device`", &self.device)
            .option("the layout", &layout)
            .option("`Destination::compression`", &self.compression)
            .option("`Destination::overwrite`", &self.overwrite)
            .option("`Destination::config`", &config.map(model_files::configuration_of));
        // The layout has those about the target, with the defaults that follow from the source.
        for (options, _) in self.options.given() {
            if !matches!(options.concern(), Concern::Target(_)) {
                work = work.option(options.subject(), options);
            }
        }
        Ok(work)
    }

    fn not_compressed(&self, format: Format) -> Error {
        let message = format!(
            "`Destination::compression` is for {} and formats that compress as it does, and {:?} \
             becomes {format}",
            Format::Dcp,
            self.uri
        );
        let hint = format!("leave it out, or say `Destination::to` {}", Format::Dcp);
        Error::new(ErrorKind::InvalidOption, message).with_hint(hint)
    }

    pub(crate) fn config_folder(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    pub(crate) fn cast_dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Refuses a target that would touch `source`, or a checkpoint that the options of a plug-in read.
    pub(crate) async fn keep_apart(&self, source: &Checkpoint) -> Result<(), Error> {
        let shape = self.format()?.shape();
        let of_options = self.options().iter().flat_map(FrameworkOptions::sources);
        for source in of_options.chain([source]) {
            keep_apart(source, &self.uri, shape).await?;
        }
        Ok(())
    }
}

/// The dtype that a tensor of this name and dtype gets where floats are cast to `dtype`; `None`
/// where it keeps its own: float8 and narrower ones, scales of block-scaled weights, biases that
/// balance experts, steps that an optimizer counts. A conversion also leaves packed weights and their
/// scales as they are, which the tensors around them show
/// ([`exact_tensors`](crate::cast::exact_tensors)).
///
/// ```
/// use dcp_jobs::cast_to;
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
        assert!(error.to_string().starts_with("`Destination::ranks` is for dcp"), "{error}");
        let folder = Destination::new("x").to(Format::Dcp).ranks(2);
        assert_eq!(folder.format().unwrap(), Format::Dcp);
        for (name, to, is_refused) in [
            ("model.pt", None, true),
            ("x", Some(Format::HuggingFace), true),
            ("x", Some(Format::Registered("toy")), false),
        ] {
            let compressed = Destination::new(name).to(to).compression(Compression::ZSTD);
            assert_eq!(compressed.format().is_err(), is_refused, "{name}");
        }
    }
}
