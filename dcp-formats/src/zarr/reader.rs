//! Reads a folder of zarr arrays as a checkpoint.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::DataProblem;
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, FormatError, Key, PlanError, Storage, StorageError,
    StorageReader,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::arrays::{ArrayFiles, Names, without_header};
use super::header::{ArrayHeader, HEADER_FILE};
use crate::placed_reads::PlacedReads;

/// The maximum size of a header, in bytes.
const HEADER_BYTES_MAX: u64 = 1 << 20;
/// The maximum number of chunks beyond the number of files, which a hostile header could claim.
const PARTS_MAX: usize = 1 << 20;
/// The format's name.
const FORMAT: &str = "zarr";

/// Reads a folder of zarr arrays (version 2, uncompressed): every folder with a `.zarray` is a
/// tensor, named after its path. Lock folders, `{array}.sync`, are ignored.
///
/// Reading the index costs a listing, and the header of every array. A chunk without a file has the
/// header's fill value. Without one, as in Megatron-Core's headers, the chunk is lost, which is an
/// error. The format has no checksums.
pub struct ZarrReader {
    storage: Arc<dyn Storage>,
    metadata: Arc<CheckpointMetadata>,
    others: Vec<ObjectMeta>,
    warnings: Vec<String>,
}

impl ZarrReader {
    /// Lists the folder and reads the headers. With `tolerant`, missing files and wrong lengths are
    /// warnings, and errors only when such a file is read.
    ///
    /// # Errors
    ///
    /// When a header is invalid or missing, chunks of an array are missing, or the storage fails.
    pub async fn open(storage: Arc<dyn Storage>, tolerant: bool) -> Result<Self, CheckpointError> {
        let mut names = Names::default();
        let mut objects = storage.list(None);
        while let Some(meta) = objects.next().await {
            names.add(meta?);
        }
        let (arrays, others) = names.assign();
        let parallelism = usize::from(storage.capabilities().parallelism.max(1));
        let reads: Vec<_> = arrays
            .into_iter()
            .map(|(folder, files)| {
                let storage = Arc::clone(&storage);
                async move {
                    let header = read_header(&*storage, &folder, files.header_len).await?;
                    Ok::<_, CheckpointError>((folder, header, files))
                }
            })
            .collect();
        let mut arrays = stream::iter(reads).buffered(parallelism);
        let mut index = Index::new(tolerant);
        while let Some((folder, header, files)) = arrays.try_next().await? {
            index.add(&folder, &header, &files)?;
        }
        drop(arrays);
        for folder in without_header(&others) {
            index.headless(folder)?;
        }
        let (metadata, warnings) = (Arc::new(index.metadata), index.warnings);
        Ok(Self { storage, metadata, others, warnings })
    }

    /// The files of no array, in the order of the listing.
    #[must_use]
    pub fn others(&self) -> &[ObjectMeta] {
        &self.others
    }

    /// Problems of the folder. Only a tolerant reader returns any.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

async fn read_header(
    storage: &dyn Storage,
    folder: &str,
    byte_len: u64,
) -> Result<ArrayHeader, CheckpointError> {
    let name = format!("{folder}/{HEADER_FILE}");
    let key = Key::new(&name).map_err(StorageError::from)?;
    if byte_len > HEADER_BYTES_MAX {
        let problem = format!("its description has {byte_len} bytes, more than it can have");
        return Err(FormatError::new("zarr array", problem).in_file(name, 0).into());
    }
    let json = storage.read_range(&key, 0..byte_len).await?;
    Ok(ArrayHeader::parse(&json).map_err(|error| error.in_file(name, 0))?)
}

/// The index under construction.
struct Index {
    metadata: CheckpointMetadata,
    warnings: Vec<String>,
    tolerant: bool,
    parts_left: usize,
}

impl Index {
    fn new(tolerant: bool) -> Self {
        let mut metadata = CheckpointMetadata::new();
        metadata.provenance_mut().format = Some(FORMAT.into());
        Self { metadata, warnings: Vec::new(), tolerant, parts_left: PARTS_MAX }
    }

    fn add(
        &mut self,
        folder: &str,
        header: &ArrayHeader,
        files: &ArrayFiles,
    ) -> Result<(), CheckpointError> {
        let bad = |problem: String| {
            FormatError::new("zarr array", problem).in_file(format!("{folder}/{HEADER_FILE}"), 0)
        };
        let grid = header.grid();
        let cells = grid.checked_volume().unwrap_or(u64::MAX);
        let beyond = cells.saturating_sub(files.parts.len() as u64);
        let left = usize::try_from(beyond).ok().and_then(|n| self.parts_left.checked_sub(n));
        self.parts_left = left.ok_or_else(|| {
            let there = files.parts.len();
            bad(format!("it should have {cells} parts, of which there are {there} at most"))
        })?;
        let mut tensor = TensorEntry::new(header.dtype, header.shape.clone());
        let mut cell = vec![0_u64; grid.ndim()];
        let mut more = cells > 0;
        while more {
            let name = header.chunk_name(&cell);
            match (files.parts.get(&name), header.zeros_where_absent) {
                (Some(len), _) if *len == header.chunk_bytes() => {
                    self.place(folder, header, &cell, &name, &mut tensor)?;
                }
                (Some(len), _) => {
                    let expected = header.chunk_bytes();
                    let problem = format!("part {name:?} has {len} bytes instead of {expected}");
                    self.lose(header, &cell, &mut tensor, bad(problem))?;
                }
                (None, true) => self.fill(folder, header, &cell, &mut tensor)?,
                (None, false) => {
                    let problem = format!("part {name:?} is missing");
                    self.lose(header, &cell, &mut tensor, bad(problem))?;
                }
            }
            more = advance(&mut cell, &grid);
        }
        self.metadata.insert(folder, Entry::Tensor(tensor));
        Ok(())
    }

    /// Reports a folder of chunks without a header.
    fn headless(&mut self, folder: &str) -> Result<(), CheckpointError> {
        let problem = "there are parts of an array, but not what describes it";
        let error =
            FormatError::new("zarr array", problem).in_file(format!("{folder}/{HEADER_FILE}"), 0);
        if !self.tolerant {
            return Err(error.into());
        }
        self.warnings.push(error.to_string());
        Ok(())
    }

    /// Places the chunk of a cell, in pieces that are contiguous in the file: one, unless padding
    /// separates them.
    fn place(
        &mut self,
        folder: &str,
        header: &ArrayHeader,
        cell: &[u64],
        name: &str,
        tensor: &mut TensorEntry,
    ) -> Result<(), CheckpointError> {
        let key = Key::new(format!("{folder}/{name}")).map_err(StorageError::from)?;
        let file = self.metadata.intern_file(&key).ok_or_else(full)?;
        let encoding = self.metadata.intern_encoding(&Encoding::new(Layout::Raw));
        let encoding = encoding.ok_or_else(full)?;
        let (origin, sizes) = extent(header, cell);
        // The axes after the last cut one are contiguous.
        let cut = (1..sizes.len()).rev().find(|axis| sizes[*axis] != header.chunks[*axis]);
        let outer = cut.unwrap_or(0);
        let pieces: u64 = sizes[..outer].iter().product();
        let left = usize::try_from(pieces).ok().and_then(|n| self.parts_left.checked_sub(n));
        self.parts_left = left.ok_or_else(|| {
            let problem = "its last parts are padded in a way that takes too many reads";
            FormatError::new("zarr array", problem).in_file(key.as_str(), 0)
        })?;
        let strides = header.chunks.contiguous_strides();
        let element = header.dtype.size() as u64;
        let outer_sizes = sizes[..outer].to_vec();
        let mut at = vec![0_u64; outer];
        loop {
            let mut offsets = origin.clone();
            let mut piece = sizes.clone();
            let mut first = 0_u64;
            for (axis, index) in at.iter().enumerate() {
                offsets[axis] += index;
                piece[axis] = 1;
                first += index * u64::try_from(strides[axis]).unwrap_or(0);
            }
            let volume = piece.checked_volume().unwrap_or(0);
            let placement = Placement {
                file,
                encoding,
                byte_offset: first * element,
                byte_len: volume * element,
            };
            push(tensor, &offsets, &piece, Some(placement))?;
            if !advance(&mut at, &outer_sizes) {
                return Ok(());
            }
        }
    }

    /// Adds a chunk without a file, which has the header's fill value.
    fn fill(
        &mut self,
        folder: &str,
        header: &ArrayHeader,
        cell: &[u64],
        tensor: &mut TensorEntry,
    ) -> Result<(), CheckpointError> {
        let key = Key::new(format!("{folder}/{HEADER_FILE}")).map_err(StorageError::from)?;
        let file = self.metadata.intern_file(&key).ok_or_else(full)?;
        let encoding = self.metadata.intern_encoding(&Encoding::new(Layout::Computed));
        let encoding = encoding.ok_or_else(full)?;
        let placement = Placement { file, encoding, byte_offset: 0, byte_len: 0 };
        let (origin, sizes) = extent(header, cell);
        push(tensor, &origin, &sizes, Some(placement))
    }

    /// Reports a lost chunk.
    fn lose(
        &mut self,
        header: &ArrayHeader,
        cell: &[u64],
        tensor: &mut TensorEntry,
        error: FormatError,
    ) -> Result<(), CheckpointError> {
        if !self.tolerant {
            return Err(error.into());
        }
        self.warnings.push(error.to_string());
        let (origin, sizes) = extent(header, cell);
        push(tensor, &origin, &sizes, None)
    }
}

fn push(
    tensor: &mut TensorEntry,
    offsets: &[u64],
    sizes: &[u64],
    placement: Option<Placement>,
) -> Result<(), CheckpointError> {
    let pushed = tensor.chunks.push(offsets, sizes, placement);
    pushed.map_err(|error| FormatError::new("zarr array", error.to_string()))?;
    Ok(())
}

fn full() -> FormatError {
    FormatError::new("index", "it has too many files or encodings")
}

/// The offset of a cell's chunk, and its size without padding.
fn extent(header: &ArrayHeader, cell: &[u64]) -> (Dims, Dims) {
    let origin: Dims = cell.iter().zip(&*header.chunks).map(|(at, chunk)| at * chunk).collect();
    let axes = origin.iter().zip(&*header.chunks).zip(&*header.shape);
    let sizes = axes.map(|((at, chunk), len)| (*chunk).min(len - at)).collect();
    (origin, sizes)
}

/// Advances to the next cell of a grid in row-major order; false after the last.
fn advance(cell: &mut [u64], grid: &[u64]) -> bool {
    for (at, len) in cell.iter_mut().zip(grid).rev() {
        *at += 1;
        if *at < *len {
            return true;
        }
        *at = 0;
    }
    false
}

#[async_trait]
impl StorageReader for ZarrReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    /// Also reads what the caller's index adds to the arrays, such as objects in `torch.save`
    /// archives, at their placements.
    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut stored = LoadPlan::default();
        for item in &plan.items {
            if is_filled(metadata, item) {
                fill_in(metadata, item, &*sink)?;
            } else {
                stored.items.push(item.clone());
            }
        }
        if stored.items.is_empty() {
            return Ok(ReadReport::default());
        }
        PlacedReads::new(Arc::clone(&self.storage)).read(metadata, &stored, sink).await
    }
}

/// Whether an item is in a chunk without a file.
fn is_filled(metadata: &CheckpointMetadata, item: &ReadItem) -> bool {
    let ReadKind::Tensor { chunk, .. } = &item.kind else { return false };
    let entry = metadata.at(item.entry as usize).and_then(|(_, entry)| entry.as_tensor());
    let placement = entry.and_then(|entry| entry.chunks.get(*chunk as usize)?.placement);
    let encoding = placement.and_then(|placement| metadata.encoding(&placement));
    encoding.is_some_and(|encoding| encoding.layout == Layout::Computed)
}

/// Fills an item with zeros, the only fill value that a header can declare.
fn fill_in(
    metadata: &CheckpointMetadata,
    item: &ReadItem,
    sink: &dyn DataSink,
) -> Result<(), CheckpointError> {
    let ReadKind::Tensor { region, .. } = &item.kind else { return Ok(()) };
    let view = sink.destination(item)?;
    if view.shape() != region.sizes() {
        return Err(PlanError::Data(DataProblem::Destination {
            fqn: metadata.entry_name(item.entry as usize).into_owned(),
            region: region.to_string(),
            expected: region.volume().saturating_mul(view.dtype().size() as u64),
            shape: view.shape().to_string(),
            byte_len: view.byte_len(),
        })
        .into());
    }
    let fqn = metadata.entry_name(item.entry as usize);
    for run in view.runs() {
        let loan = view.memory().lend(run);
        let mut loan = loan
            .map_err(|source| CheckpointError::Memory { fqn: fqn.clone().into_owned(), source })?;
        loan.fill(0);
    }
    sink.commit(item)
}

impl fmt::Debug for ZarrReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZarrReader")
            .field("storage", &self.storage)
            .field("arrays", &self.metadata.len())
            .finish_non_exhaustive()
    }
}
