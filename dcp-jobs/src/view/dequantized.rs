//! Dequantizes block-scaled weights.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::region::RegionError;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, FormatError, PlanError, Region, StorageReader,
    TensorView,
};
use dcp_formats::hf::{
    BLOCK, E2M1, QuantScheme, Quantized, configured_block, configured_method, find_quantized,
};

use crate::cast::{CastCounts, CastOptions, Caster};
use crate::error::JobError;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::read::ties::{Place, places};
use crate::source::Source;

use self::scheme::{CONFIG, config_of, of_block_size, refuse_unread};
use super::matrix::{Matrix, exchange, outer_indices, transposed};
use super::scales::{Scales, Tile, floats};
use super::scratch::{Scratch, invalid_region, name, no_entry, outside};
use super::translated::Translated;
use super::unwrapped::Unwrapped;

mod scheme;

/// The number of values to compute at once.
const SLAB: u64 = 1 << 19;

/// Options of dequantizing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DequantizeOptions {
    /// The dtype of the result: `float32`, `bfloat16` or `float16`.
    pub dtype: DType,
    /// Rows and columns of 8-bit weights that share a scale. When `None`, the size in the model's
    /// `config.json`, or 128 by 128.
    pub block: Option<[u64; 2]>,
}

impl DequantizeOptions {
    /// Dequantizes to `dtype`, with the block size of the model.
    #[must_use]
    pub fn new(dtype: DType) -> Self {
        Self { dtype, block: None }
    }

    /// Sets the block size, in rows and columns.
    #[must_use]
    pub fn with_block(mut self, block: [u64; 2]) -> Self {
        self.block = Some(block);
        self
    }
}

/// A reader that dequantizes the block-scaled weights of another reader and hides their scales;
/// [`QuantScheme`] lists the schemes. Everything else stays unchanged, including weights without
/// scales.
///
/// A value is the product of weight and scale as `float32`, rounded once more to the requested
/// dtype: for 8-bit weights, bit for bit what PyTorch 2.15 computes. MXFP4 weights, which PyTorch's
/// own reader fills only in part, are exact in `float32` and `bfloat16`; a scale of 255 is NaN, as
/// OCP specifies.
///
/// Reading a part of a tensor needs memory for that part only. The last 16 MiB of scales are
/// cached.
pub struct Dequantized {
    inner: Arc<dyn StorageReader>,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    entries: Vec<Shown>,
    outward: Arc<HashMap<u32, u32>>,
    scales: Scales,
    caster: Caster,
}

/// The origin of an entry.
#[derive(Clone, Debug)]
struct Shown {
    /// The entry of the inner reader.
    inner: u32,
    weight: Option<Weight>,
}

#[derive(Clone, Debug)]
struct Weight {
    scales: u32,
    scheme: QuantScheme,
    stored: DType,
    /// The value of each byte, for one-byte codes.
    numbers: Arc<[f32]>,
}

/// The scales of each stored weight. One stored weight with different scales yields different
/// values.
#[derive(Default)]
struct ScalesByWeight {
    known: HashMap<Vec<Place>, Vec<(QuantScheme, Vec<Place>)>>,
}

impl ScalesByWeight {
    /// The encoding of a weight's values. It is numbered by the weight's scales, so that few
    /// encodings exist in all.
    fn encoding(
        &mut self,
        metadata: &CheckpointMetadata,
        scheme: QuantScheme,
        weight: &TensorEntry,
        scales: Option<&TensorEntry>,
    ) -> Encoding {
        let scales = scales.and_then(|scales| places(metadata, scales));
        let Some((weight, scales)) = places(metadata, weight).zip(scales) else {
            // The placement does not determine the values.
            return Encoding::new(Layout::TorchSave).with_transforms(["dequantized".into()]);
        };
        let ways = self.known.entry(weight).or_default();
        let way = (scheme, scales);
        let number = ways.iter().position(|known| *known == way).unwrap_or_else(|| {
            ways.push(way);
            ways.len() - 1
        });
        let how = format!("dequantized with scales {number}");
        Encoding::new(Layout::Computed).with_transforms([how.into()])
    }
}

impl Dequantized {
    /// A reader over `inner`, with 8-bit weights in blocks of `block`.
    ///
    /// # Errors
    ///
    /// When the inner index cannot be read, weights and scales do not match, or `dtype` cannot be a
    /// result.
    pub async fn new(
        inner: Arc<dyn StorageReader>,
        dtype: DType,
        block: [u64; 2],
    ) -> Result<Self, JobError> {
        if !matches!(dtype, DType::Float32 | DType::BFloat16 | DType::Float16) {
            let problem = format!("become float32, bfloat16 or float16, not {dtype}");
            return Err(JobError::invalid_option("quantized weights", problem));
        }
        let inner_metadata = inner.metadata().await?;
        let found = find_quantized(&inner_metadata, block).map_err(of_block_size)?;
        let weights: HashMap<_, _> = found.iter().map(|one| (one.weight, one)).collect();
        let scales: HashMap<_, _> = found.iter().map(|one| (one.scales, ())).collect();
        let full = || FormatError::new("index", "it has too many files or encodings");
        let mut metadata = CheckpointMetadata::new();
        *metadata.provenance_mut() = inner_metadata.provenance().clone();
        // Files in the same order get the same ids, so placements stay valid.
        for file in inner_metadata.files() {
            metadata.intern_file(file).ok_or_else(full)?;
        }
        for encoding in inner_metadata.encodings() {
            metadata.intern_encoding(encoding).ok_or_else(full)?;
        }
        let mut all_scales = ScalesByWeight::default();
        let (mut entries, mut outward) = (Vec::new(), HashMap::new());
        for (position, (fqn, entry)) in inner_metadata.iter().enumerate() {
            let inner = u32::try_from(position).map_err(|_| full())?;
            if scales.contains_key(&position) {
                continue;
            }
            let quantized = weights.get(&position).copied().zip(entry.as_tensor());
            let (fqn, entry, weight) = match quantized {
                None => (Arc::clone(fqn), entry.clone(), None),
                Some((one, tensor)) => {
                    let weight = Weight::new(one, tensor)?;
                    let scales = inner_metadata.at(one.scales).and_then(|e| e.1.as_tensor());
                    let made = all_scales.encoding(&inner_metadata, one.scheme, tensor, scales);
                    let encoding = metadata.intern_encoding(&made).ok_or_else(full)?;
                    let entry = plain(one, tensor, dtype, encoding)
                        .map_err(|error| invalid_region(fqn, error))?;
                    (Arc::clone(&one.fqn), Entry::Tensor(entry), Some(weight))
                }
            };
            outward.insert(inner, u32::try_from(metadata.insert(fqn, entry)).map_err(|_| full())?);
            entries.push(Shown { inner, weight });
        }
        let caster = Caster::new("weights", DType::Float32, dtype, CastOptions::default())?;
        let scales = Scales::new(Arc::clone(&inner), Arc::clone(&inner_metadata));
        let (metadata, outward) = (Arc::new(metadata), Arc::new(outward));
        Ok(Self { inner, inner_metadata, metadata, entries, outward, scales, caster })
    }

    /// Dequantizes `source` for a job. This includes tensors of torchao (0.18): `OptimState8bit`,
    /// `OptimState4bit`, `OptimStateFp8`, `Int8Tensor` and `Float8Tensor`, bit for bit as their
    /// `dequantize` does.
    ///
    /// # Errors
    ///
    /// As [`Dequantized::new`], and without a block size, when `config.json` cannot be read. When
    /// there is nothing quantized, or a scheme that is not among these.
    pub async fn apply(
        source: &Source,
        options: DequantizeOptions,
        job: &JobOptions,
    ) -> Result<Source, JobError> {
        let config = config_of(source).await?;
        let configured = || match &config {
            Some(config) => configured_block(config)
                .map_err(|error| error.in_file(CONFIG, 0))
                .map(|block| block.unwrap_or(BLOCK)),
            None => Ok(BLOCK),
        };
        let block = options.block.map_or_else(configured, Ok).map_err(CheckpointError::from)?;
        let inner = CheckedSource::new(source, job);
        let unwrapped = Unwrapped::new(Arc::clone(&inner.reader), options.dtype).await?;
        let unwraps = unwrapped.is_some();
        let reader: Arc<dyn StorageReader> = match unwrapped {
            Some(unwrapped) => Arc::new(unwrapped),
            None => Arc::clone(&inner.reader),
        };
        let view = Self::new(reader, options.dtype, block).await?;
        let method = config.as_deref().and_then(configured_method);
        refuse_unread(&view, unwraps, method.as_deref())?;
        let parts = std::slice::from_ref(&inner);
        Ok(Source::derived(Arc::new(view), parts).unwrap_or_else(|| source.clone()))
    }

    async fn fill(
        &self,
        item: &ReadItem,
        region: &Region,
        (shown, weight): (&Shown, &Weight),
        view: &TensorView,
    ) -> Result<u64, CheckpointError> {
        let fqn = name(&self.metadata, item.entry);
        let bad = |error: RegionError| invalid_region(&fqn, error);
        let failed = |source| CheckpointError::Memory { fqn: fqn.to_string(), source };
        let ReadKind::Tensor { chunk, .. } = item.kind else { return Ok(0) };
        let mut read = 0;
        // Iterates over the stored weight in rows of blocks.
        let walked = weight.exchanged(region).map_err(bad)?;
        for outer in outer_indices(&walked) {
            let matrix = Matrix::of(&walked, outer);
            let (mut row, mut col) = (matrix.rows.0, matrix.cols.0);
            while row < matrix.rows.1 {
                let (scale_row, scale_col) = weight.scale_of(row, col);
                let tile = self.scales.tile(weight.scales, &matrix.outer, scale_row, scale_col);
                let (tile, cost) = tile.await?;
                let (rows, cols) = weight.reach(&tile, &matrix, row, col);
                if rows <= row || cols <= col {
                    let problem = "its scales do not cover all of its elements".to_owned();
                    return Err(PlanError::Index { fqn: fqn.to_string(), problem }.into());
                }
                let slab = matrix.part(row..rows, col..cols).map_err(bad)?;
                let stored = weight.stored_region(&slab).map_err(bad)?;
                let mut scratch = Scratch::default();
                scratch.push(shown.inner, chunk, weight.stored, stored);
                let (bytes, weights_cost) =
                    scratch.read(&*self.inner, &self.inner_metadata).await?;
                let bytes = bytes.into_iter().next().unwrap_or_default();
                let mut numbers = weight.numbers(&bytes, &tile, row..rows, col..cols);
                if weight.transposed() {
                    numbers = transposed(&numbers, cols - col);
                }
                let exchanged = weight.exchanged(&slab).map_err(bad)?;
                let target = exchanged.relative_to(region.offsets());
                let target = target.ok_or_else(|| outside(&fqn, &exchanged, region))?;
                let target = view.narrow(&target)?;
                let mut elements = vec![0; usize::try_from(target.byte_len()).unwrap_or(0)];
                self.caster.cast(&numbers, &mut elements, &mut CastCounts::default());
                target.fill_from(&elements).map_err(failed)?;
                read += cost + weights_cost.bytes_read;
                // All columns of these rows come first, then the next rows.
                col = cols;
                if col >= matrix.cols.1 {
                    (row, col) = (rows, matrix.cols.0);
                }
            }
        }
        Ok(read)
    }
}

impl Weight {
    fn new(one: &Quantized, tensor: &TensorEntry) -> Result<Self, CheckpointError> {
        let numbers = match one.scheme {
            QuantScheme::Block { .. } => {
                let all: Vec<u8> = (0..=u8::MAX).collect();
                floats(&one.fqn, tensor.dtype, &all)?
            }
            _ => Vec::new(),
        };
        let scales = u32::try_from(one.scales).unwrap_or(u32::MAX);
        Ok(Self { scales, scheme: one.scheme, stored: tensor.dtype, numbers: numbers.into() })
    }

    /// The rows and columns that share a scale.
    fn block(&self) -> (u64, u64) {
        match self.scheme {
            QuantScheme::Block { rows, cols } => (rows, cols),
            QuantScheme::Mxfp4 { block_bytes, .. } => (1, block_bytes.saturating_mul(2)),
            _ => (1, 1),
        }
    }

    fn transposed(&self) -> bool {
        matches!(self.scheme, QuantScheme::Mxfp4 { transposed: true, .. })
    }

    /// Exchanges the axes of a region between the order of the result and the order of the stored
    /// weight.
    fn exchanged(&self, region: &Region) -> Result<Region, RegionError> {
        let (mut offsets, mut sizes) = (region.offsets().to_vec(), region.sizes().to_vec());
        if self.transposed() {
            exchange(&mut offsets);
            exchange(&mut sizes);
        }
        Region::new(offsets, sizes)
    }

    fn scale_of(&self, row: u64, col: u64) -> (u64, u64) {
        let (rows, cols) = self.block();
        (row / rows.max(1), col / cols.max(1))
    }

    /// The end of what is computed at once from `row` and `col`: the end of the tile of scales, of
    /// the matrix, or of the memory.
    fn reach(&self, tile: &Tile, matrix: &Matrix, row: u64, col: u64) -> (u64, u64) {
        let (block_rows, block_cols) = self.block();
        let cols = tile.cols.end.saturating_mul(block_cols).min(matrix.cols.1);
        let cols = cols.min(col.saturating_add(SLAB));
        let most = (SLAB / (cols - col).max(1)).max(1);
        // Whole rows are computed together. A row that exceeds the memory is computed alone, in
        // parts.
        let most = if cols < matrix.cols.1 || col > matrix.cols.0 { 1 } else { most };
        let rows = tile.rows.end.saturating_mul(block_rows).min(matrix.rows.1);
        (rows.min(row.saturating_add(most)), cols)
    }

    /// The region of the stored weight that yields a part of the result.
    fn stored_region(&self, slab: &Region) -> Result<Region, RegionError> {
        let QuantScheme::Mxfp4 { block_bytes, .. } = self.scheme else { return Ok(slab.clone()) };
        let (_, width) = self.block();
        let (mut offsets, mut sizes) = (slab.offsets().to_vec(), slab.sizes().to_vec());
        if let (Some(at), Some(len)) = (offsets.last_mut(), sizes.last_mut()) {
            let end = (*at + *len).div_ceil(width);
            *at /= width;
            *len = end - *at;
        }
        offsets.push(0);
        sizes.push(block_bytes);
        Region::new(offsets, sizes)
    }

    /// The values of some rows and columns, as bytes of `float32`.
    fn numbers(
        &self,
        stored: &Bytes,
        tile: &Tile,
        rows: std::ops::Range<u64>,
        cols: std::ops::Range<u64>,
    ) -> Vec<u8> {
        let block = self.block();
        let (block_rows, block_cols) = (block.0.max(1), block.1.max(1));
        let count = |n: u64| usize::try_from(n).unwrap_or(0);
        let (height, width) = (count(rows.end - rows.start), count(cols.end - cols.start));
        let mut numbers = vec![0; height.saturating_mul(width).saturating_mul(4)];
        let lines = stored.chunks_exact((stored.len() / height.max(1)).max(1));
        let made = numbers.chunks_exact_mut(width.saturating_mul(4).max(1));
        for ((row, line), made) in rows.zip(lines).zip(made) {
            let scales = tile.row(row / block_rows);
            let (mut line, mut made) = (line, made);
            let mut col = cols.start;
            // Block by block: each has one scale.
            while col < cols.end {
                let end = (col / block_cols + 1).saturating_mul(block_cols).min(cols.end);
                let scale = count((col / block_cols).saturating_sub(tile.cols.start));
                let scale = scales.get(scale).copied().unwrap_or(f32::NAN);
                let len = count(end - col).saturating_mul(4).min(made.len());
                let (block, rest) = made.split_at_mut(len);
                let taken = match self.scheme {
                    QuantScheme::Mxfp4 { block_bytes, .. } => {
                        mxfp4_block(line, count(col % block_cols), scale, block);
                        count(block_bytes)
                    }
                    _ => self.byte_block(line, scale, block),
                };
                line = line.get(taken..).unwrap_or_default();
                (made, col) = (rest, end);
            }
        }
        numbers
    }

    /// Dequantizes codes of one byte; returns how many.
    fn byte_block(&self, stored: &[u8], scale: f32, made: &mut [u8]) -> usize {
        let Ok(numbers) = <&[f32; 256]>::try_from(&*self.numbers) else { return 0 };
        for (made, byte) in made.chunks_exact_mut(4).zip(stored) {
            made.copy_from_slice(&(numbers[usize::from(*byte)] * scale).to_le_bytes());
        }
        made.len() / 4
    }
}

/// Dequantizes an MXFP4 block from its `skip`-th value on.
fn mxfp4_block(stored: &[u8], skip: usize, scale: f32, made: &mut [u8]) {
    let scaled = E2M1.map(|number| number * scale);
    let nibbles = stored.iter().flat_map(|byte| [byte & 0xf, byte >> 4]).skip(skip);
    for (made, nibble) in made.chunks_exact_mut(4).zip(nibbles) {
        made.copy_from_slice(&scaled[usize::from(nibble & 0xf)].to_le_bytes());
    }
}

/// The dequantized tensor. Its chunks keep their placements under an encoding that only this view
/// reads.
fn plain(
    one: &Quantized,
    tensor: &TensorEntry,
    dtype: DType,
    encoding: u16,
) -> Result<TensorEntry, RegionError> {
    let mut shown = TensorEntry::new(dtype, one.shape.clone());
    shown.path.clone_from(&tensor.path);
    for chunk in tensor.chunks.iter() {
        let placement = chunk.placement.map(|placement| Placement { encoding, ..placement });
        let (mut offsets, mut sizes) = (chunk.offsets.to_vec(), chunk.sizes.to_vec());
        if let QuantScheme::Mxfp4 { block_bytes, transposed } = one.scheme {
            offsets.pop();
            sizes.pop();
            let width = block_bytes.saturating_mul(2);
            for last in offsets.last_mut().into_iter().chain(sizes.last_mut()) {
                *last = last.saturating_mul(width);
            }
            if transposed {
                exchange(&mut offsets);
                exchange(&mut sizes);
            }
        }
        shown.chunks.push(&offsets, &sizes, placement)?;
    }
    Ok(shown)
}

#[async_trait]
impl StorageReader for Dequantized {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let mut unchanged = LoadPlan::default();
        for item in &plan.items {
            let shown = self.entries.get(item.entry as usize);
            let shown = shown.ok_or_else(|| no_entry(item.entry))?;
            let (ReadKind::Tensor { region, .. }, Some(weight)) = (&item.kind, &shown.weight)
            else {
                unchanged.items.push(ReadItem { entry: shown.inner, ..item.clone() });
                continue;
            };
            let view = sink.destination(item)?;
            let read = self.fill(item, region, (shown, weight), &view).await?;
            sink.commit(item)?;
            report += ReadReport::new(view.byte_len(), read);
        }
        if !unchanged.items.is_empty() {
            let sink = Arc::new(Translated::new(sink, Arc::clone(&self.outward)));
            report += self.inner.read(&self.inner_metadata, &unchanged, sink).await?;
        }
        Ok(report)
    }
}

impl fmt::Debug for Dequantized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = self.entries.iter().filter(|shown| shown.weight.is_some()).count();
        f.debug_struct("Dequantized")
            .field("inner", &self.inner)
            .field("weights", &weights)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
