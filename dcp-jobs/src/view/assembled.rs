//! Assembles tensors from parts of others: unstacked, fused, split, transposed, reshaped or padded.

mod read;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::fmt;
use std::sync::Arc;

use dcp_core::error::{ChunksProblem, StateProblem};
use dcp_core::metadata::{
    ChunkTable, Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry,
};
use dcp_core::overlap::find_overlap;
use dcp_core::path::StatePath;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Dims, FormatError, Key, Region, StorageReader,
    Value,
};

use crate::error::JobError;
use crate::options::JobOptions;
use crate::read::chunk_index::ChunkIndex;
use crate::source::Source;

use super::equality::Input;
use super::joined::Joined;
use super::merged::moved;
use super::scratch::{assembly, invalid_region};

/// A box of an assembled tensor, and its origin.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Its region in the assembled tensor.
    pub region: Region,
    /// The origin of its elements.
    pub from: PieceFrom,
}

/// The origin of a [`Piece`]'s elements. A part is a checkpoint by its position among the inputs;
/// an entry is a position in that checkpoint's index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PieceFrom {
    /// A box of a tensor, with its axes possibly permuted.
    Box {
        /// The checkpoint.
        part: usize,
        /// The tensor in it.
        entry: usize,
        /// The box of that tensor.
        region: Region,
        /// For each axis of the assembled tensor, the axis of the stored one; `None` where the
        /// stored tensor lacks the axis and the piece has size 1. Axes that are not named must have
        /// size 1 in `region`.
        axes: Vec<Option<usize>>,
    },
    /// A box whose row-major elements are the piece's row-major elements, in any shape: a range of
    /// a flat buffer, for example.
    Reshaped {
        /// The checkpoint.
        part: usize,
        /// The tensor in it.
        entry: usize,
        /// The box of that tensor.
        region: Region,
    },
    /// Zeros.
    Zeros,
}

impl Piece {
    /// The region `region` of the assembled tensor is the box `from` of a tensor with the same
    /// axes.
    #[must_use]
    pub fn same(region: Region, part: usize, entry: usize, from: Region) -> Self {
        let axes = (0..region.ndim()).map(Some).collect();
        Self { region, from: PieceFrom::Box { part, entry, region: from, axes } }
    }

    /// The region `region` of the assembled tensor is zero.
    #[must_use]
    pub fn zeros(region: Region) -> Self {
        Self { region, from: PieceFrom::Zeros }
    }
}

/// A reader of tensors assembled from parts of other readers' tensors. It buffers nothing: every
/// byte is read from its file into its destination.
pub struct Assembled {
    metadata: Arc<CheckpointMetadata>,
    parts: Vec<PartReader>,
    origins: Vec<Origin>,
}

/// A checkpoint that provides pieces.
struct PartReader {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    /// The chunk indexes of the tensors that provide pieces, by entry.
    chunks: HashMap<usize, ChunkIndex>,
}

/// The origin of an entry.
enum Origin {
    /// An entry of a part, unchanged.
    Passed { part: usize, entry: u32 },
    /// Pieces, one for each chunk.
    Pieces(Vec<Piece>),
    /// A value in memory.
    Value(Value),
}

/// Builds an [`Assembled`] reader.
#[must_use = "call `finish`"]
pub struct AssembledBuilder {
    inputs: Vec<Input>,
    /// Whether all files are in one storage and keep their names.
    one_storage: bool,
    metadata: CheckpointMetadata,
    chunks: Vec<HashMap<usize, ChunkIndex>>,
    origins: Vec<Origin>,
    /// Synthetic placements for what is not a stored chunk, so that tensors of equal pieces are
    /// found to be equal.
    places: HashMap<(DType, PieceFrom), u64>,
    given: u64,
}

impl fmt::Debug for Assembled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (entries, parts) = (self.origins.len(), self.parts.len());
        f.debug_struct("Assembled").field("entries", &entries).field("parts", &parts).finish()
    }
}

impl fmt::Debug for AssembledBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AssembledBuilder").field("entries", &self.origins.len()).finish()
    }
}

impl Assembled {
    /// Starts an empty builder. What is added comes from `parts`.
    ///
    /// # Errors
    ///
    /// When the index of a part cannot be read.
    pub async fn builder(parts: &[Source], job: &JobOptions) -> Result<AssembledBuilder, JobError> {
        let mut inputs = Vec::with_capacity(parts.len());
        for part in parts {
            inputs.push(Input::open(part, job).await?);
        }
        let same = |pair: &[Input]| match pair {
            [a, b] => Arc::ptr_eq(&a.source.storage, &b.source.storage),
            _ => true,
        };
        let one_storage = inputs.windows(2).all(same);
        let mut metadata = CheckpointMetadata::new();
        if let Some(first) = inputs.first() {
            *metadata.provenance_mut() = first.metadata.provenance().clone();
        }
        let chunks = inputs.iter().map(|_| HashMap::new()).collect();
        let (origins, places) = (Vec::new(), HashMap::new());
        Ok(AssembledBuilder { inputs, one_storage, metadata, chunks, origins, places, given: 0 })
    }
}

impl AssembledBuilder {
    /// The index of a part.
    #[must_use]
    pub fn part(&self, part: usize) -> Option<&Arc<CheckpointMetadata>> {
        self.inputs.get(part).map(|input| &input.metadata)
    }

    /// Sets the name of the format; by default, that of the first part.
    pub fn format(&mut self, name: impl Into<Arc<str>>) -> &mut Self {
        self.metadata.provenance_mut().format = Some(name.into());
        self
    }

    /// The index of what was added so far.
    #[must_use]
    pub fn metadata(&self) -> &CheckpointMetadata {
        &self.metadata
    }

    /// Adds an entry of a part unchanged.
    ///
    /// # Errors
    ///
    /// When the entry does not exist, or `fqn` exists already.
    pub fn pass(
        &mut self,
        fqn: impl Into<Arc<str>>,
        path: Option<StatePath>,
        part: usize,
        entry: usize,
    ) -> Result<(), JobError> {
        let fqn = fqn.into();
        let missing = || assembly(&fqn, format!("input {part} has no entry {entry}"));
        let input = self.inputs.get(part).ok_or_else(missing)?;
        let stored = input.metadata.at(entry).ok_or_else(missing)?.1;
        let index = u32::try_from(entry).map_err(|_| missing())?;
        let number = (!self.one_storage).then_some(part);
        let mut shown = moved(stored, number, &input.metadata, &mut self.metadata);
        match &mut shown {
            Entry::Tensor(tensor) => tensor.path = path,
            Entry::Object(object) => object.path = path,
            _ => {}
        }
        self.insert(fqn, shown, Origin::Passed { part, entry: index })
    }

    /// Adds a tensor that consists of `pieces`.
    ///
    /// # Errors
    ///
    /// When the pieces do not cover `shape` exactly once; when a piece has another dtype or number
    /// of elements than its origin, or its origin is outside the stored tensor; when `fqn` exists
    /// already.
    pub fn tensor(
        &mut self,
        fqn: impl Into<Arc<str>>,
        path: Option<StatePath>,
        dtype: DType,
        shape: impl Into<Dims>,
        pieces: Vec<Piece>,
    ) -> Result<(), JobError> {
        self.add_tensor(fqn.into(), path, dtype, shape.into(), pieces, true)
    }

    /// Adds a tensor that consists of `pieces`, as [`tensor`](Self::tensor), which is no tie of another tensor of the
    /// same pieces: each is written by itself.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    pub fn copied_tensor(
        &mut self,
        fqn: impl Into<Arc<str>>,
        path: Option<StatePath>,
        dtype: DType,
        shape: impl Into<Dims>,
        pieces: Vec<Piece>,
    ) -> Result<(), JobError> {
        self.add_tensor(fqn.into(), path, dtype, shape.into(), pieces, false)
    }

    fn add_tensor(
        &mut self,
        fqn: Arc<str>,
        path: Option<StatePath>,
        dtype: DType,
        shape: Dims,
        pieces: Vec<Piece>,
        may_be_tied: bool,
    ) -> Result<(), JobError> {
        check_cover(&fqn, &shape, &pieces)?;
        let mut tensor = TensorEntry::new(dtype, shape.clone());
        tensor.path = path;
        let mut chunks = ChunkTable::new(shape.ndim());
        for piece in &pieces {
            self.check_piece(&fqn, dtype, piece)?;
            let placement = match may_be_tied {
                true => self.place(dtype, &piece.from)?,
                false => {
                    let place = self.new_place();
                    self.made_up(place)?
                }
            };
            let pushed = chunks.push(piece.region.offsets(), piece.region.sizes(), Some(placement));
            pushed.map_err(|error| FormatError::new("index", error.to_string()))?;
        }
        tensor.chunks = chunks;
        self.insert(fqn, Entry::Tensor(tensor), Origin::Pieces(pieces))
    }

    /// Adds an object with a value in memory.
    ///
    /// # Errors
    ///
    /// When `fqn` exists already.
    pub fn object(
        &mut self,
        fqn: impl Into<Arc<str>>,
        path: Option<StatePath>,
        value: Value,
    ) -> Result<(), JobError> {
        let place = self.new_place();
        let mut object = ObjectEntry::new(Some(self.made_up(place)?));
        object.path = path;
        self.insert(fqn.into(), Entry::Object(object), Origin::Value(value))
    }

    /// Returns everything added, as a source.
    ///
    /// # Errors
    ///
    /// When there are no parts.
    pub fn finish(self) -> Result<Source, JobError> {
        let storages = self.inputs.iter().map(|input| Arc::clone(&input.source.storage)).collect();
        let parts = self.inputs.iter().zip(self.chunks).map(|(input, chunks)| {
            let (reader, metadata) = (&input.source.reader, &input.metadata);
            PartReader { reader: Arc::clone(reader), metadata: Arc::clone(metadata), chunks }
        });
        let parts = parts.collect();
        let sources: Vec<_> = self.inputs.into_iter().map(|input| input.source).collect();
        let (metadata, origins) = (Arc::new(self.metadata), self.origins);
        let view = Assembled { metadata, parts, origins };
        let mut source = Source::derived(Arc::new(view), &sources).ok_or_else(|| {
            JobError::invalid_option("an assembled checkpoint", "needs at least one input")
        })?;
        if !self.one_storage {
            source.storage = Arc::new(Joined::new(storages));
        }
        Ok(source)
    }

    fn insert(&mut self, fqn: Arc<str>, entry: Entry, origin: Origin) -> Result<(), JobError> {
        if self.metadata.get(&fqn).is_some() {
            return Err(StateProblem::Duplicate.of(fqn.to_string()).into());
        }
        self.metadata.insert(fqn, entry);
        self.origins.push(origin);
        Ok(())
    }

    fn check_piece(&mut self, fqn: &str, dtype: DType, piece: &Piece) -> Result<(), JobError> {
        let (part, entry, region) = match &piece.from {
            PieceFrom::Zeros => return Ok(()),
            PieceFrom::Box { part, entry, region, .. }
            | PieceFrom::Reshaped { part, entry, region } => (*part, *entry, region),
        };
        let refuse = |problem: String| JobError::from(assembly(fqn, problem));
        let input = self.inputs.get(part);
        let found = input.and_then(|input| input.metadata.at(entry));
        let found = found.and_then(|(name, entry)| Some((name, entry.as_tensor()?)));
        let Some((name, tensor)) = found else {
            return Err(refuse(format!("entry {entry} of input {part} is not a tensor")));
        };
        if tensor.dtype != dtype {
            let problem = format!("it is {dtype}, and its piece {name:?} is {}", tensor.dtype);
            return Err(refuse(problem));
        }
        let within = Region::full(tensor.shape.clone()).is_ok_and(|full| full.contains(region));
        if !within {
            let shape = &tensor.shape;
            return Err(refuse(format!("{region} is not within {name:?} of shape {shape}")));
        }
        let fits = match &piece.from {
            PieceFrom::Box { axes, .. } => {
                axes.len() == piece.region.ndim() && along(axes, piece.region.sizes(), region)
            }
            _ => piece.region.volume() == region.volume(),
        };
        if !fits {
            let there = piece.region.sizes();
            let problem = format!("{} of {name:?} does not fit into {there}", region.sizes());
            return Err(refuse(problem));
        }
        if let Some(Slot::Vacant(slot)) = self.chunks.get_mut(part).map(|c| c.entry(entry)) {
            slot.insert(index_of(tensor, name)?);
        }
        Ok(())
    }

    fn new_place(&mut self) -> u64 {
        self.given += 1;
        self.given
    }

    fn place(&mut self, dtype: DType, from: &PieceFrom) -> Result<Placement, JobError> {
        let place = match from {
            // Tensors of zeros are equal, but not ties of each other.
            PieceFrom::Zeros => self.new_place(),
            from => {
                let next = self.given + 1;
                let place = *self.places.entry((dtype, from.clone())).or_insert(next);
                self.given = self.given.max(place);
                place
            }
        };
        Ok(self.made_up(place)?)
    }

    /// A synthetic placement without stored bytes.
    fn made_up(&mut self, place: u64) -> Result<Placement, CheckpointError> {
        let file = Key::new("assembled").ok().and_then(|key| self.metadata.intern_file(&key));
        let encoding = self.metadata.intern_encoding(&Encoding::new(Layout::Computed));
        let full = || FormatError::new("index", "it has too many files or encodings");
        let (file, encoding) = file.zip(encoding).ok_or_else(full)?;
        Ok(Placement { file, encoding, byte_offset: place, byte_len: 0 })
    }
}

/// Whether a box of `sizes` is `region` with its axes permuted.
fn along(axes: &[Option<usize>], sizes: &Dims, region: &Region) -> bool {
    let mut named = vec![false; region.ndim()];
    let fit = axes.iter().zip(&**sizes).all(|(axis, size)| match axis {
        None => *size == 1,
        Some(axis) => match named.get_mut(*axis) {
            Some(named) => !std::mem::replace(named, true) && region.sizes()[*axis] == *size,
            None => false,
        },
    });
    fit && named.iter().zip(&**region.sizes()).all(|(named, size)| *named || *size == 1)
}

fn index_of(tensor: &TensorEntry, name: &str) -> Result<ChunkIndex, CheckpointError> {
    let mut chunks = Vec::with_capacity(tensor.chunks.len());
    for (index, chunk) in (0_u32..).zip(tensor.chunks.iter()) {
        let region = chunk.region().map_err(|error| invalid_region(name, error))?;
        if !region.is_empty() {
            chunks.push((index, region));
        }
    }
    Ok(ChunkIndex::new(chunks))
}

/// Fails unless the pieces cover every element of a tensor exactly once.
fn check_cover(fqn: &str, shape: &Dims, pieces: &[Piece]) -> Result<(), JobError> {
    let refuse = |problem: String| JobError::from(assembly(fqn, problem));
    let full = Region::full(shape.clone()).map_err(|error| refuse(error.to_string()))?;
    let mut found = 0_u64;
    for Piece { region, .. } in pieces {
        if !full.contains(region) {
            return Err(refuse(format!("a piece at {region} is not within its shape {shape}")));
        }
        found = found.saturating_add(region.volume());
    }
    let rows: Vec<(&[u64], &[u64])> =
        pieces.iter().map(|p| (&**p.region.offsets(), &**p.region.sizes())).collect();
    match find_overlap(&rows).map_err(|error| refuse(error.to_string()))? {
        Some((a, b)) => {
            let (a, b) = (&pieces[a].region, &pieces[b].region);
            Err(refuse(format!("two pieces have the same elements, at {a} and at {b}")))
        }
        None if found == full.volume() => Ok(()),
        None => {
            let (fqn, expected) = (fqn.to_owned(), full.volume());
            Err(ChunksProblem::Uncovered { expected, found }.of(fqn).into())
        }
    }
}
