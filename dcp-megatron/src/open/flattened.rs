//! Restores the shapes of tensors that Megatron-Core 0.8 to 0.15 stored as flattened shards.
//! Megatron-Core since 0.16 cannot read them.

use dcp_core::metadata::TensorEntry;
use dcp_core::{Dims, Region};
use dcp_jobs::view::{Piece, PieceFrom};

use crate::error::MegatronError;

/// The most shards beyond those that are stored: a hostile file could name any number.
const CELLS_MAX: u64 = 1 << 20;

/// The pieces of the logical tensor `original`, one for each shard of a regular grid, from
/// `tensor`, which is entry `entry` of part 0 and has that grid as its shape, and one more axis
/// for the elements of a flattened shard.
///
/// `cells` is the number of pieces that may still be made of tensors that have fewer chunks.
pub(crate) fn pieces(
    fqn: &str,
    entry: usize,
    tensor: &TensorEntry,
    original: &Dims,
    cells: &mut Cells,
) -> Result<Vec<Piece>, MegatronError> {
    let refuse = |problem: &str| MegatronError::Flattened {
        fqn: fqn.to_owned(),
        stored: tensor.shape.to_string(),
        original: original.to_string(),
        problem: problem.to_owned(),
    };
    let Some((flat, grid)) = tensor.shape.split_last() else {
        return Err(refuse("there is no axis of elements"));
    };
    if grid.len() != original.ndim() {
        return Err(refuse("the grid of shards has another number of axes"));
    }
    let shard: Option<Dims> = original
        .iter()
        .zip(grid)
        .map(|(len, shards)| {
            len.checked_rem(*shards).filter(|rest| *rest == 0).map(|_| len / shards)
        })
        .collect();
    let shard = shard.ok_or_else(|| refuse("the grid of shards does not divide it"))?;
    if shard.checked_volume() != Some(*flat) {
        return Err(refuse("a shard has another number of elements"));
    }
    if *flat == 0 {
        return Ok(Vec::new());
    }
    let count = Dims::from(grid).checked_volume();
    let count = count.filter(|count| cells.take(*count, tensor.chunks.len()));
    let count = count.ok_or_else(|| refuse("there are far more shards than chunks"))?;
    let mut pieces = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    let mut cell = vec![0_u64; grid.len()];
    loop {
        let overflow = |_| refuse("it has more elements than can be counted");
        let offsets: Dims = cell.iter().zip(&*shard).map(|(at, len)| at * len).collect();
        let region = Region::new(offsets, shard.clone()).map_err(overflow)?;
        let mut at = cell.clone();
        at.push(0);
        let mut sizes = vec![1; cell.len()];
        sizes.push(*flat);
        let from = Region::new(at, sizes).map_err(overflow)?;
        pieces.push(Piece { region, from: PieceFrom::Reshaped { part: 0, entry, region: from } });
        if !advance(&mut cell, grid) {
            return Ok(pieces);
        }
    }
}

/// The number of shards that a checkpoint may still claim beyond its chunks.
#[derive(Debug)]
pub(crate) struct Cells(u64);

impl Default for Cells {
    fn default() -> Self {
        Self(CELLS_MAX)
    }
}

impl Cells {
    fn take(&mut self, count: u64, chunks: usize) -> bool {
        let beyond = count.saturating_sub(chunks as u64);
        self.0.checked_sub(beyond).map(|left| self.0 = left).is_some()
    }
}

/// The next cell of a grid in row-major order; false after the last.
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

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    fn decode(stored: &[u64], original: &[u64]) -> Result<Vec<Piece>, MegatronError> {
        let tensor = TensorEntry::new(DType::Float32, stored);
        pieces("w", 3, &tensor, &Dims::from(original), &mut Cells::default())
    }

    /// The worked example of a layer axis: G=[2,4,3], F=[2,2,1].
    #[test]
    fn a_shard_of_the_grid_is_a_block_of_the_tensor() {
        let pieces = decode(&[2, 2, 1, 6], &[2, 4, 3]).unwrap();
        assert_eq!(pieces.len(), 4);
        let last = &pieces[3];
        assert_eq!(last.region, Region::new([1, 2, 0], [1, 2, 3]).unwrap());
        let from = Region::new([1, 1, 0, 0], [1, 1, 1, 6]).unwrap();
        assert_eq!(last.from, PieceFrom::Reshaped { part: 0, entry: 3, region: from });
    }

    #[test]
    fn a_tensor_of_one_axis_and_one_of_none_are_no_exceptions() {
        assert_eq!(decode(&[1, 10], &[10]).unwrap().len(), 1);
        assert_eq!(decode(&[1], &[]).unwrap().len(), 1);
        assert_eq!(decode(&[2, 0], &[0]).unwrap().len(), 0);
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (stored, original, said) in [
            (&[][..], &[][..], "no axis"),
            (&[2, 2, 6], &[2, 4, 3], "number of axes"),
            (&[3, 1, 8], &[4, 6], "does not divide"),
            (&[0, 1, 8], &[4, 6], "does not divide"),
            (&[2, 1, 11], &[4, 6], "number of elements"),
            (&[1 << 40, 1], &[1 << 40], "far more shards"),
            (&[1 << 40, 1 << 40, 1], &[1 << 40, 1 << 40], "far more shards"),
        ] {
            let error = decode(stored, original).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
