//! Builds a report from a summary: totals over everything, and lists up to the limits.

use std::collections::{BTreeMap, HashMap};

use crate::inspect::{KeySummary, Summary, TensorSummary};

use super::kind::{layer, part, rank};
use super::{
    Chunks, DtypeShare, FileShare, KeyReport, LayerShare, Part, PartShare, RankShare, Report,
    ReportLimits, Stack, Totals, Truncation,
};

/// The maximum number of axes of a listed tensor; PyTorch allows 64.
const AXES: usize = 64;
/// Bytes of a long number in JSON.
const NUMBER_LEN: usize = 21;
/// The maximum number of layer lists, and of layers in one.
const STACKS: usize = 8;
const LAYERS: usize = 4096;

/// Layers by number, by the name of their list.
type Layers = BTreeMap<String, BTreeMap<u64, LayerShare>>;

pub(super) fn build(name: &str, summary: &Summary, limits: &ReportLimits) -> Report {
    let Sums { totals, dtypes, parts, layers, mut files } = Sums::of(summary);
    let mut dtypes: Vec<_> = dtypes.into_values().collect();
    dtypes.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    let stacks = stacks(layers, limits);
    let ranks = ranks(&files);
    let mut cut = Truncation::default();
    let keys = keys(summary, limits, &mut cut);
    let file_imbalance = imbalance(files.iter().filter_map(|file| file.bytes));
    let rank_imbalance = imbalance(ranks.iter().map(|rank| rank.bytes));
    for file in &mut files {
        file.name = shortened(&file.name, limits.name_len);
    }
    let fitting = fitting(files.iter().map(|file| json_len(&file.name)), limits.files, limits);
    cut.files = (files.len() - fitting) as u64;
    files.truncate(fitting);
    Report {
        name: shortened(name, limits.name_len),
        format: summary.format.clone(),
        provenance: Vec::new(),
        totals,
        dtypes,
        parts: parts.into_values().collect(),
        stacks,
        files,
        ranks,
        file_imbalance,
        rank_imbalance,
        non_finite: None,
        keys,
        cut,
    }
}

/// Totals over all keys and files.
#[derive(Default)]
struct Sums {
    totals: Totals,
    dtypes: BTreeMap<&'static str, DtypeShare>,
    parts: BTreeMap<Part, PartShare>,
    layers: Layers,
    /// The files, in the order of the summary.
    files: Vec<FileShare>,
}

impl Sums {
    fn of(summary: &Summary) -> Self {
        let files = summary.files.iter().map(|(name, bytes)| FileShare {
            name: name.clone(),
            bytes: *bytes,
            rank: rank(name),
            chunks: 0,
        });
        let mut sums = Self { files: files.collect(), ..Self::default() };
        for (fqn, key) in &summary.keys {
            match key {
                KeySummary::Tensor(tensor) => sums.add(fqn, tensor, summary),
                KeySummary::Object { .. } => sums.totals.objects += 1,
            }
        }
        let Self { totals, parts, files, .. } = &mut sums;
        totals.parameters = parts.get(&Part::Model).map_or(0, |model| model.elements);
        totals.files = files.len() as u64;
        totals.missing_files = files.iter().filter(|file| file.bytes.is_none()).count() as u64;
        let present = files.iter().filter_map(|file| file.bytes);
        totals.file_bytes = present.fold(0, u64::saturating_add);
        sums
    }

    fn add(&mut self, fqn: &str, tensor: &TensorSummary, summary: &Summary) {
        let (elements, part) = (elements(tensor), part(fqn));
        let totals = &mut self.totals;
        totals.tensors += 1;
        totals.chunks += tensor.chunks.len() as u64;
        totals.elements = totals.elements.saturating_add(elements);
        totals.tensor_bytes = totals.tensor_bytes.saturating_add(tensor.bytes);
        let dtype = self.dtypes.entry(tensor.dtype).or_insert_with(|| DtypeShare {
            dtype: tensor.dtype,
            tensors: 0,
            elements: 0,
            bytes: 0,
        });
        dtype.tensors += 1;
        dtype.elements = dtype.elements.saturating_add(elements);
        dtype.bytes = dtype.bytes.saturating_add(tensor.bytes);
        let share = self.parts.entry(part).or_insert_with(|| PartShare {
            part,
            tensors: 0,
            elements: 0,
            bytes: 0,
        });
        share.tensors += 1;
        share.elements = share.elements.saturating_add(elements);
        share.bytes = share.bytes.saturating_add(tensor.bytes);
        if let Some((stack, number)) = layer(fqn) {
            let layer = self.layers.entry(stack).or_default().entry(number).or_default();
            layer.layer = number;
            layer.tensors += 1;
            let bytes = match part {
                Part::Model => &mut layer.model_bytes,
                Part::Optimizer => &mut layer.optimizer_bytes,
            };
            *bytes = bytes.saturating_add(tensor.bytes);
        }
        for chunk in &tensor.chunks {
            let place = chunk.file.as_ref().and_then(|file| summary.files.get_index_of(file));
            if let Some(file) = place.and_then(|place| self.files.get_mut(place)) {
                file.chunks += 1;
            }
        }
    }
}

/// Orders lists of layers by length, longest first, and lists of one length by name.
fn stacks(layers: Layers, limits: &ReportLimits) -> Vec<Stack> {
    let lists = beside_the_model(layers).into_iter().filter(|(_, layers)| layers.len() > 1);
    let mut stacks: Vec<Stack> = lists
        .map(|(name, layers)| Stack {
            name: shortened(&name, limits.name_len),
            layers: layers.into_values().take(LAYERS).collect(),
        })
        .collect();
    stacks.sort_by_key(|stack| std::cmp::Reverse(stack.layers.len()));
    stacks.truncate(STACKS);
    stacks
}

/// Optimizers prefix the names of the model's layers. If exactly one list of the model matches an
/// optimizer's list, the two are merged.
fn beside_the_model(mut layers: Layers) -> Layers {
    let in_model = |layers: &BTreeMap<u64, LayerShare>| layers.values().any(|l| l.model_bytes > 0);
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let (of_model, others): (Vec<_>, Vec<_>) = layers
        .iter()
        .map(|(name, layers)| (name.clone(), in_model(layers)))
        .partition(|(_, is)| *is);
    for (other, _) in others {
        let mut meant = of_model.iter().filter(|(name, _)| last(name) == last(&other));
        let (Some((one, _)), None) = (meant.next(), meant.next()) else { continue };
        let Some(moved) = layers.remove(&other) else { continue };
        let Some(stack) = layers.get_mut(one) else { continue };
        for (number, share) in moved {
            let layer = stack.entry(number).or_default();
            layer.layer = number;
            layer.tensors += share.tensors;
            layer.optimizer_bytes = layer.optimizer_bytes.saturating_add(share.optimizer_bytes);
        }
    }
    layers
}

fn elements(tensor: &TensorSummary) -> u64 {
    tensor.shape.iter().fold(1, |product: u64, len| product.saturating_mul(*len))
}

fn ranks(files: &[FileShare]) -> Vec<RankShare> {
    let mut ranks: BTreeMap<u64, RankShare> = BTreeMap::new();
    for file in files {
        let Some(rank) = file.rank else { continue };
        let share = ranks.entry(rank).or_insert_with(|| RankShare { rank, ..Default::default() });
        share.files += 1;
        share.bytes = share.bytes.saturating_add(file.bytes.unwrap_or(0));
        share.chunks += file.chunks;
    }
    ranks.into_values().collect()
}

/// The ratio of the largest value to the mean.
fn imbalance(all: impl Iterator<Item = u64>) -> Option<f64> {
    let (mut count, mut sum, mut largest) = (0_u32, 0.0, 0_u64);
    for bytes in all {
        count = count.saturating_add(1);
        sum += bytes as f64;
        largest = largest.max(bytes);
    }
    (count > 1 && sum > 0.0).then(|| largest as f64 * f64::from(count) / sum)
}

fn keys(summary: &Summary, limits: &ReportLimits, cut: &mut Truncation) -> Vec<KeyReport> {
    let lens = summary.keys.iter().map(|(fqn, key)| {
        let axes = key.as_tensor().map_or(0, |tensor| tensor.shape.len().min(AXES));
        json_len(&shortened(fqn, limits.name_len)) + axes * NUMBER_LEN
    });
    let fitting = fitting(lens, limits.keys, limits);
    let listed = || summary.keys.iter().take(fitting);
    cut.keys = (summary.keys.len() - fitting) as u64;
    let most = chunks_of_each(listed().filter_map(|(_, key)| key.as_tensor()), limits);
    let files: HashMap<&str, u32> = summary.files.keys().map(String::as_str).zip(0..).collect();
    let mut values_len = 0;
    let mut keys = Vec::with_capacity(listed().len());
    for (fqn, key) in listed() {
        let name = shortened(fqn, limits.name_len);
        keys.push(match key {
            KeySummary::Tensor(tensor) => {
                let chunks = chunks(tensor, most, &files);
                cut.chunks += (tensor.chunks.len() - chunks.files.len()) as u64;
                KeyReport::Tensor {
                    name,
                    dtype: tensor.dtype,
                    shape: tensor.shape.iter().take(AXES).copied().collect(),
                    bytes: tensor.bytes,
                    part: part(fqn),
                    chunk_count: tensor.chunks.len() as u64,
                    chunks,
                    numbers: None,
                }
            }
            KeySummary::Object { value } => {
                let len = value.to_string().len();
                let fits = len <= limits.value_len && values_len + len <= limits.values_len;
                if fits {
                    values_len += len;
                } else {
                    cut.values += 1;
                }
                let value = fits.then(|| value.clone());
                KeyReport::Object { name, value, value_len: len as u64 }
            }
        });
    }
    keys
}

/// The number of items, at most `count`, whose names of these lengths fit the limits.
fn fitting(lens: impl Iterator<Item = usize>, count: usize, limits: &ReportLimits) -> usize {
    let mut left = limits.names_len;
    let fits = |len: &usize| {
        let after = left.checked_sub(*len);
        left = after.unwrap_or(left);
        after.is_some()
    };
    lens.take(count).take_while(fits).count()
}

/// The length of a text as JSON in a page, where `<` is escaped.
fn json_len(text: &str) -> usize {
    let escaped = |c: char| c == '<' || c.is_ascii_control();
    text.chars().map(|c| if escaped(c) { 6 } else { 1 + c.len_utf8() }).sum()
}

/// The number of numbers that describe one chunk of the tensor.
fn numbers(tensor: &TensorSummary) -> usize {
    2 * tensor.shape.len().min(AXES) + 3
}

/// The number of chunks to list per tensor, so that small tensors are complete.
fn chunks_of_each<'a>(
    tensors: impl Iterator<Item = &'a TensorSummary>,
    limits: &ReportLimits,
) -> usize {
    let mut all: Vec<(usize, usize)> =
        tensors.map(|tensor| (tensor.chunks.len(), numbers(tensor))).collect();
    all.sort_unstable();
    let mut left = limits.chunk_numbers;
    // The numbers that one more chunk of every remaining tensor takes.
    let mut step: usize = all.iter().map(|(_, numbers)| *numbers).sum();
    let mut most = 0;
    for (chunks, numbers) in all {
        let more = chunks - most;
        match more.checked_mul(step).filter(|needed| *needed <= left) {
            Some(needed) => {
                left -= needed;
                most = chunks;
                step -= numbers;
            }
            None => return most + left / step.max(1),
        }
    }
    usize::MAX
}

fn chunks(tensor: &TensorSummary, most: usize, files: &HashMap<&str, u32>) -> Chunks {
    let mut columns = Chunks::default();
    let axes = tensor.shape.len().min(AXES);
    for chunk in tensor.chunks.iter().take(most) {
        let fill = |all: &[u64]| {
            let numbers = all.iter().copied().chain(std::iter::repeat(0)).take(axes);
            numbers.collect::<Vec<_>>()
        };
        columns.offsets.extend(fill(&chunk.offsets));
        columns.sizes.extend(fill(&chunk.sizes));
        let file = chunk.file.as_ref().and_then(|file| files.get(file.as_str()));
        columns.files.push(file.copied());
        columns.byte_offsets.push(chunk.byte_offset);
        columns.byte_lens.push(chunk.byte_len);
    }
    columns
}

/// Shortens a text to `len` characters by replacing its middle with `…`.
pub(super) fn shortened(text: &str, len: usize) -> String {
    // A character is at least one byte, so most texts need no count.
    if text.len() <= len || text.chars().count() <= len {
        return text.to_owned();
    }
    let kept = len.saturating_sub(1);
    let start: String = text.chars().take(kept - kept / 2).collect();
    let mut end: Vec<char> = text.chars().rev().take(kept / 2).collect();
    end.reverse();
    format!("{start}…{}", end.into_iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;
    use serde_json::json;

    use super::*;
    use crate::inspect::ChunkSummary;

    fn tensor(rows: u64, chunks: u64, file: impl Fn(u64) -> String) -> KeySummary {
        let each = rows / chunks;
        KeySummary::Tensor(TensorSummary {
            dtype: "float32",
            shape: vec![rows, 2],
            bytes: rows * 8,
            chunks: (0..chunks)
                .map(|n| ChunkSummary {
                    offsets: vec![n * each, 0],
                    sizes: vec![each, 2],
                    file: Some(file(n)),
                    byte_offset: Some(64),
                    byte_len: Some(each * 8),
                })
                .collect(),
            device: None,
        })
    }

    fn summary(keys: Vec<(&str, KeySummary)>, files: &[(&str, Option<u64>)]) -> Summary {
        Summary {
            unfinished: Vec::new(),
            callables: Vec::new(),
            sidecar: None,
            format: "torch_dcp".to_owned(),
            keys: keys.into_iter().map(|(name, key)| (name.into(), key)).collect(),
            files: files.iter().map(|(name, len)| ((*name).to_owned(), *len)).collect(),
            version: None,
            paths: IndexMap::new(),
        }
    }

    fn of_rank(n: u64) -> String {
        format!("__{n}_0.distcp")
    }

    #[test]
    fn sums_are_of_everything() {
        let keys = vec![
            ("model.layers.0.w", tensor(8, 2, of_rank)),
            ("model.layers.1.w", tensor(16, 2, of_rank)),
            ("optim.state.model.layers.1.w.exp_avg", tensor(16, 1, of_rank)),
            ("optim.state.layers.0.w.exp_avg", tensor(4, 1, of_rank)),
            ("optim.lr", KeySummary::Object { value: json!(0.1) }),
        ];
        let files = [("__0_0.distcp", Some(300)), ("__1_0.distcp", Some(100)), ("gone", None)];
        let found = Report::of("run", &summary(keys, &files), &ReportLimits::default());
        assert_eq!((found.totals.tensors, found.totals.objects, found.totals.chunks), (4, 1, 6));
        assert_eq!((found.totals.parameters, found.totals.elements), (48, 88));
        assert_eq!((found.totals.file_bytes, found.totals.missing_files), (400, 1));
        assert_eq!(found.rank_imbalance, Some(1.5));
        assert_eq!(found.ranks[0].chunks, 4);
        let [stack] = &found.stacks[..] else { panic!("{:?}", found.stacks) };
        assert_eq!(stack.name, "model.layers");
        assert_eq!((stack.layers[0].model_bytes, stack.layers[0].optimizer_bytes), (64, 32));
        assert_eq!((stack.layers[1].model_bytes, stack.layers[1].optimizer_bytes), (128, 128));
        assert_eq!(found.cut, Truncation::default());
        let KeyReport::Tensor { chunks, .. } = &found.keys[1] else { panic!() };
        assert_eq!(chunks.offsets, [0, 0, 8, 0]);
        assert_eq!(chunks.files, [Some(0), Some(1)]);
    }

    #[test]
    fn names_take_no_more_than_their_share() {
        let limits = ReportLimits { names_len: 30, ..ReportLimits::default() };
        let object = || KeySummary::Object { value: json!(null) };
        // Each takes more in JSON than it has characters.
        let keys = vec![("<<<", object()), ("ab", object()), ("a", object()), ("\0\0", object())];
        let files = [("12345678901234", None), ("2", Some(1)), ("3", None)];
        let found = Report::of("run", &summary(keys, &files), &limits);
        assert_eq!((found.keys.len(), found.cut.keys), (3, 1));
        assert_eq!((found.files.len(), found.cut.files), (2, 1));
        assert_eq!(found.totals.missing_files, 2);
    }

    #[test]
    fn long_lists_are_cut_and_small_tensors_keep_all_chunks() {
        let keys = vec![
            ("a", tensor(100, 100, of_rank)),
            ("b", tensor(2, 2, of_rank)),
            ("c", tensor(50, 50, of_rank)),
            ("d", KeySummary::Object { value: json!("x".repeat(100)) }),
            ("e", KeySummary::Object { value: json!(1) }),
        ];
        let limits = ReportLimits {
            keys: 4,
            files: 1,
            chunk_numbers: 42 * 7,
            value_len: 50,
            values_len: 60,
            name_len: 5,
            names_len: 1000,
            histogram_bins: 0,
        };
        let files = [("__0_0.distcp", Some(1)), ("__1_0.distcp", None)];
        let found = Report::of("checkpoint", &summary(keys, &files), &limits);
        let listed: Vec<usize> = found
            .keys
            .iter()
            .filter_map(|key| match key {
                KeyReport::Tensor { chunks, .. } => Some(chunks.files.len()),
                KeyReport::Object { value, value_len, .. } => {
                    assert_eq!((value, *value_len), (&None, 102));
                    None
                }
            })
            .collect();
        assert_eq!(listed, [20, 2, 20]);
        assert_eq!(
            found.cut,
            Truncation { keys: 1, chunks: 110, values: 1, files: 1, histograms: 0 }
        );
        assert_eq!(found.totals.chunks, 152);
        assert_eq!((found.name.as_str(), found.files[0].name.as_str()), ("ch…nt", "__…cp"));
    }
}
