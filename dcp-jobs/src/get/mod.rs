//! One tensor or object.

mod find;

use std::sync::Arc;

use dcp_core::DType;

use crate::cast::{CastOptions, CastReport};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Shape;
use crate::checkpoint::overlap_guard::keep_apart;
use crate::convert::destination::cast_to;
use crate::error::{Error, ErrorKind, JobError};
use crate::options::JobOptions;
use crate::place::target::TargetOptions;
use crate::source::Source;
use crate::view;

pub use find::{Found, FoundTensor, find, object_to_torch_save};

impl Checkpoint {
    /// Looks up one tensor or object.
    ///
    /// ```no_run
    /// # async fn example(run: dcp_jobs::Checkpoint) -> Result<(), dcp_jobs::Error> {
    /// let rows = run.get("model.embed.weight").slice("0:2,:").run().await?;
    /// rows.save("rows.npy", &Default::default(), &Default::default()).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn get(&self, fqn: impl Into<String>) -> Lookup<'_> {
        Lookup { checkpoint: self, fqn: fqn.into(), slice: None, dtype: None }
    }
}

/// A lookup to [`run`](Self::run), from [`Checkpoint::get`].
#[derive(Debug)]
#[must_use = "a lookup does nothing before `run`"]
pub struct Lookup<'a> {
    checkpoint: &'a Checkpoint,
    fqn: String,
    slice: Option<String>,
    dtype: Option<DType>,
}

impl<'a> Lookup<'a> {
    /// Takes only this part of a tensor, as NumPy writes it: per axis `START:STOP:STEP` or an index.
    pub fn slice(mut self, slice: impl Into<String>) -> Self {
        self.slice = Some(slice.into());
        self
    }

    /// Casts a tensor of floats, as [`cast_to`] says.
    pub fn dtype(mut self, dtype: impl Into<Option<DType>>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// Looks it up. An object is read at once, a tensor later. A note says if it is of an
    /// optimizer that is damaged.
    ///
    /// # Errors
    ///
    /// [`UnknownKey`](ErrorKind::UnknownKey), [`InvalidOption`](ErrorKind::InvalidOption) for a
    /// slice that the tensor does not have, and when the checkpoint cannot be read.
    pub async fn run(self) -> Result<Item<'a>, Error> {
        let Self { checkpoint, fqn, slice, dtype } = self;
        let (source, cast) = match dtype {
            None => (checkpoint.source.clone(), None),
            Some(dtype) => {
                let rule = |name: &str, from| cast_to(dtype, name, from).filter(|_| name == fqn);
                let (casts, job) = (CastOptions::default(), JobOptions::default());
                let (source, cast) =
                    view::Cast::apply(&checkpoint.source, rule, casts, &job).await?;
                (source, Some(cast))
            }
        };
        let found = find(&source, &fqn, slice.as_deref()).await;
        let found = found.map_err(|error| absent(error, checkpoint, &fqn))?;
        if let Found::Tensor(tensor) = &found {
            let (mut notes, job) = (checkpoint.opener.notes(), JobOptions::default());
            checkpoint.note_optimizer(|name| name == tensor.fqn(), &job, &mut notes).await;
        }
        Ok(Item { checkpoint, source, fqn, found, cast })
    }
}

/// An error that says where a value is that a framework keeps in its state.
fn absent(error: JobError, checkpoint: &Checkpoint, fqn: &str) -> Error {
    let is_unknown = matches!(error, JobError::UnknownFqn { .. });
    let error = Error::from(error);
    let Some(of) = checkpoint.of_framework().filter(|_| is_unknown) else { return error };
    let first = fqn.split('.').next().unwrap_or_default();
    match of.shown_by(first) {
        Some(option) => {
            error.with_hint(format!("it is in the state beside the tensors, which {option} prints"))
        }
        None => error,
    }
}

/// A tensor or an object of a checkpoint.
#[derive(Debug)]
pub struct Item<'a> {
    checkpoint: &'a Checkpoint,
    source: Source,
    fqn: String,
    found: Found,
    cast: Option<Arc<view::Cast>>,
}

/// The result of [`Item::save`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SavedItem {
    /// Bytes of the tensor, or of the file with the object.
    pub bytes: u64,
    /// In which other type the file has the numbers, where it has none of theirs.
    pub note: Option<String>,
}

/// A kind of file, by the ending of its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileKind {
    Npy,
    Safetensors,
    TorchSave,
}

impl FileKind {
    fn of(path: &str) -> Result<Self, Error> {
        let is = |ending: &str| path.ends_with(ending);
        match () {
            () if is(".npy") => Ok(Self::Npy),
            () if is(".safetensors") => Ok(Self::Safetensors),
            () if is(".pt") || is(".pth") => Ok(Self::TorchSave),
            () => {
                let message = format!("the name {path:?} does not determine the kind of file");
                Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint("end its name in .npy, .safetensors or .pt"))
            }
        }
    }
}

impl Item<'_> {
    /// The tensor to read, or the object.
    #[must_use]
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// The counts of the cast of the elements read so far, if there is one.
    #[must_use]
    pub fn cast(&self) -> Option<CastReport> {
        let mut report = self.cast.as_ref()?.report();
        report.tensors.retain(|name, _| **name == *self.fqn);
        Some(report)
    }

    /// Writes it to a file: a tensor to `.npy`, `.safetensors` or `.pt`, an object to `.pt`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for a file of another kind, and those of
    /// [`Checkpoint::target_file`].
    pub async fn save(
        &self,
        path: &str,
        options: &TargetOptions,
        job: &JobOptions,
    ) -> Result<SavedItem, Error> {
        keep_apart(self.checkpoint, path, Shape::File).await?;
        let kind = FileKind::of(path)?;
        let is_tensor = matches!(self.found, Found::Tensor(_));
        if !is_tensor && kind != FileKind::TorchSave {
            let message = format!("{:?} is an object, and only a .pt file can hold it", self.fqn);
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("end the name of the file in .pt, or print the object"));
        }
        let file = self.checkpoint.target_file(path, options).await?;
        let target = file.target();
        let saved = match &self.found {
            Found::Tensor(tensor) => {
                let note = match kind {
                    FileKind::Npy => tensor.to_npy(target, job).await?,
                    FileKind::Safetensors => {
                        tensor.to_safetensors(target, job).await.map(|()| None)?
                    }
                    FileKind::TorchSave => {
                        tensor.to_torch_save(target, job).await.map(|()| None)?
                    }
                };
                SavedItem { bytes: tensor.byte_len(), note }
            }
            _ => {
                let bytes = object_to_torch_save(&self.source, &self.fqn, target, job).await?;
                SavedItem { bytes, note: None }
            }
        };
        file.keep();
        Ok(saved)
    }
}
