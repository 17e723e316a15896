//! The chunks of a tensor: where they are in it, and in files.

use super::Placement;
use crate::tensors::region::{Region, RegionError};

/// The chunks of one tensor, in columns: boxes and placements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkTable {
    ndim: usize,
    /// The offsets and sizes of each chunk, concatenated.
    geometry: Vec<u64>,
    placements: Vec<Option<Placement>>,
}

/// One row of a [`ChunkTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef<'a> {
    /// The offsets in the tensor, per axis.
    pub offsets: &'a [u64],
    /// The sizes, per axis.
    pub sizes: &'a [u64],
    /// The placement; `None` before a writer assigns it, or in a checkpoint that lost the bytes.
    pub placement: Option<Placement>,
}

impl ChunkTable {
    /// A table for chunks of `ndim` axes.
    #[must_use]
    pub fn new(ndim: usize) -> Self {
        Self { ndim, geometry: Vec::new(), placements: Vec::new() }
    }

    /// The number of chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.placements.len()
    }

    /// Whether there are no chunks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.placements.is_empty()
    }

    /// The number of axes.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.ndim
    }

    /// Appends a chunk and returns its position.
    ///
    /// # Errors
    ///
    /// When the chunk has another number of axes than the table.
    pub fn push(
        &mut self,
        offsets: &[u64],
        sizes: &[u64],
        placement: Option<Placement>,
    ) -> Result<usize, RegionError> {
        if offsets.len() != self.ndim || sizes.len() != self.ndim {
            return Err(RegionError::Axes { offsets: offsets.len(), sizes: sizes.len() });
        }
        self.geometry.extend_from_slice(offsets);
        self.geometry.extend_from_slice(sizes);
        self.placements.push(placement);
        Ok(self.placements.len() - 1)
    }

    /// The chunk at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<ChunkRef<'_>> {
        let placement = *self.placements.get(index)?;
        let row = self.geometry.get(index * 2 * self.ndim..(index + 1) * 2 * self.ndim)?;
        let (offsets, sizes) = row.split_at(self.ndim);
        Some(ChunkRef { offsets, sizes, placement })
    }

    /// Whether both tables have the same regions in the same order, wherever they are placed.
    #[must_use]
    pub fn has_regions_of(&self, other: &Self) -> bool {
        self.ndim == other.ndim && self.len() == other.len() && self.geometry == other.geometry
    }

    /// Sets the placement of a chunk. Does nothing past the end.
    pub fn place(&mut self, index: usize, placement: Placement) {
        if let Some(slot) = self.placements.get_mut(index) {
            *slot = Some(placement);
        }
    }

    /// Replaces each placement by the result of `moved`; the regions stay.
    pub fn map_placements(
        &mut self,
        mut moved: impl FnMut(Option<Placement>) -> Option<Placement>,
    ) {
        self.placements.iter_mut().for_each(|placement| *placement = moved(*placement));
    }

    /// All chunks in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ChunkRef<'_>> {
        (0..self.len()).map(|index| {
            let row = &self.geometry[index * 2 * self.ndim..(index + 1) * 2 * self.ndim];
            let (offsets, sizes) = row.split_at(self.ndim);
            ChunkRef { offsets, sizes, placement: self.placements[index] }
        })
    }
}

impl ChunkRef<'_> {
    /// The chunk's box.
    ///
    /// # Errors
    ///
    /// When its end or volume exceeds `u64`, which happens only in unvalidated files.
    pub fn region(&self) -> Result<Region, RegionError> {
        Region::new(self.offsets, self.sizes)
    }
}
