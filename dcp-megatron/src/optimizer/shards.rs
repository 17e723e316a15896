//! The parameters of model-parallel ranks, from the chunks of the model.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::digest::Sha256;
use dcp_core::metadata::TensorEntry;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Dims, Region};
use dcp_jobs::Source;
use dcp_jobs::read::TensorReader;
use futures_util::{StreamExt, TryStreamExt, stream};

use super::keys::model_tensors;
use super::registration::{ParamPlace, layer_in_name};

/// Elements at the beginning of a parameter that are kept, to find it by.
pub(super) const HEAD: u64 = 64;
/// Elements to read at once.
const SEGMENT: u64 = 1 << 20;
/// The most parameters of all ranks together: far more than the largest models have.
const PARAMS_MAX: usize = 1 << 20;

/// The first elements of a shard, and a hash of all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fingerprint {
    pub(super) elements: u64,
    pub(super) digest: [u8; 32],
}

/// A parameter as one model-parallel rank has it.
#[derive(Clone, Debug)]
pub(super) struct LocalParam {
    /// The model's tensor.
    pub(super) key: Arc<str>,
    /// Its position in the index.
    pub(super) entry: usize,
    /// The boxes of it that the rank has, one after the other.
    pub(super) boxes: Vec<Region>,
    pub(super) elements: u64,
    pub(super) layer: Option<u64>,
    pub(super) expert: Option<u64>,
    /// The number of the tensor-parallel part, and the number of parts.
    pub(super) part: (u64, u64),
}

impl LocalParam {
    pub(super) fn place(&self) -> ParamPlace<'_> {
        let (layer, expert, part) = (self.layer, self.expert, self.part.0);
        ParamPlace { name: &self.key, layer, expert, part }
    }
}

/// Parameters with their elements.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) params: Vec<LocalParam>,
    /// For each, the class of those with the same elements.
    pub(super) class_of: Vec<usize>,
    /// The parameters of each class.
    pub(super) classes: Vec<Vec<usize>>,
    pub(super) prints: Vec<Fingerprint>,
    /// Classes by their first elements, of each length that there is.
    pub(super) heads: HashMap<Bytes, Vec<usize>>,
    /// The lengths of the keys of `heads` in elements, longest first.
    pub(super) head_lengths: Vec<u64>,
}

/// All parameters of `dtype` that ranks have. `gated` says whether the first matrix of an MLP is
/// two, of which a rank has a part each: where it is not known, both are considered.
pub(super) fn local_params(
    metadata: &CheckpointMetadata,
    dtype: DType,
    gated: Option<bool>,
) -> Option<Vec<LocalParam>> {
    let mut params = Vec::new();
    for (entry, fqn, tensor) in model_tensors(metadata) {
        if tensor.dtype != dtype {
            continue;
        }
        for cell in cells(fqn, tensor, PARAMS_MAX.saturating_sub(params.len()))? {
            cell.params(fqn, entry, gated, &mut params);
        }
    }
    (params.len() <= PARAMS_MAX).then_some(params)
}

/// The boxes of one layer and expert of a tensor.
struct Cell {
    layer: Option<u64>,
    expert: Option<u64>,
    /// Axes of layers and experts, which come first.
    prepended: usize,
    boxes: Vec<Region>,
}

/// The boxes of a tensor's chunks, those of one layer and expert together; `None` when there are
/// more than `most`.
fn cells(fqn: &str, tensor: &TensorEntry, most: usize) -> Option<Vec<Cell>> {
    let (named_layer, stacked) = layers_of(fqn);
    let experts = fqn.contains(".experts.experts.");
    let prepended = usize::from(stacked) + usize::from(experts);
    if prepended > tensor.shape.ndim() {
        return Some(Vec::new());
    }
    let mut by_index: BTreeMap<Vec<u64>, Vec<Region>> = BTreeMap::new();
    let mut count = 0_usize;
    for chunk in tensor.chunks.iter() {
        let Ok(region) = chunk.region() else { continue };
        if region.is_empty() {
            continue;
        }
        let (outer, inner) = region.sizes().split_at_checked(prepended)?;
        let indices = dcp_core::dims::checked_volume(outer)?;
        count = count.checked_add(usize::try_from(indices).ok()?)?;
        if count > most {
            return None;
        }
        for at in 0..indices {
            let mut rest = at;
            let mut index = vec![0; prepended];
            for axis in (0..prepended).rev() {
                let len = *outer.get(axis)?;
                *index.get_mut(axis)? = region.offsets().get(axis)? + rest % len;
                rest /= len;
            }
            let tail = region.offsets().iter().skip(prepended);
            let offsets: Dims = index.iter().chain(tail).copied().collect();
            let sizes: Dims = std::iter::repeat_n(&1, prepended).chain(inner).copied().collect();
            by_index.entry(index).or_default().push(Region::new(offsets, sizes).ok()?);
        }
    }
    let cells = by_index.into_iter().map(|(index, mut boxes)| {
        boxes.sort();
        let mut index = index.into_iter();
        let layer = if stacked { index.next() } else { named_layer };
        Cell { layer, expert: index.next(), prepended, boxes }
    });
    Some(cells.collect())
}

/// The layer in a name such as `decoder.layers.3.mlp…`, and whether there is an axis of layers
/// instead.
fn layers_of(fqn: &str) -> (Option<u64>, bool) {
    let Some((_, rest)) = fqn.split_once("layers.") else { return (None, false) };
    match layer_in_name(rest) {
        Some((layer, _)) => (Some(layer), false),
        None => (None, true),
    }
}

impl Cell {
    /// Adds what ranks have of it.
    fn params(self, fqn: &Arc<str>, entry: usize, gated: Option<bool>, to: &mut Vec<LocalParam>) {
        let parts = self.boxes.len() as u64;
        let param = |boxes: Vec<Region>, part: (u64, u64)| LocalParam {
            key: Arc::clone(fqn),
            entry,
            elements: boxes.iter().fold(0, |sum, one| sum.saturating_add(one.volume())),
            boxes,
            layer: self.layer,
            expert: self.expert,
            part,
        };
        let first_matrix = fqn.ends_with("linear_fc1.weight") || fqn.ends_with("linear_fc1.bias");
        let pairs = first_matrix && parts.is_multiple_of(2) && self.is_cut_along_first_axis();
        if pairs && gated != Some(false) {
            let half = parts / 2;
            let (gate, up) = self.boxes.split_at(self.boxes.len() / 2);
            for (at, (gate, up)) in (0..).zip(gate.iter().zip(up)) {
                to.push(param(vec![gate.clone(), up.clone()], (at, half)));
            }
            if gated.is_some() {
                return;
            }
        }
        for (at, one) in (0..).zip(&self.boxes) {
            to.push(param(vec![one.clone()], (at, parts)));
        }
    }

    /// Whether all boxes are as large and differ only along the axis behind layers and experts.
    fn is_cut_along_first_axis(&self) -> bool {
        let axis = self.prepended;
        let Some(first) = self.boxes.first() else { return false };
        axis < first.ndim()
            && self.boxes.iter().all(|one| {
                let others = (0..first.ndim()).filter(|at| *at != axis);
                let same = |at: usize| one.offsets()[at] == first.offsets()[at];
                one.sizes() == first.sizes() && others.into_iter().all(same)
            })
    }
}

/// Reads all of `params`, a bounded part at a time, and groups them by their elements.
pub(super) async fn know(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    params: Vec<LocalParam>,
    parallelism: usize,
) -> Result<Known, CheckpointError> {
    let mut readers: HashMap<usize, TensorReader> = HashMap::new();
    for param in &params {
        if let Entry::Vacant(slot) = readers.entry(param.entry) {
            let reader = Arc::clone(&source.reader);
            slot.insert(TensorReader::new(reader, Arc::clone(metadata), param.entry)?);
        }
    }
    let readers = &readers;
    let prints = params.iter().map(|param| async move {
        let mut hash = Sha256::new();
        let mut head = Vec::new();
        let reader = readers.get(&param.entry);
        for (region, reader) in param.boxes.iter().zip(std::iter::repeat(reader)) {
            let Some(reader) = reader else { continue };
            let size = reader.tensor()?.dtype.size();
            let wanted = usize::try_from(HEAD).unwrap_or(0) * size;
            let (total, mut at) = (region.volume(), 0);
            while at < total {
                let end = total.min(at + SEGMENT);
                let part = reader.read_range(region, at..end).await?;
                hash.update(&part);
                let missing = wanted.saturating_sub(head.len()).min(part.len());
                head.extend_from_slice(part.get(..missing).unwrap_or_default());
                at = end;
            }
        }
        let (elements, digest) = (param.elements, hash.finish());
        Ok::<_, CheckpointError>((Bytes::from(head), Fingerprint { elements, digest }))
    });
    // A stream over the closure itself would not be `Send`.
    let prints: Vec<_> = prints.collect();
    let prints: Vec<(Bytes, Fingerprint)> =
        stream::iter(prints).buffered(parallelism.max(1)).try_collect().await?;
    Ok(Known::new(params, prints))
}

impl Known {
    pub(super) fn new(params: Vec<LocalParam>, found: Vec<(Bytes, Fingerprint)>) -> Self {
        let mut known = Self { params, ..Self::default() };
        let mut by_print: HashMap<Fingerprint, usize> = HashMap::new();
        for (at, (head, print)) in found.into_iter().enumerate() {
            let elements = print.elements;
            let next = known.classes.len();
            let class = *by_print.entry(print.clone()).or_insert(next);
            if class == next {
                known.classes.push(Vec::new());
                known.prints.push(print);
                known.heads.entry(head).or_default().push(class);
                let length = elements.min(HEAD);
                if !known.head_lengths.contains(&length) {
                    known.head_lengths.push(length);
                }
            }
            known.class_of.push(class);
            if let Some(members) = known.classes.get_mut(class) {
                members.push(at);
            }
        }
        known.head_lengths.sort_unstable_by(|a, b| b.cmp(a));
        known
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::metadata::Entry;

    use super::*;

    fn tensor(shape: &[u64], chunks: &[(&[u64], &[u64])]) -> TensorEntry {
        let mut tensor = TensorEntry::new(DType::BFloat16, shape);
        for (offsets, sizes) in chunks {
            tensor.chunks.push(offsets, sizes, None).unwrap();
        }
        tensor
    }

    #[test]
    fn gated_matrices_are_two_parts_of_a_rank() {
        let mut metadata = CheckpointMetadata::new();
        let key = "decoder.layers.mlp.linear_fc1.weight";
        let chunks: Vec<_> = [0, 6, 12, 18].map(|at| [0, at, 0]).to_vec();
        let chunks: Vec<(&[u64], &[u64])> =
            chunks.iter().map(|at| (&at[..], &[1, 6, 8][..])).collect();
        metadata.insert(key, Entry::Tensor(tensor(&[1, 24, 8], &chunks)));
        let of = |gated| local_params(&metadata, DType::BFloat16, gated).unwrap();
        let gated = of(Some(true));
        assert_eq!(gated.len(), 2);
        let rows: Vec<_> = gated[1].boxes.iter().map(|one| one.offsets()[1]).collect();
        assert_eq!((rows, gated[1].elements, gated[1].part), (vec![6, 18], 96, (1, 2)));
        assert_eq!(of(Some(false)).len(), 4);
        assert_eq!(of(None).len(), 6);
        assert_eq!(local_params(&metadata, DType::Float32, None).unwrap().len(), 0);
    }

    #[test]
    fn layers_and_experts_are_apart() {
        let mut metadata = CheckpointMetadata::new();
        let key = "decoder.layers.mlp.experts.experts.linear_fc2.weight";
        let chunks: [(&[u64], &[u64]); 1] = [(&[1, 0, 0, 0], &[2, 3, 4, 5])];
        metadata.insert(key, Entry::Tensor(tensor(&[3, 3, 4, 5], &chunks)));
        let params = local_params(&metadata, DType::BFloat16, None).unwrap();
        let found: Vec<_> = params.iter().map(|p| (p.layer, p.expert, p.elements)).collect();
        assert_eq!(found.len(), 6);
        assert_eq!((found[0], found[5]), ((Some(1), Some(0), 20), (Some(2), Some(2), 20)));
    }

    #[test]
    fn hostile_numbers_of_layers_are_refused() {
        let mut metadata = CheckpointMetadata::new();
        let chunks: [(&[u64], &[u64]); 1] = [(&[0, 0], &[1 << 40, 1])];
        metadata.insert("decoder.layers.a.weight", Entry::Tensor(tensor(&[1 << 40, 1], &chunks)));
        assert!(local_params(&metadata, DType::BFloat16, None).is_none());
    }
}
