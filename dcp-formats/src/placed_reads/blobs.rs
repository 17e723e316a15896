//! The stored items that a load needs, in file order.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::error::{ChunksProblem, DataProblem};
use dcp_core::metadata::{Encoding, Entry, Placement};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Dims, FormatError, Key, PlanError, Region,
    StorageError, StorageErrorKind, TensorView,
};

use super::pieces::ScatterError;

/// A stored chunk or object, and the parts of it to read.
#[derive(Debug)]
pub(super) struct Blob {
    pub(super) fqn: Arc<str>,
    pub(super) key: Key,
    pub(super) placement: Placement,
    pub(super) encoding: Encoding,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Tensor { dtype: DType, sizes: Dims, targets: Vec<Target> },
    Object { items: Vec<ReadItem> },
}

/// A part of a chunk with one destination.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) item: ReadItem,
    /// The part, in the coordinates of the chunk.
    pub(super) region: Region,
    pub(super) byte_len: u64,
}

/// Groups a plan's items to blobs by file and offset. Also returns the total size of the items.
pub(super) fn group(
    metadata: &CheckpointMetadata,
    plan: &LoadPlan,
) -> Result<(Vec<Blob>, u64), CheckpointError> {
    let mut blobs: Vec<Blob> = Vec::new();
    let mut known: HashMap<(u32, Option<u32>), usize> = HashMap::new();
    let mut needed = 0_u64;
    for item in &plan.items {
        let Some((fqn, entry)) = metadata.at(item.entry as usize) else {
            return Err(PlanError::no_entry(item.entry.into(), None).into());
        };
        let chunk = match &item.kind {
            ReadKind::Tensor { chunk, .. } => Some(*chunk),
            _ => None,
        };
        let index = match known.get(&(item.entry, chunk)) {
            Some(index) => *index,
            None => {
                blobs.push(Blob::find(metadata, fqn, entry, chunk)?);
                known.insert((item.entry, chunk), blobs.len() - 1);
                blobs.len() - 1
            }
        };
        if let Some(blob) = blobs.get_mut(index) {
            let origin = entry.as_tensor().zip(chunk);
            let offsets = origin
                .and_then(|(tensor, chunk)| tensor.chunks.get(chunk as usize))
                .map_or(&[][..], |chunk| chunk.offsets);
            needed = needed.saturating_add(blob.request(item, offsets)?);
        }
    }
    blobs.sort_by_key(|blob| (blob.placement.file, blob.placement.byte_offset));
    Ok((blobs, needed))
}

impl Blob {
    fn find(
        metadata: &CheckpointMetadata,
        fqn: &Arc<str>,
        entry: &Entry,
        chunk: Option<u32>,
    ) -> Result<Self, CheckpointError> {
        let (placement, content) = match (entry, chunk) {
            (Entry::Tensor(tensor), Some(chunk)) => {
                let missing = || {
                    let entry = metadata.index_of(fqn).unwrap_or_default() as u64;
                    PlanError::no_entry(entry, Some(chunk.into()))
                };
                let chunk = tensor.chunks.get(chunk as usize).ok_or_else(missing)?;
                let sizes = Dims::from(chunk.sizes);
                let content = Content::Tensor { dtype: tensor.dtype, sizes, targets: Vec::new() };
                (chunk.placement, content)
            }
            (Entry::Object(object), None) => {
                (object.placement, Content::Object { items: Vec::new() })
            }
            (Entry::Tensor(_), None) => {
                return Err(PlanError::not_an_object(fqn.to_string()).into());
            }
            _ => return Err(PlanError::not_a_tensor(fqn.to_string()).into()),
        };
        let known = placement.and_then(|placement| {
            Some((placement, metadata.file(placement.file)?, metadata.encoding(&placement)?))
        });
        let Some((placement, key, encoding)) = known else {
            let problem = format!(
                "the index lists {fqn:?} without the place of its bytes: the save that made this \
                 checkpoint lost them"
            );
            return Err(FormatError::new("checkpoint", problem).into());
        };
        Ok(Self {
            fqn: Arc::clone(fqn),
            key: key.clone(),
            placement,
            encoding: encoding.clone(),
            content,
        })
    }

    /// Adds an item. Returns its size in bytes.
    fn request(&mut self, item: &ReadItem, offsets: &[u64]) -> Result<u64, CheckpointError> {
        match (&mut self.content, &item.kind) {
            (Content::Tensor { dtype, sizes, targets }, ReadKind::Tensor { region, .. }) => {
                let whole = Region::full(sizes.clone()).ok();
                let inside = region
                    .relative_to(offsets)
                    .filter(|inside| whole.is_some_and(|whole| whole.contains(inside)));
                let Some(inside) = inside else {
                    return Err(ChunksProblem::Outside {
                        region: region.to_string(),
                        bounds: format!("its chunk at {} of sizes {sizes}", Dims::from(offsets)),
                        rank: None,
                    }
                    .of(self.fqn.to_string())
                    .into());
                };
                let byte_len = inside.volume().saturating_mul(dtype.size() as u64);
                targets.push(Target { item: item.clone(), region: inside, byte_len });
                Ok(byte_len)
            }
            (Content::Object { items }, _) => {
                items.push(item.clone());
                Ok(self.placement.byte_len)
            }
            _ => Err(PlanError::not_an_object(self.fqn.to_string()).into()),
        }
    }

    /// Bytes of the chunk's elements; 0 for an object.
    pub(super) fn raw_len(&self) -> u64 {
        match &self.content {
            Content::Tensor { dtype, sizes, .. } => {
                sizes.checked_volume().unwrap_or(u64::MAX).saturating_mul(dtype.size() as u64)
            }
            Content::Object { .. } => 0,
        }
    }

    /// Bytes of the chunk's elements to read; 0 for an object.
    pub(super) fn wanted_bytes(&self) -> u64 {
        match &self.content {
            Content::Tensor { targets, .. } => {
                targets.iter().map(|target| target.byte_len).fold(0, u64::saturating_add)
            }
            Content::Object { .. } => 0,
        }
    }

    #[cfg(feature = "torch-dcp")]
    pub(super) fn is_quantized(&self) -> bool {
        matches!(&self.content, Content::Tensor { dtype, .. } if dtype.is_quantized())
    }

    /// Runs of bytes to read that follow each other in the chunk; 0 for an object.
    pub(super) fn runs(&self) -> u64 {
        let Content::Tensor { sizes, targets, .. } = &self.content else { return 0 };
        let runs = targets.iter().map(|target| target.region.runs_in(sizes).remaining());
        runs.fold(0, u64::saturating_add)
    }

    /// The end of the blob in its file.
    pub(super) fn end(&self) -> u64 {
        self.placement.byte_offset.saturating_add(self.placement.byte_len)
    }

    /// Adds the item's name, the file and the offset to an error found `at` bytes into the blob.
    pub(super) fn locate(&self, error: FormatError) -> CheckpointError {
        let start = self.placement.byte_offset;
        error.of_item(&self.fqn).in_file(self.key.as_str(), start).into()
    }

    /// Converts a storage error. A short or missing file is the checkpoint's fault, and the error
    /// names the item whose bytes are missing.
    pub(super) fn storage_error(&self, error: StorageError) -> CheckpointError {
        match error.kind() {
            StorageErrorKind::Truncated | StorageErrorKind::NotFound => {
                let problem = format!("{:?}: its bytes are missing", self.fqn);
                FormatError::new("checkpoint", problem)
                    .with_source(error)
                    .in_file(self.key.as_str(), self.placement.byte_offset)
                    .into()
            }
            _ => error.into(),
        }
    }

    pub(super) fn scatter_error(&self, error: ScatterError) -> CheckpointError {
        match error {
            ScatterError::Loan(source) => {
                CheckpointError::Memory { fqn: self.fqn.to_string(), source }
            }
            ScatterError::Source(error) => self.locate(error),
            ScatterError::Short => {
                let problem = format!("it has fewer than its {} bytes", self.raw_len());
                self.locate(FormatError::new("tensor", problem))
            }
        }
    }
}

impl Target {
    /// Fails unless the destination has the region's shape and the stored element size.
    pub(super) fn check_view(&self, view: &TensorView, fqn: &str) -> Result<(), CheckpointError> {
        if view.shape() == self.region.sizes() && view.byte_len() == self.byte_len {
            return Ok(());
        }
        Err(PlanError::Data(DataProblem::Destination {
            fqn: fqn.to_owned(),
            region: self.region.to_string(),
            expected: self.byte_len,
            shape: view.shape().to_string(),
            byte_len: view.byte_len(),
        })
        .into())
    }
}
