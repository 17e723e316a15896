//! The formats that a checkpoint can be written in.

use std::fmt;

use dcp_convert::keys::StatePart;

use crate::error::{Error, ErrorKind};
use crate::overlap_guard::Shape;

/// A format to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// One safetensors file.
    Safetensors,
    /// A directory as Hugging Face models have it: `model.safetensors`, or several files and an
    /// index, with the configuration and tokenizer.
    HuggingFace,
    /// One file of `torch.save`, objects included.
    TorchSave,
    /// A directory of PyTorch's `torch.distributed.checkpoint`.
    Dcp,
    /// A directory of Megatron-Core's `torch_dist`.
    TorchDist,
}

impl fmt::Display for Format {
    /// As `dcp convert --to` names it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors => "safetensors",
            Self::HuggingFace => "hf",
            Self::TorchSave => "torch-save",
            Self::Dcp => "dcp",
            Self::TorchDist => "torch-dist",
        })
    }
}

impl Format {
    /// The format that the ending of a name says.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a name without such an ending.
    ///
    /// ```
    /// use dcp_checkpoint::Format;
    /// assert_eq!(Format::of_name("model.safetensors").unwrap(), Format::Safetensors);
    /// assert!(Format::of_name("my-model").is_err());
    /// ```
    pub fn of_name(target: &str) -> Result<Self, Error> {
        if target.ends_with(".safetensors") {
            return Ok(Self::Safetensors);
        }
        if [".pt", ".pth", ".bin", ".ckpt"].iter().any(|ending| target.ends_with(ending)) {
            return Ok(Self::TorchSave);
        }
        let message = format!("cannot tell in which format to write {target:?}");
        Err(Error::new(ErrorKind::InvalidOption, message)
            .with_hint("say --to safetensors, hf, torch-save, dcp or torch-dist"))
    }

    /// The part of a training state that is written when no other is chosen.
    #[must_use]
    pub fn usual_part(self) -> StatePart {
        match self {
            Self::Safetensors | Self::TorchSave | Self::Dcp | Self::TorchDist => {
                StatePart::Everything
            }
            Self::HuggingFace => StatePart::Model,
        }
    }

    pub(crate) fn shape(self) -> Shape {
        match self {
            Self::Safetensors | Self::TorchSave => Shape::File,
            Self::HuggingFace | Self::Dcp | Self::TorchDist => Shape::Folder,
        }
    }
}
