//! Merging the metadata of ranks that saved without collectives.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{
    CheckpointMetadata, Dims, Entry, FileId, FormatError, ObjectEntry, Placement, TensorEntry,
};
use indexmap::IndexMap;

/// Unites metadata: chunks by name and offsets, the first rank's where several have the same.
#[derive(Default)]
pub(super) struct Merger {
    merged: CheckpointMetadata,
    /// Sizes of the chunks seen, by entry and offsets.
    chunks: HashMap<(usize, Dims), Dims>,
    /// Objects that more than one rank has: where each rank's lie, by name.
    objects: IndexMap<Arc<str>, Vec<(u32, Placement)>>,
}

/// What was merged.
pub(super) struct Merged {
    pub(super) metadata: CheckpointMetadata,
    /// Where the objects lie that several ranks have.
    pub(super) objects: IndexMap<Arc<str>, Vec<(u32, Placement)>>,
}

impl Merger {
    /// Adds the metadata of the next rank.
    pub(super) fn add(&mut self, rank: u32, part: &CheckpointMetadata) -> Result<(), FormatError> {
        for (fqn, entry) in part.iter() {
            let bad = |problem: String| {
                FormatError::new("rank-local metadata", format!("{fqn:?} {problem}"))
            };
            let known = self.merged.index_of(fqn);
            match entry {
                Entry::Tensor(tensor) => {
                    let index = match known {
                        Some(index) => index,
                        None => {
                            let mut empty = TensorEntry::new(tensor.dtype, tensor.shape.clone());
                            empty.path = tensor.path.clone();
                            empty.properties = tensor.properties.clone();
                            self.merged.insert(fqn.clone(), Entry::Tensor(empty))
                        }
                    };
                    self.add_chunks(index, tensor, part).map_err(bad)?;
                }
                Entry::Object(object) => {
                    let placement = match object.placement {
                        Some(placement) => Some(self.adopt(part, placement).map_err(bad)?),
                        None => None,
                    };
                    let places = self.objects.entry(fqn.clone()).or_default();
                    places.extend(placement.map(|placement| (rank, placement)));
                    let known = known.and_then(|index| self.merged.at(index));
                    if known.is_some_and(|(_, entry)| entry.as_object().is_none()) {
                        return Err(bad("is a tensor on one rank, not on another".into()));
                    }
                    if known.is_none() {
                        let mut new = ObjectEntry::new(placement);
                        new.path = object.path.clone();
                        new.tensor = object.tensor.clone();
                        self.merged.insert(fqn.clone(), Entry::Object(new));
                    }
                }
                _ => {}
            }
        }
        if self.merged.provenance().format.is_none() {
            *self.merged.provenance_mut() = part.provenance().clone();
        }
        Ok(())
    }

    fn add_chunks(
        &mut self,
        index: usize,
        tensor: &TensorEntry,
        part: &CheckpointMetadata,
    ) -> Result<(), String> {
        match self.merged.at(index) {
            Some((_, Entry::Tensor(known)))
                if known.dtype == tensor.dtype && known.shape == tensor.shape => {}
            _ => return Err("is not the same tensor on all ranks".into()),
        }
        for chunk in tensor.chunks.iter() {
            let sizes = Dims::from(chunk.sizes);
            let known = self.chunks.insert((index, chunk.offsets.into()), sizes.clone());
            if let Some(known) = known {
                if known != sizes {
                    return Err(format!("has chunks of {known} and {sizes} at one place"));
                }
                continue;
            }
            let placement = match chunk.placement {
                Some(placement) => Some(self.adopt(part, placement)?),
                None => None,
            };
            if let Some((_, Entry::Tensor(merged))) = self.merged.at_mut(index) {
                merged
                    .chunks
                    .push(chunk.offsets, chunk.sizes, placement)
                    .map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// A placement of `part`, in the counting of the merged metadata.
    fn adopt(
        &mut self,
        part: &CheckpointMetadata,
        placement: Placement,
    ) -> Result<Placement, String> {
        let file = part.file(placement.file).and_then(|key| self.merged.intern_file(key));
        let encoding =
            part.encoding(&placement).and_then(|encoding| self.merged.intern_encoding(encoding));
        let (Some(file), Some(encoding)): (Option<FileId>, _) = (file, encoding) else {
            return Err("lies in a file or encoding that is not listed".into());
        };
        Ok(Placement { file, encoding, ..placement })
    }

    /// What was merged.
    pub(super) fn finish(mut self) -> Merged {
        self.objects.retain(|_, places| places.len() > 1);
        Merged { metadata: self.merged, objects: self.objects }
    }
}
