//! The formats that a checkpoint can be written in.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};
use crate::keys::StatePart;

/// The kind of thing that is written at a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One file, which takes the place of one that is there.
    File,
    /// Files in a folder, which take the place of a checkpoint that is there.
    Folder,
}

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
    /// A directory of a [target of a framework](crate::framework::FrameworkTarget) or of another format that
    /// the [`Opener`](crate::Opener) has, by its name. The format must be a
    /// [target](dcp_core::format::CheckpointFormat::target).
    Registered(&'static str),
}

impl fmt::Display for Format {
    /// As `dcp convert --to` names it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    /// The format of that name, as [`Display`](fmt::Display) writes it.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a name of no format,
    /// [`Undecided`](ErrorKind::Undecided) for a name of several. Names of
    /// [`Registered`](Self::Registered) formats are not known here.
    ///
    /// ```
    /// use dcp_jobs::Format;
    /// assert_eq!("torch-save".parse::<Format>().unwrap(), Format::TorchSave);
    /// assert!("torch".parse::<Format>().is_err());
    /// ```
    fn from_str(name: &str) -> Result<Self, Error> {
        if let Some(format) = Self::ALL.into_iter().find(|format| format.name() == name) {
            return Ok(format);
        }
        if name == "torch" || name == "pytorch" {
            let message = format!("{name:?} names several formats");
            return Err(Error::new(ErrorKind::Undecided, message).with_hint(
                "torch-save is one file of torch.save, dcp a directory of \
                 torch.distributed.checkpoint",
            ));
        }
        let message = format!("{name:?} names no format");
        Err(Error::new(ErrorKind::InvalidOption, message).with_hint(format!("say {}", names())))
    }
}

/// The names of all formats, as an enumeration for people.
fn names() -> String {
    let [rest @ .., last] = Format::ALL.map(Format::name);
    format!("{} or {last}", rest.join(", "))
}

impl Format {
    /// The formats that are written without a plug-in.
    pub const ALL: [Self; 4] = [Self::Safetensors, Self::HuggingFace, Self::TorchSave, Self::Dcp];

    /// Its name, as `dcp convert --to` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::HuggingFace => "hf",
            Self::TorchSave => "torch-save",
            Self::Dcp => "dcp",
            Self::Registered(name) => name,
        }
    }

    /// Describes the written file or directory, in a line.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Safetensors => "One safetensors file",
            Self::HuggingFace => {
                "A directory as Hugging Face models have it: model.safetensors, or several files \
                 and an index"
            }
            Self::TorchSave => "One file of torch.save, objects included",
            Self::Dcp => "A directory of PyTorch's torch.distributed.checkpoint",
            Self::Registered(_) => "A directory of a format that is registered",
        }
    }

    /// The format that the ending of a name says.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a name without such an ending.
    ///
    /// ```
    /// use dcp_jobs::Format;
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
        let message = format!("the name {target:?} does not determine a format");
        Err(Error::new(ErrorKind::InvalidOption, message)
            .with_hint(format!("say `Destination::to` {}", names())))
    }

    /// The part of a training state that is written when no other is chosen.
    #[must_use]
    pub fn usual_part(self) -> StatePart {
        match self {
            Self::Safetensors | Self::TorchSave | Self::Dcp | Self::Registered(_) => {
                StatePart::Everything
            }
            Self::HuggingFace => StatePart::Model,
        }
    }

    /// The name under which the format is registered, if any number of ranks can write it.
    pub(crate) fn registered(self) -> Option<&'static str> {
        match self {
            Self::Dcp => Some("dcp"),
            Self::Registered(name) => Some(name),
            Self::Safetensors | Self::HuggingFace | Self::TorchSave => None,
        }
    }

    /// The format that is registered under this name.
    pub(crate) fn of_registered(name: &'static str) -> Self {
        let known = Self::ALL.into_iter().find(|format| format.registered() == Some(name));
        known.unwrap_or(Self::Registered(name))
    }

    pub(crate) fn shape(self) -> Shape {
        match self {
            Self::Safetensors | Self::TorchSave => Shape::File,
            Self::HuggingFace | Self::Dcp | Self::Registered(_) => Shape::Folder,
        }
    }
}
