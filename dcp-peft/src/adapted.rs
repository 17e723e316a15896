//! A base model with an adapter merged into it.
//!
//! Nothing is merged before it is read: each segment of a changed tensor is the segment of the base plus that
//! part of the product of two small matrices. The arithmetic is that of PEFT's `merge_and_unload` (0.21) on a
//! base that was loaded in the dtype of its file: the product and the sum are `float32`, and the sum is rounded
//! once to the dtype of the base. Of an embedding, the product is rounded before it is added, too.
//!
//! The rows of a DoRA are scaled to lengths that the adapter has, so a part of a row depends on all of it. The
//! factors of a whole tensor are computed at its first read, in segments, and kept: one number for each output.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, PlanError, Region, StorageReader, TensorView,
};
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::read::TensorReader;
use dcp_jobs::{Error, JobOptions, Source};
use tokio::sync::OnceCell;

use crate::adapter_config::AdapterConfig;
use crate::blocks::{SEGMENT, blocks};
use crate::changes::{Product, changes};
use crate::factors::{FactorCache, Factors};
use crate::lengths::Lengths;
use crate::numbers::{elements_of, floats_of, rounded};
use crate::product::Steps;
use crate::ties::{Base, change_twins};

/// A reader of a base model with an adapter merged into it.
pub struct Adapted {
    base: Arc<dyn StorageReader>,
    base_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    changed: HashMap<u32, Changed>,
    factors: FactorCache,
}

/// The effect of a merge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergeSummary {
    /// The number of tensors that change.
    pub changed: usize,
    /// Notes about tensors that change although the adapter does not name them.
    pub notes: Vec<String>,
}

/// A tensor that is not as in the base.
struct Changed {
    /// The values to which the product is added: those of the base, or of the adapter.
    stored: TensorReader,
    product: Option<Product>,
    /// The factor of each output of a DoRA.
    scales: OnceCell<Arc<[f32]>>,
}

impl fmt::Debug for Adapted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changed = self.changed.len();
        f.debug_struct("Adapted").field("base", &self.base).field("changed", &changed).finish()
    }
}

impl Adapted {
    /// Merges `adapter`, with its configuration, into `base` for a job. `stated_tie` is `tie_word_embeddings` in the
    /// configuration of the base; `None` where it is not set.
    ///
    /// # Errors
    ///
    /// [`Unmapped`](dcp_jobs::ErrorKind::Unmapped) for tensors that the base does not have,
    /// [`Disagreement`](dcp_jobs::ErrorKind::Disagreement) for other shapes,
    /// [`Unsupported`](dcp_jobs::ErrorKind::Unsupported) for quantized weights and changes whose effect is not
    /// known, or that would untie a parameter whose other name the base lacks; and when a base or an index cannot be
    /// read.
    pub async fn apply(
        base: &Source,
        adapter: &Source,
        config: &AdapterConfig,
        stated_tie: Option<bool>,
        job: &JobOptions,
    ) -> Result<(Source, MergeSummary), Error> {
        let parts = [CheckedSource::new(base, job), CheckedSource::new(adapter, job)];
        let (base_metadata, adapter_metadata) =
            (parts[0].metadata().await?, parts[1].metadata().await?);
        let (base, adapter) = (Arc::clone(&parts[0].reader), Arc::clone(&parts[1].reader));
        let mut changes = changes(&base_metadata, &adapter_metadata, config)?;
        let of_base = Base::new(&base, &base_metadata, stated_tie);
        let notes = change_twins(&of_base, &mut changes).await?;
        let mut metadata = CheckpointMetadata::clone(&base_metadata);
        let mut changed = HashMap::new();
        for (position, change) in changes {
            let at =
                base_metadata.at(position).and_then(|(fqn, entry)| Some((fqn, entry.as_tensor()?)));
            let Some((fqn, tensor)) = at else { continue };
            let computed = computed(&mut metadata, tensor);
            metadata.insert(Arc::clone(fqn), Entry::Tensor(computed));
            let (reader, index, entry) = match change.replaced {
                Some(entry) => (&adapter, &adapter_metadata, entry),
                None => (&base, &base_metadata, position),
            };
            let stored = TensorReader::new(Arc::clone(reader), Arc::clone(index), entry)?;
            let one = Changed { stored, product: change.product, scales: OnceCell::new() };
            changed.insert(u32::try_from(position).unwrap_or(u32::MAX), one);
        }
        let summary = MergeSummary { changed: changed.len(), notes };
        let factors = FactorCache::new(adapter, adapter_metadata);
        let metadata = Arc::new(metadata);
        let view = Self { base, base_metadata, metadata, changed, factors };
        let view = Arc::new(view);
        let source = Source::derived(Arc::clone(&view) as _, &parts);
        // There are two parts.
        let source = source.unwrap_or_else(|| Source::new(Arc::clone(&parts[0].storage), view));
        Ok((source, summary))
    }

    /// Fills `view` with `region` of a changed tensor. Returns the bytes that were read.
    async fn fill(
        &self,
        entry: u32,
        changed: &Changed,
        region: &Region,
        view: &TensorView,
    ) -> Result<u64, CheckpointError> {
        let tensor = self.tensor(entry)?;
        let fqn = self.metadata.entry_name(entry as usize);
        let factors = match &changed.product {
            Some(product) => Some((product, self.factors.get(product).await?)),
            None => None,
        };
        let scales = match &factors {
            Some((product, factors)) if product.magnitudes.is_some() => {
                let scales = || self.scales(entry, changed, product, factors);
                changed.scales.get_or_try_init(scales).await?.as_ref()
            }
            _ => &[],
        };
        let mut read = 0;
        for block in blocks(region, SEGMENT)? {
            let mut numbers = self.numbers(tensor.dtype, changed, &block, &mut read).await?;
            if let Some((product, factors)) = &factors {
                product.add_to(&mut numbers, &block, factors, tensor.dtype)?;
                product.scale(&mut numbers, &block, scales);
            }
            let elements = elements_of(&fqn, tensor.dtype, &numbers)?;
            let inner = block.relative_to(region.offsets()).ok_or_else(|| no_entry(entry))?;
            let failed = |source| CheckpointError::Memory { fqn: fqn.to_string(), source };
            view.narrow(&inner)?.fill_from(&elements).map_err(failed)?;
        }
        Ok(read)
    }

    /// The elements of `block` before the product is added: those of the base, in its dtype.
    async fn numbers(
        &self,
        dtype: DType,
        changed: &Changed,
        block: &Region,
        read: &mut u64,
    ) -> Result<Vec<f32>, CheckpointError> {
        let (fqn, stored) = (changed.stored.fqn(), changed.stored.tensor()?.dtype);
        let bytes = changed.stored.read(std::slice::from_ref(block)).await?;
        *read += bytes.len() as u64;
        let numbers = floats_of(fqn, stored, &bytes)?;
        // What the adapter has is loaded into a parameter of the base.
        if stored == dtype { Ok(numbers) } else { rounded(fqn, dtype, &numbers) }
    }

    /// The factor of each output of a DoRA: its magnitude, divided by the length of its weights.
    async fn scales(
        &self,
        entry: u32,
        changed: &Changed,
        product: &Product,
        factors: &Factors,
    ) -> Result<Arc<[f32]>, CheckpointError> {
        let tensor = self.tensor(entry)?;
        let bad = |error| PlanError::from(error).with_fqn(&**changed.stored.fqn());
        let whole = Region::full(tensor.shape.clone()).map_err(bad)?;
        let inputs = usize::try_from(product.inputs).unwrap_or(usize::MAX);
        let mut lengths = Lengths::new(factors.magnitudes.len(), inputs);
        let mut read = 0;
        for block in blocks(&whole, SEGMENT)? {
            let mut numbers = self.numbers(tensor.dtype, changed, &block, &mut read).await?;
            product.add_to(&mut numbers, &block, factors, tensor.dtype)?;
            product.for_each(&mut numbers, &block, |output, input, number| {
                lengths.add(output, input, *number);
            });
        }
        let lengths = lengths.finish();
        Ok(factors.magnitudes.iter().zip(lengths).map(|(to, length)| to / length).collect())
    }

    fn tensor(&self, entry: u32) -> Result<&TensorEntry, CheckpointError> {
        let found = self.metadata.at(entry as usize).and_then(|(_, entry)| entry.as_tensor());
        found.ok_or_else(|| no_entry(entry))
    }
}

impl Product {
    /// Adds the product to the elements of `block`.
    fn add_to(
        &self,
        numbers: &mut [f32],
        block: &Region,
        factors: &Factors,
        dtype: DType,
    ) -> Result<(), CheckpointError> {
        let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let ([row, column], [_, width]) = (block.offsets().as_ref(), block.sizes().as_ref()) else {
            return Ok(());
        };
        let (row, column, width, rank) = (size(*row), size(*column), size(*width), size(self.rank));
        let columns = factors.right.len().checked_div(rank).unwrap_or(0);
        // The columns of the block alone, so that rows of the product are contiguous.
        let right: Vec<f32> = match column == 0 && width == columns {
            true => Vec::new(),
            false => {
                let rows = factors.right.chunks_exact(columns.max(1));
                rows.flat_map(|row| row.get(column..column + width).unwrap_or(&[]))
                    .copied()
                    .collect()
            }
        };
        let right = if right.is_empty() { &factors.right } else { &right };
        let left = factors.left.get(row * rank..).unwrap_or(&[]);
        let (steps, mut deltas) = (Steps::of(self.inputs), vec![0.0_f32; width]);
        for (numbers, left) in numbers.chunks_exact_mut(width.max(1)).zip(left.chunks_exact(rank)) {
            steps.row(left, right, &mut deltas);
            deltas.iter_mut().for_each(|delta| *delta *= self.scaling);
            if self.is_rounded_alone {
                deltas = rounded("a product", dtype, &deltas)?;
            }
            numbers.iter_mut().zip(&deltas).for_each(|(number, delta)| *number += delta);
        }
        Ok(())
    }

    /// Calls `with` for each element of `block`, with the output and the input that it is the weight of.
    fn for_each(
        &self,
        numbers: &mut [f32],
        block: &Region,
        mut with: impl FnMut(usize, usize, &mut f32),
    ) {
        let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let ([row, column], [_, width]) = (block.offsets().as_ref(), block.sizes().as_ref()) else {
            return;
        };
        let rows = numbers.chunks_exact_mut(size(*width).max(1));
        for (row, numbers) in (size(*row)..).zip(rows) {
            for (column, number) in (size(*column)..).zip(numbers) {
                match self.is_input_first {
                    true => with(column, row, number),
                    false => with(row, column, number),
                }
            }
        }
    }

    /// Scales each output by its factor; no scales leave the block as it is.
    fn scale(&self, numbers: &mut [f32], block: &Region, scales: &[f32]) {
        if !scales.is_empty() {
            self.for_each(numbers, block, |output, _, number| {
                *number *= scales.get(output).copied().unwrap_or(1.0);
            });
        }
    }
}

/// The changed tensor. Its chunks keep their placements under an encoding that only this view reads, so that
/// tied tensors are found to be equal.
fn computed(metadata: &mut CheckpointMetadata, tensor: &TensorEntry) -> TensorEntry {
    let mut computed = tensor.clone();
    computed.chunks.map_placements(|placement| {
        let encoding = Encoding::new(Layout::Computed).with_transforms(["adapted".into()]);
        let encoding = metadata.intern_encoding(&encoding)?;
        Some(Placement { encoding, ..placement? })
    });
    computed
}

fn no_entry(entry: u32) -> CheckpointError {
    PlanError::no_entry(entry.into(), None).into()
}

#[async_trait]
impl StorageReader for Adapted {
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
            match (&item.kind, self.changed.get(&item.entry)) {
                (ReadKind::Tensor { region, .. }, Some(changed)) => {
                    report += self.read_changed(item, region, changed, &*sink).await?;
                }
                _ => unchanged.items.push(item.clone()),
            }
        }
        if !unchanged.items.is_empty() {
            report += self.base.read(&self.base_metadata, &unchanged, sink).await?;
        }
        Ok(report)
    }
}

impl Adapted {
    async fn read_changed(
        &self,
        item: &ReadItem,
        region: &Region,
        changed: &Changed,
        sink: &dyn DataSink,
    ) -> Result<ReadReport, CheckpointError> {
        let view = sink.destination(item)?;
        let read = self.fill(item.entry, changed, region, &view).await?;
        sink.commit(item)?;
        Ok(ReadReport::new(view.byte_len(), read))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Segments of any size, in their order, are the whole.
        #[test]
        fn a_product_is_the_same_in_segments(
            (rows, columns, rank) in (1_u64..20, 1_u64..40, 1_u64..5),
            most in 1_u64..200,
            is_input_first in any::<bool>(),
        ) {
            let number = |at: u64| (at * 37 % 101) as f32 / 7.0 - 5.0;
            let factors = Factors {
                left: (0..rows * rank).map(number).collect(),
                right: (0..rank * columns).map(number).collect(),
                magnitudes: Vec::new(),
            };
            let inputs = if is_input_first { rows } else { columns };
            let (a, b, magnitudes, scaling) = (0, 1, None, 0.3);
            let product = Product {
                a, b, magnitudes, rank, inputs, scaling, is_input_first, is_rounded_alone: false,
            };
            let add = |block: &Region| {
                let mut numbers = vec![1.0; usize::try_from(block.volume()).unwrap()];
                product.add_to(&mut numbers, block, &factors, DType::Float32).unwrap();
                numbers
            };
            let region = Region::full([rows, columns]).unwrap();
            let whole = add(&region);
            let mut seen = vec![false; whole.len()];
            for block in blocks(&region, most).unwrap() {
                prop_assert!(block.volume() <= most);
                let numbers = add(&block);
                let (from, sizes) = (block.offsets(), block.sizes());
                for (at, number) in (0_u64..).zip(numbers) {
                    let (row, column) = (from[0] + at / sizes[1], from[1] + at % sizes[1]);
                    let position = usize::try_from(row * columns + column).unwrap();
                    prop_assert_eq!(number.to_bits(), whole[position].to_bits());
                    prop_assert!(!std::mem::replace(&mut seen[position], true));
                }
            }
            prop_assert!(seen.iter().all(|seen| *seen));
        }
    }
}
