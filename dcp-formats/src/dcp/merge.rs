//! Merges the metadata of ranks that saved without collectives.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::metadata::{ChunkRef, Entry, FileId, ObjectEntry, Placement, TensorEntry};
use dcp_core::{CheckpointMetadata, Dims, FormatError};
use indexmap::IndexMap;

use crate::metadata::check_chunks;

/// Merges metadata: chunks by FQN and offsets. The first rank's wins where several have the same.
#[derive(Default)]
pub(super) struct Merger {
    merged: CheckpointMetadata,
    /// The ranks of each entry.
    holders: Vec<Vec<u32>>,
    /// The chunks seen, by entry and offsets.
    chunks: HashMap<(usize, Dims), Chunk>,
    /// The placements of each rank's object, by FQN.
    objects: IndexMap<Arc<str>, Vec<(u32, Placement)>>,
    unlike: Vec<Unlike>,
    /// The number of elements of all tensors, and of all their chunks.
    elements: (u128, u128),
}

/// A chunk, and the ranks that have it.
struct Chunk {
    sizes: Dims,
    places: Vec<(u32, Placement)>,
}

/// The entries of several ranks under one FQN, or at one offset.
pub(super) struct Copies {
    pub(super) fqn: Arc<str>,
    pub(super) places: Vec<(u32, Placement)>,
}

/// An entry of a rank whose kind, dtype, shape or chunking differs from that of others.
pub(super) struct Unlike {
    pub(super) fqn: Arc<str>,
    pub(super) rank: u32,
    /// The ranks whose entry is kept.
    pub(super) others: Vec<u32>,
    pub(super) problem: String,
    /// Whether it is the same tensor with other chunks.
    pub(super) divided: bool,
}

/// The result of merging.
pub(super) struct Merged {
    pub(super) metadata: CheckpointMetadata,
    /// Entries of more than one rank.
    pub(super) copies: Vec<Copies>,
    /// Entries that contradict the kept ones and were dropped.
    pub(super) unlike: Vec<Unlike>,
}

impl Merger {
    /// Adds the metadata of the next rank. Drops what contradicts earlier ranks.
    pub(super) fn add(&mut self, rank: u32, part: &CheckpointMetadata) -> Result<(), FormatError> {
        for (fqn, entry) in part.iter() {
            let added = match entry {
                Entry::Tensor(tensor) => self.add_tensor(rank, fqn, tensor, part),
                Entry::Object(object) => self.add_object(rank, fqn, object, part),
                _ => continue,
            };
            match added {
                Ok(index) => {
                    let holders = self.holders.get_mut(index);
                    holders.into_iter().for_each(|ranks| ranks.push(rank));
                }
                Err(Refused::Unlike { problem, divided }) => {
                    let index = self.merged.index_of(fqn);
                    let others = index.and_then(|index| self.holders.get(index));
                    let others = others.cloned().unwrap_or_default();
                    let fqn = Arc::clone(fqn);
                    self.unlike.push(Unlike { fqn, rank, others, problem, divided });
                }
                Err(Refused::Bad(problem)) => {
                    let problem = format!("{fqn:?} {problem}");
                    return Err(FormatError::new("rank-local metadata", problem));
                }
            }
        }
        if self.merged.provenance().format.is_none() {
            *self.merged.provenance_mut() = part.provenance().clone();
        }
        Ok(())
    }

    fn add_tensor(
        &mut self,
        rank: u32,
        fqn: &Arc<str>,
        tensor: &TensorEntry,
        part: &CheckpointMetadata,
    ) -> Result<usize, Refused> {
        let index = match self.merged.index_of(fqn) {
            Some(index) => {
                self.check_like(index, tensor)?;
                index
            }
            None => {
                let mut empty = TensorEntry::new(tensor.dtype, tensor.shape.clone());
                empty.path = tensor.path.clone();
                empty.properties = tensor.properties.clone();
                self.elements.0 += u128::from(tensor.shape.checked_volume().unwrap_or(u64::MAX));
                self.insert(fqn, Entry::Tensor(empty))
            }
        };
        for chunk in tensor.chunks.iter() {
            self.add_chunk(rank, index, chunk, part)?;
        }
        Ok(index)
    }

    /// Fails unless a tensor matches the one known under its FQN.
    fn check_like(&self, index: usize, tensor: &TensorEntry) -> Result<(), Refused> {
        match self.merged.at(index) {
            Some((_, Entry::Tensor(known)))
                if known.dtype == tensor.dtype && known.shape == tensor.shape => {}
            Some((_, Entry::Tensor(known))) => {
                return Err(Refused::unlike(format!(
                    "is not the same tensor on all ranks: {} of shape {}, and {} of shape {}",
                    known.dtype, known.shape, tensor.dtype, tensor.shape
                )));
            }
            _ => return Err(Refused::unlike(NOT_A_TENSOR.into())),
        }
        for chunk in tensor.chunks.iter() {
            if let Some(known) = self.chunks.get(&(index, chunk.offsets.into()))
                && *known.sizes != *chunk.sizes
            {
                let (known, sizes) = (&known.sizes, Dims::from(chunk.sizes));
                let problem = format!("has chunks of {known} and {sizes} at one place");
                return Err(Refused::Unlike { problem, divided: true });
            }
        }
        Ok(())
    }

    fn add_chunk(
        &mut self,
        rank: u32,
        index: usize,
        chunk: ChunkRef<'_>,
        part: &CheckpointMetadata,
    ) -> Result<(), Refused> {
        let placement = match chunk.placement {
            Some(placement) => Some(self.adopt(part, placement)?),
            None => None,
        };
        let place = placement.map(|placement| (rank, placement));
        let at = (index, Dims::from(chunk.offsets));
        if let Some(known) = self.chunks.get_mut(&at) {
            known.places.extend(place);
            return Ok(());
        }
        let sizes = Dims::from(chunk.sizes);
        self.elements.1 += u128::from(sizes.checked_volume().unwrap_or(u64::MAX));
        self.chunks.insert(at, Chunk { sizes, places: place.into_iter().collect() });
        if let Some((_, Entry::Tensor(merged))) = self.merged.at_mut(index) {
            let pushed = merged.chunks.push(chunk.offsets, chunk.sizes, placement);
            pushed.map_err(|error| Refused::Bad(error.to_string()))?;
        }
        Ok(())
    }

    fn add_object(
        &mut self,
        rank: u32,
        fqn: &Arc<str>,
        object: &ObjectEntry,
        part: &CheckpointMetadata,
    ) -> Result<usize, Refused> {
        let known = self.merged.index_of(fqn);
        let other = known.and_then(|index| self.merged.at(index));
        if other.is_some_and(|(_, entry)| entry.as_object().is_none()) {
            return Err(Refused::unlike(NOT_A_TENSOR.into()));
        }
        let placement = match object.placement {
            Some(placement) => Some(self.adopt(part, placement)?),
            None => None,
        };
        let places = self.objects.entry(Arc::clone(fqn)).or_default();
        places.extend(placement.map(|placement| (rank, placement)));
        Ok(known.unwrap_or_else(|| {
            let mut new = ObjectEntry::new(placement);
            new.path = object.path.clone();
            new.tensor = object.tensor.clone();
            self.insert(fqn, Entry::Object(new))
        }))
    }

    fn insert(&mut self, fqn: &Arc<str>, entry: Entry) -> usize {
        self.holders.push(Vec::new());
        self.merged.insert(Arc::clone(fqn), entry)
    }

    /// Translates a placement of `part` to the merged metadata's file and encoding ids.
    fn adopt(
        &mut self,
        part: &CheckpointMetadata,
        placement: Placement,
    ) -> Result<Placement, Refused> {
        let file = part.file(placement.file).and_then(|key| self.merged.intern_file(key));
        let encoding =
            part.encoding(&placement).and_then(|encoding| self.merged.intern_encoding(encoding));
        let (Some(file), Some(encoding)): (Option<FileId>, _) = (file, encoding) else {
            let problem = "is in a file or encoding that is not listed";
            return Err(Refused::Bad(problem.into()));
        };
        Ok(Placement { file, encoding, ..placement })
    }

    /// Whether the ranks so far agree and cover every tensor exactly once.
    pub(super) fn is_whole(&self) -> bool {
        let (tensors, chunks) = self.elements;
        let whole = |entry: &Entry| match entry {
            Entry::Tensor(tensor) => check_chunks(tensor) == Ok(None),
            _ => true,
        };
        self.unlike.is_empty()
            && tensors == chunks
            && tensors > 0
            && self.merged.iter().all(|(_, entry)| whole(entry))
    }

    /// Returns the merged metadata.
    pub(super) fn finish(self) -> Merged {
        let names = |index: usize| self.merged.at(index).map(|(fqn, _)| Arc::clone(fqn));
        let mut tensors: Vec<_> = self.chunks.into_iter().collect();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let tensors = tensors.into_iter().filter_map(|((index, _), chunk)| {
            Some(Copies { fqn: names(index)?, places: chunk.places })
        });
        let objects = self.objects.into_iter().map(|(fqn, places)| Copies { fqn, places });
        let copies = tensors.chain(objects).filter(|copies| copies.places.len() > 1).collect();
        Merged { copies, unlike: self.unlike, metadata: self.merged }
    }
}

const NOT_A_TENSOR: &str = "is a tensor on one rank, not on another";

/// The reason to drop an entry of a rank.
enum Refused {
    /// It contradicts an earlier rank's entry.
    Unlike {
        problem: String,
        divided: bool,
    },
    Bad(String),
}

impl Refused {
    fn unlike(problem: String) -> Self {
        Self::Unlike { problem, divided: false }
    }
}
