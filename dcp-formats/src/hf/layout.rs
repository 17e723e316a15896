//! Divides tensors into files as Hugging Face's libraries and PyTorch do.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::{DType, Dims, FormatError, Key};
use indexmap::IndexMap;

use super::ENDING;
use super::index_file::IndexFile;

/// The name of a single-file model, which loaders prefer to an index.
pub const SINGLE_NAME: &str = "model.safetensors";

/// The default maximum of tensor bytes per file, as in huggingface_hub (5 GB).
pub const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// A tensor to write, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HfPart {
    /// The name of the tensor.
    pub fqn: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The shape of the part to write.
    pub shape: Dims,
    /// The part's offset in the tensor, and the rank that holds it; `None` for a whole tensor.
    pub part: Option<(Dims, u32)>,
}

impl HfPart {
    /// A whole tensor.
    #[must_use]
    pub fn whole(fqn: impl Into<Arc<str>>, dtype: DType, shape: impl Into<Dims>) -> Self {
        Self { fqn: fqn.into(), dtype, shape: shape.into(), part: None }
    }

    /// The part of `sizes` at `offsets`, as `rank` holds it.
    #[must_use]
    pub fn part_of(
        fqn: impl Into<Arc<str>>,
        dtype: DType,
        sizes: impl Into<Dims>,
        offsets: impl Into<Dims>,
        rank: u32,
    ) -> Self {
        let part = Some((offsets.into(), rank));
        Self { fqn: fqn.into(), dtype, shape: sizes.into(), part }
    }

    /// The size of the elements in bytes; `None` if it exceeds `u64`.
    #[must_use]
    pub fn byte_len(&self) -> Option<u64> {
        self.shape.checked_volume()?.checked_mul(self.dtype.size() as u64)
    }
}

/// The division of tensors into files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HfLayout {
    /// Files of at most this many bytes of tensors, filled in order as huggingface_hub does; a
    /// larger tensor gets its own file. A single file is `model.safetensors`, without an index.
    MaxFileBytes(u64),
    /// The file number of each tensor, from 1: PyTorch's `fqn_to_index_mapping`.
    Mapping(IndexMap<Arc<str>, u32>),
}

impl Default for HfLayout {
    /// [`MAX_FILE_BYTES`].
    fn default() -> Self {
        Self::MaxFileBytes(MAX_FILE_BYTES)
    }
}

/// A division of tensors into files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HfPlan {
    /// The tensors and parts to write.
    pub parts: Vec<HfPart>,
    /// The files, ordered by name.
    pub files: Vec<HfFile>,
    /// Bytes of all tensors.
    pub total_size: u64,
    /// Whether the plan contains parts of ranks, each rank's in its own files without an index.
    pub distributed: bool,
}

/// A file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HfFile {
    /// Its name.
    pub name: Key,
    /// Positions in [`HfPlan::parts`].
    pub parts: Vec<usize>,
    /// Bytes of its tensors.
    pub tensor_bytes: u64,
}

impl HfLayout {
    /// Divides `parts` into files `model-00001-of-0000N.safetensors`, or into one
    /// `model.safetensors` if [`MaxFileBytes`](Self::MaxFileBytes) yields one. Parts of ranks go to
    /// files of their rank, `shard-0000R-model-00001-of-0000N.safetensors`, as in PyTorch's
    /// `save_distributed`.
    ///
    /// All parts of a tensor get one number. Numbers without tensors get no file, as in PyTorch.
    ///
    /// # Errors
    ///
    /// When a tensor has no number or number 0, occurs twice, occurs both whole and in parts, or
    /// the total exceeds 2^64 bytes.
    pub fn plan(&self, parts: Vec<HfPart>) -> Result<HfPlan, FormatError> {
        let bad = |problem: String| FormatError::new("division into files", problem);
        let distributed = parts.first().is_some_and(|part| part.part.is_some());
        let mut sizes: IndexMap<Arc<str>, u64> = IndexMap::new();
        let mut total_size = 0_u64;
        for part in &parts {
            let fqn = &part.fqn;
            if part.part.is_some() != distributed {
                return Err(bad(format!("{fqn:?}: whole tensors and parts cannot be mixed")));
            }
            if let Some((offsets, _)) = &part.part
                && offsets.ndim() != part.shape.ndim()
            {
                let shape = &part.shape;
                return Err(bad(format!("{fqn:?} of shape {shape} cannot be at {offsets}")));
            }
            let known = sizes.get(fqn).copied();
            if known.is_some() && !distributed {
                return Err(bad(format!("{fqn:?} is there twice")));
            }
            let bytes = part.byte_len();
            let sum = bytes.and_then(|bytes| bytes.checked_add(known.unwrap_or(0)));
            let total = bytes.and_then(|bytes| bytes.checked_add(total_size));
            let (Some(sum), Some(total)) = (sum, total) else {
                return Err(bad(format!("with {fqn:?} there are more than 2^64 bytes")));
            };
            total_size = total;
            sizes.insert(Arc::clone(fqn), sum);
        }
        let numbers = self.numbers(&sizes)?;
        let count = numbers.values().copied().max().unwrap_or(0);
        let mut files: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        for (index, part) in parts.iter().enumerate() {
            let rank = part.part.as_ref().map_or(0, |(_, rank)| *rank);
            let number = numbers.get(&part.fqn).copied().unwrap_or(1);
            files.entry((rank, number)).or_default().push(index);
        }
        let files = files.into_iter().map(|((rank, number), held)| {
            let rank = distributed.then_some(rank);
            let bytes = held.iter().filter_map(|index| parts.get(*index)?.byte_len());
            let tensor_bytes = bytes.sum();
            Ok(HfFile { name: name(rank, number, count)?, parts: held, tensor_bytes })
        });
        let mut files = files.collect::<Result<Vec<_>, FormatError>>()?;
        if let (Self::MaxFileBytes(_), [one], false) = (self, &mut *files, distributed) {
            one.name = key(SINGLE_NAME)?;
        }
        Ok(HfPlan { parts, files, total_size, distributed })
    }

    /// The file number of each tensor.
    fn numbers(
        &self,
        sizes: &IndexMap<Arc<str>, u64>,
    ) -> Result<IndexMap<Arc<str>, u32>, FormatError> {
        let bad = |problem: String| FormatError::new("division into files", problem);
        let mut numbers = IndexMap::with_capacity(sizes.len());
        match self {
            Self::MaxFileBytes(max) => {
                let (mut number, mut filled) = (1_u32, 0_u64);
                let mut in_file = 0_usize;
                for (fqn, bytes) in sizes {
                    if in_file > 0 && filled.saturating_add(*bytes) > *max {
                        number = number.saturating_add(1);
                        (filled, in_file) = (0, 0);
                    }
                    numbers.insert(Arc::clone(fqn), number);
                    filled = filled.saturating_add(*bytes);
                    in_file += 1;
                }
            }
            Self::Mapping(mapping) => {
                for fqn in sizes.keys() {
                    let number = mapping.get(fqn).copied().filter(|number| *number > 0);
                    let number = number.ok_or_else(|| {
                        bad(format!("{fqn:?} has no file; files are counted from 1 on"))
                    })?;
                    numbers.insert(Arc::clone(fqn), number);
                }
            }
        }
        Ok(numbers)
    }
}

impl HfPlan {
    /// The file of a single-file model, which has no index.
    pub(super) fn single(&self) -> Option<&HfFile> {
        self.files.first().filter(|file| self.files.len() == 1 && file.name.as_str() == SINGLE_NAME)
    }

    /// The index; `None` for parts of ranks and for a single `model.safetensors`.
    #[must_use]
    pub fn index(&self) -> Option<IndexFile> {
        if self.distributed || self.single().is_some() {
            return None;
        }
        let held = self.files.iter().flat_map(|file| file.parts.iter().map(move |at| (at, file)));
        let map = held.filter_map(|(at, file)| {
            Some((Arc::clone(&self.parts.get(*at)?.fqn), file.name.clone()))
        });
        Some(IndexFile::new(self.total_size, map.collect()))
    }

    /// The text of the index file, with `metadata.total_size` and `weight_map`; `None` without an
    /// index.
    #[must_use]
    pub fn index_json(&self) -> Option<Vec<u8>> {
        self.index().map(|index| index.to_json())
    }

    /// The plan with a tag in all file names: `model-<tag>-00001-of-00002.safetensors`.
    pub(super) fn tagged(&self, tag: &str) -> Result<Self, FormatError> {
        let mut plan = self.clone();
        for file in &mut plan.files {
            let tagged = file.name.as_str().replacen("model-", &format!("model-{tag}-"), 1);
            file.name = key(&tagged)?;
        }
        Ok(plan)
    }
}

fn name(rank: Option<u32>, number: u32, count: u32) -> Result<Key, FormatError> {
    let shard = rank.map_or(String::new(), |rank| format!("shard-{:05}-", u64::from(rank) + 1));
    key(&format!("{shard}model-{number:05}-of-{count:05}{ENDING}"))
}

fn key(name: &str) -> Result<Key, FormatError> {
    Key::new(name).map_err(|error| FormatError::new("file name", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(sizes: &[u64]) -> Vec<HfPart> {
        let part = |(n, size): (usize, &u64)| HfPart::whole(format!("t{n}"), DType::UInt8, [*size]);
        sizes.iter().enumerate().map(part).collect()
    }

    fn held(plan: &HfPlan) -> Vec<(&str, Vec<usize>)> {
        plan.files.iter().map(|file| (file.name.as_str(), file.parts.clone())).collect()
    }

    #[test]
    fn files_are_filled_in_order() {
        // huggingface_hub's split_state_dict_into_shards_factory: in order, a new file where the
        // next tensor does not fit, a tensor beyond the limit alone.
        let plan = HfLayout::MaxFileBytes(10).plan(parts(&[4, 6, 1, 25, 10, 0, 3])).unwrap();
        let groups: Vec<_> = plan.files.iter().map(|file| file.parts.clone()).collect();
        assert_eq!(groups, [vec![0, 1], vec![2], vec![3], vec![4, 5], vec![6]]);
        assert_eq!(plan.files[3].name.as_str(), "model-00004-of-00005.safetensors");
        assert_eq!((plan.files[0].tensor_bytes, plan.total_size), (10, 49));
        let index = IndexFile::parse(&plan.index_json().unwrap()).unwrap();
        assert_eq!((index.total_size, index.weight_map.len()), (Some(49), 7));
        assert_eq!(index.weight_map["t3"], plan.files[2].name);
    }

    #[test]
    fn one_file_has_no_number_and_none_is_none() {
        let plan = HfLayout::default().plan(parts(&[1, 2])).unwrap();
        assert_eq!(held(&plan), [("model.safetensors", vec![0, 1])]);
        assert_eq!(plan.index(), None);
        // PyTorch's writer numbers it, and writes an index.
        let mapping = ["t0", "t1"].map(|fqn| (fqn.into(), 1)).into_iter().collect();
        let plan = HfLayout::Mapping(mapping).plan(parts(&[1, 2])).unwrap();
        assert_eq!(held(&plan), [("model-00001-of-00001.safetensors", vec![0, 1])]);
        assert_eq!(plan.index().unwrap().weight_map.len(), 2);
        let plan = HfLayout::default().plan(Vec::new()).unwrap();
        assert!(plan.files.is_empty());
        assert!(plan.index().unwrap().weight_map.is_empty());
    }

    #[test]
    fn a_mapping_is_followed() {
        let mapping = |numbers: &[u32]| {
            let named = numbers.iter().enumerate().map(|(n, to)| (format!("t{n}").into(), *to));
            HfLayout::Mapping(named.collect())
        };
        let plan = mapping(&[3, 1, 3]).plan(parts(&[1, 1, 1])).unwrap();
        let expected = [
            ("model-00001-of-00003.safetensors", vec![1]),
            ("model-00003-of-00003.safetensors", vec![0, 2]),
        ];
        assert_eq!(held(&plan), expected);
        for numbers in [&[1, 1][..], &[1, 0, 1]] {
            let error = mapping(numbers).plan(parts(&[1, 1, 1])).unwrap_err().to_string();
            assert!(error.contains("has no file"), "{error}");
        }
    }

    #[test]
    fn ranks_have_files_of_their_own() {
        let part = |fqn: &str, at: u64, rank| HfPart::part_of(fqn, DType::Float32, [2], [at], rank);
        let all = vec![part("a", 0, 0), part("b", 0, 0), part("a", 2, 1), part("b", 2, 1)];
        let plan = HfLayout::MaxFileBytes(20).plan(all.clone()).unwrap();
        let expected = [
            ("shard-00001-model-00001-of-00002.safetensors", vec![0]),
            ("shard-00001-model-00002-of-00002.safetensors", vec![1]),
            ("shard-00002-model-00001-of-00002.safetensors", vec![2]),
            ("shard-00002-model-00002-of-00002.safetensors", vec![3]),
        ];
        assert_eq!(held(&plan), expected);
        assert_eq!(plan.index(), None);
        let mixed = vec![all[0].clone(), HfPart::whole("c", DType::UInt8, [1])];
        assert!(HfLayout::default().plan(mixed).is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut twice = parts(&[1]);
        twice.extend(parts(&[1]));
        assert!(HfLayout::default().plan(twice).unwrap_err().to_string().contains("twice"));
        assert!(HfLayout::default().plan(parts(&[u64::MAX, 1])).is_err());
        let odd = HfPart::part_of("a", DType::UInt8, [1], [0, 0], 0);
        assert!(HfLayout::default().plan(vec![odd]).is_err());
    }

    #[test]
    fn tags_go_behind_the_word_model() {
        let plan = HfLayout::MaxFileBytes(1).plan(parts(&[1, 1])).unwrap().tagged("g2").unwrap();
        assert_eq!(plan.files[0].name.as_str(), "model-g2-00001-of-00002.safetensors");
    }
}
