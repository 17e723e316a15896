//! Reads the scales of block-scaled weights, and caches tiles of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::error::{ChunksProblem, StateProblem};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Dims, Region, StorageReader};

use crate::cast::{CastCounts, CastOptions, Caster};

use super::scratch::{Scratch, invalid_region, name, not_a_tensor};

/// The maximum number of scales in a tile, along the last axis and in all.
const TILE_COLS: u64 = 8192;
const TILE: u64 = 1 << 16;
/// The number of cached tiles: 16 MiB.
const TILES: usize = 64;

/// A part of a tensor of scales, at one index of all but the last two axes.
#[derive(Debug)]
pub(super) struct Tile {
    /// Its rows and columns in the tensor.
    pub(super) rows: std::ops::Range<u64>,
    pub(super) cols: std::ops::Range<u64>,
    values: Vec<f32>,
}

impl Tile {
    /// The scales of one row, from the tile's first column on.
    pub(super) fn row(&self, row: u64) -> &[f32] {
        let cols = usize::try_from(self.cols.end - self.cols.start).unwrap_or(0);
        let start = row.checked_sub(self.rows.start).and_then(|row| usize::try_from(row).ok());
        let start = start.unwrap_or(usize::MAX).saturating_mul(cols);
        self.values.get(start..start.saturating_add(cols)).unwrap_or_default()
    }
}

/// The identity of a tile: the entry, the index on all but the last two axes, and the tile's row
/// and column.
type Place = (u32, Dims, u64, u64);

/// Reads tiles, and caches the last ones.
#[derive(Debug)]
pub(super) struct Scales {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    kept: Mutex<VecDeque<(Place, Arc<Tile>)>>,
}

impl Scales {
    pub(super) fn new(reader: Arc<dyn StorageReader>, metadata: Arc<CheckpointMetadata>) -> Self {
        Self { reader, metadata, kept: Mutex::default() }
    }

    /// The tile with the scale of `row` and `col` at `outer` of the tensor `entry`, and the number
    /// of bytes read for it.
    pub(super) async fn tile(
        &self,
        entry: u32,
        outer: &Dims,
        row: u64,
        col: u64,
    ) -> Result<(Arc<Tile>, u64), CheckpointError> {
        let tensor = self.metadata.at(entry as usize).and_then(|(_, entry)| entry.as_tensor());
        let tensor =
            tensor.ok_or_else(|| not_a_tensor(&self.metadata.entry_name(entry as usize)))?;
        let (height, width) = match &*tensor.shape {
            [] => (1, 1),
            [width] => (1, *width),
            [.., height, width] => (*height, *width),
        };
        let tile_cols = width.clamp(1, TILE_COLS);
        let tile_rows = (TILE / tile_cols).max(1);
        let (first_row, first_col) = (row - row % tile_rows, col - col % tile_cols);
        let place = (entry, outer.clone(), first_row, first_col);
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().iter().find(|(known, _)| *known == place).map(|(_, tile)| tile.clone());
        if let Some(tile) = known {
            return Ok((tile, 0));
        }
        let rows = first_row..first_row.saturating_add(tile_rows).min(height);
        let cols = first_col..first_col.saturating_add(tile_cols).min(width);
        let (tile, read) = self.read(entry, outer, rows, cols).await?;
        let tile = Arc::new(tile);
        let mut kept = lock();
        if kept.len() >= TILES {
            kept.pop_front();
        }
        kept.push_back((place, Arc::clone(&tile)));
        Ok((tile, read))
    }

    async fn read(
        &self,
        entry: u32,
        outer: &Dims,
        rows: std::ops::Range<u64>,
        cols: std::ops::Range<u64>,
    ) -> Result<(Tile, u64), CheckpointError> {
        let fqn = name(&self.metadata, entry);
        let tensor = self.metadata.at(entry as usize).and_then(|(_, entry)| entry.as_tensor());
        let tensor = tensor.ok_or_else(|| not_a_tensor(&fqn))?;
        let inner = [(rows.start, rows.end), (cols.start, cols.end)];
        // A vector of scales has columns only.
        let inner = inner.iter().skip(2_usize.saturating_sub(tensor.shape.ndim()));
        let offsets: Dims =
            outer.iter().copied().chain(inner.clone().map(|(start, _)| *start)).collect();
        let sizes: Dims = outer.iter().map(|_| 1).chain(inner.map(|(a, b)| b - a)).collect();
        let bad = |error| invalid_region(&fqn, error);
        let wanted = Region::new(offsets, sizes).map_err(bad)?;

        let (mut scratch, mut found) = (Scratch::default(), Vec::new());
        for (chunk, stored) in (0_u32..).zip(tensor.chunks.iter()) {
            if let Some(part) = stored.region().map_err(bad)?.intersect(&wanted) {
                scratch.push(entry, chunk, tensor.dtype, part.clone());
                found.push(part);
            }
        }
        let volume = |part: &Region| part.volume();
        let (expected, held) = (wanted.volume(), found.iter().map(volume).sum());
        if expected != held {
            let fqn = fqn.to_string();
            return Err(ChunksProblem::Uncovered { expected, found: held }.of(fqn).into());
        }
        let (parts, cost) = scratch.read(&*self.reader, &self.metadata).await?;
        let mut values = vec![0.0; usize::try_from(expected).unwrap_or(0)];
        for (part, bytes) in found.iter().zip(parts) {
            let numbers = floats(&fqn, tensor.dtype, &bytes)?;
            let mut rest = &*numbers;
            let Some(part) = part.relative_to(wanted.offsets()) else { continue };
            for (at, len) in part.runs_in(wanted.sizes()) {
                let (at, len) = (at as usize, (len as usize).min(rest.len()));
                let (front, back) = rest.split_at(len);
                if let Some(place) = values.get_mut(at..at + len) {
                    place.copy_from_slice(front);
                }
                rest = back;
            }
        }
        Ok((Tile { rows, cols, values }, cost.bytes_read))
    }
}

/// Converts elements to `float32`. Bytes are exponents, as in `float8_e8m0fnu`.
pub(super) fn floats(fqn: &str, dtype: DType, bytes: &[u8]) -> Result<Vec<f32>, CheckpointError> {
    let from = if dtype == DType::UInt8 { DType::Float8E8M0Fnu } else { dtype };
    let caster = Caster::new(fqn, from, DType::Float32, CastOptions::default());
    let caster = caster
        .map_err(|error| StateProblem::NotCastable { problem: error.problem }.of(error.fqn))?;
    let mut elements = vec![0; bytes.len() / dtype.size() * 4];
    caster.cast(bytes, &mut elements, &mut CastCounts::default());
    Ok(elements
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap_or_default()))
        .collect())
}
