//! One file of a rank, read as data.

use std::borrow::Cow;
use std::sync::Arc;

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::path::PathItem;
use dcp_core::storage::StorageExt as _;
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, Key, Region, Storage, StorageError, Value,
};
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};
use dcp_formats::torch_save::TorchSaveReader;
use dcp_jobs::Source;
use dcp_jobs::read::{TensorReader, read_objects};

use crate::error::bad_file;
use crate::file_name::FileName;

/// Bytes of a file that may be a pointer of Git LFS.
const POINTER_MAX: u64 = 1024;

/// A file of `torch.save`, whose pickle is read and nothing else.
#[derive(Clone, Debug)]
pub(crate) struct RankFile {
    pub(crate) name: String,
    pub(crate) source: Source,
    pub(crate) metadata: Arc<CheckpointMetadata>,
}

/// The steps to a value, as text.
pub(crate) type Steps<'a> = Vec<Cow<'a, str>>;

impl RankFile {
    /// Opens the file `name` of the folder `storage`.
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        name: String,
    ) -> Result<Self, CheckpointError> {
        let key = Key::new(name.as_str()).map_err(StorageError::from)?;
        let source = Source::torch_save(Arc::clone(storage), key.clone());
        match source.metadata().await {
            Ok(metadata) => {
                if let Some(reader) = source.extension::<TorchSaveReader>() {
                    refuse_renamed(&name, reader.saved_as().await?.as_deref())?;
                }
                Ok(Self { name, source, metadata })
            }
            Err(error @ CheckpointError::Format(_)) => {
                let byte_len = storage.stat(&key).await?.byte_len;
                let head = storage.read_range(&key, 0..byte_len.min(POINTER_MAX)).await?;
                Err(match is_lfs_pointer(&head) {
                    true => bad_file(&name, format!("it {LFS_PROBLEM}")),
                    false => error,
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Every entry with its number and the steps to it.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (usize, Steps<'_>, &Entry)> {
        self.metadata.iter().enumerate().map(|(at, (fqn, entry))| {
            let steps = match entry.path() {
                Some(path) => path.iter().map(step).collect(),
                None => vec![Cow::Borrowed(&**fqn)],
            };
            (at, steps, entry)
        })
    }

    /// The tensor of a number.
    pub(crate) fn tensor(&self, entry: usize) -> Option<&TensorEntry> {
        self.metadata.at(entry)?.1.as_tensor()
    }

    /// Reads the objects that `wanted` accepts, by the steps to them.
    pub(crate) async fn objects(
        &self,
        wanted: impl Fn(&[Cow<'_, str>]) -> bool,
    ) -> Result<Vec<(Vec<String>, Value)>, CheckpointError> {
        let found =
            self.entries().filter(|(_, steps, entry)| entry.as_object().is_some() && wanted(steps));
        let found: Vec<(usize, Vec<String>)> = found
            .map(|(at, steps, _)| (at, steps.into_iter().map(Cow::into_owned).collect()))
            .collect();
        let positions: Vec<usize> = found.iter().map(|(at, _)| *at).collect();
        let mut values = read_objects(&self.source, &self.metadata, &positions).await;
        let mut objects = Vec::with_capacity(found.len());
        for (at, steps) in found {
            if let Some(value) = values.remove(&at) {
                objects.push((steps, value?));
            }
        }
        Ok(objects)
    }

    /// Reads the first elements of the last axis of a tensor, as stored: at most `elements` of them.
    pub(crate) async fn first_elements(
        &self,
        entry: usize,
        elements: u64,
    ) -> Result<Vec<u8>, CheckpointError> {
        let Some(tensor) = self.tensor(entry) else { return Ok(Vec::new()) };
        let mut sizes: Dims = tensor.shape.iter().map(|len| (*len).min(1)).collect();
        if let Some((size, len)) = sizes.last_mut().zip(tensor.shape.last()) {
            *size = (*len).min(elements);
        }
        let region = Region::new(Dims::zeros(sizes.ndim()), sizes)?;
        let reader = Arc::clone(&self.source.reader);
        let reader = TensorReader::new(reader, Arc::clone(&self.metadata), entry)?;
        Ok(reader.read(&[region]).await?.to_vec())
    }
}

/// Refuses a file that DeepSpeed saved under the name of another rank or kind: the flat buffers in it have no other
/// mark of their rank. Any other name in it says nothing.
fn refuse_renamed(name: &str, saved_as: Option<&str>) -> Result<(), CheckpointError> {
    let Some(was) = saved_as.map(|saved_as| format!("{saved_as}.pt")) else { return Ok(()) };
    let file = name.rsplit('/').next().unwrap_or(name);
    match FileName::parse(&was) {
        Some(of_file) if FileName::parse(file) != Some(of_file) => {
            let problem = format!(
                "it was saved as {was:?}, and renamed or copied: give each file its own name"
            );
            Err(bad_file(name, problem))
        }
        _ => Ok(()),
    }
}

fn step(item: &PathItem) -> Cow<'_, str> {
    match item {
        PathItem::Key(key) => Cow::Borrowed(&**key),
        PathItem::Index(index) => Cow::Owned(index.to_string()),
    }
}

/// Borrows steps for a match.
pub(crate) fn as_strs<'a>(steps: &'a [Cow<'_, str>]) -> Vec<&'a str> {
    steps.iter().map(|step| &**step).collect()
}
