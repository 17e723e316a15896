//! Divides a rank's items among its files.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroUsize;

/// The number of files per rank, and the assignment of items to them. In every file, objects
/// precede tensors, as in PyTorch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileLayout {
    /// One file, in the order of the plan: PyTorch's default.
    #[default]
    OnePerRank,
    /// This many files of about equal size. The items of a file keep the order of the plan.
    SplitBySize(NonZeroUsize),
    /// This many files, divided as PyTorch's `thread_count` (2.15) does: objects in turn, tensors
    /// by descending size of the whole tensor, which balances sharded tensors badly.
    TorchCompatible(NonZeroUsize),
    /// This many files, divided as Megatron-Core's `thread_count` (0.6 to 0.19) does: as PyTorch's,
    /// but by the size of the rank's part of a tensor.
    MegatronCompatible(NonZeroUsize),
    /// One file per item: PyTorch's `single_file_per_rank=False`.
    OnePerItem,
}

/// The sizes that determine an item's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ItemSize {
    pub(crate) is_tensor: bool,
    /// Encoded bytes of the item.
    pub(crate) byte_len: u64,
    /// Bytes of the elements of the item.
    pub(crate) chunk_bytes: u64,
    /// Bytes of the elements of the whole tensor.
    pub(crate) global_bytes: u64,
}

impl FileLayout {
    /// A number that differs between layouts.
    pub(crate) fn fingerprint(self) -> u64 {
        let (kind, files) = match self {
            Self::OnePerRank => (0, 0),
            Self::SplitBySize(files) => (1, files.get()),
            Self::TorchCompatible(files) => (2, files.get()),
            Self::OnePerItem => (3, 0),
            Self::MegatronCompatible(files) => (4, files.get()),
        };
        kind | (files as u64) << 3
    }

    /// The positions of the items of each file, in file order.
    pub(crate) fn split(self, items: &[ItemSize]) -> Vec<Vec<usize>> {
        match self {
            Self::OnePerRank => vec![objects_first(items, (0..items.len()).collect())],
            Self::OnePerItem => (0..items.len()).map(|index| vec![index]).collect(),
            Self::SplitBySize(files) => {
                let order = (0..items.len()).collect();
                let mut split = vec![Vec::new(); files.get()];
                spread(order, &mut split, |index| items[index].byte_len);
                split
                    .into_iter()
                    .map(|mut file| {
                        file.sort_unstable();
                        objects_first(items, file)
                    })
                    .collect()
            }
            Self::TorchCompatible(files) | Self::MegatronCompatible(files) => {
                let of_chunks = matches!(self, Self::MegatronCompatible(_));
                let (tensors, objects): (Vec<_>, Vec<_>) =
                    (0..items.len()).partition(|index| items[*index].is_tensor);
                let mut split = vec![Vec::new(); files.get()];
                for (turn, index) in objects.into_iter().enumerate() {
                    split[turn % files.get()].push(index);
                }
                if files.get() == 1 {
                    split[0].extend(tensors);
                } else {
                    spread(tensors, &mut split, |index| match of_chunks {
                        true => items[index].chunk_bytes,
                        false => items[index].global_bytes,
                    });
                }
                split
            }
        }
    }
}

fn objects_first(items: &[ItemSize], mut file: Vec<usize>) -> Vec<usize> {
    file.sort_by_key(|index| items[*index].is_tensor);
    file
}

/// Appends each item, largest first, to the list with the fewest bytes so far; the first one on a
/// tie.
fn spread(mut order: Vec<usize>, lists: &mut [Vec<usize>], size: impl Fn(usize) -> u64) {
    order.sort_by_key(|index| Reverse(size(*index)));
    let mut heap: BinaryHeap<_> = (0..lists.len()).map(|list| Reverse((0_u64, list))).collect();
    for index in order {
        let Some(mut least) = heap.peek_mut() else { return };
        let Reverse((bytes, list)) = *least;
        lists[list].push(index);
        *least = Reverse((bytes.saturating_add(size(index)), list));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The division of PyTorch 2.15, as `vectors/split_buckets.json` has it.
    #[test]
    fn torch_compatible_equals_pytorch() {
        let text = include_str!("../../../fixtures/pytorch/vectors/split_buckets.json");
        let cases: serde_json::Value = serde_json::from_str(text).unwrap();
        let cases = cases.as_array().unwrap();
        assert_eq!(cases.len(), 20);
        for case in cases {
            let mut names = Vec::new();
            let mut items = Vec::new();
            for item in case["items"].as_array().unwrap() {
                names.push(item["fqn"].as_str().unwrap());
                let is_tensor = item["type"] != "BYTE_IO";
                let global_bytes = if is_tensor {
                    let size = item["size"].as_array().unwrap();
                    let volume: u64 = size.iter().map(|s| s.as_u64().unwrap()).product();
                    let dtype: dcp_core::DType = item["dtype"].as_str().unwrap().parse().unwrap();
                    volume * dtype.size() as u64
                } else {
                    0
                };
                items.push(ItemSize { is_tensor, byte_len: 1, chunk_bytes: 1, global_bytes });
            }
            let bins = usize::try_from(case["bins"].as_u64().unwrap()).unwrap();
            let layout = FileLayout::TorchCompatible(bins.try_into().unwrap());
            let split: Vec<Vec<&str>> = layout
                .split(&items)
                .iter()
                .map(|file| file.iter().map(|index| names[*index]).collect())
                .collect();
            // PyTorch moves objects to the front of a file only when it writes it.
            let expected = case["buckets"].as_array().unwrap().iter().map(|bucket| {
                let mut bucket: Vec<_> =
                    bucket.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
                bucket.sort_by_key(|name| {
                    items[names.iter().position(|other| other == name).unwrap()].is_tensor
                });
                bucket
            });
            assert_eq!(split, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn bytes_are_balanced_and_objects_come_first() {
        let size = |is_tensor, byte_len| ItemSize {
            is_tensor,
            byte_len,
            chunk_bytes: byte_len,
            global_bytes: 1_000_000,
        };
        let items = [
            size(true, 10),
            size(true, 40),
            size(false, 30),
            size(true, 20),
            size(false, 0),
            size(true, 5),
        ];
        let two = NonZeroUsize::new(2).unwrap();
        // 40 + 10 + 5 against 30 + 20 + 0: by descending size, each to the emptier file.
        assert_eq!(FileLayout::SplitBySize(two).split(&items), [vec![0, 1, 5], vec![2, 4, 3]]);
        assert_eq!(FileLayout::OnePerRank.split(&items), [[2, 4, 0, 1, 3, 5]]);
        assert_eq!(FileLayout::OnePerItem.split(&items).len(), 6);
        assert_eq!(FileLayout::OnePerRank.split(&[]), [Vec::<usize>::new()]);
        assert_eq!(FileLayout::OnePerItem.split(&[]), Vec::<Vec<usize>>::new());
    }

    /// Rank 0 of `fixtures/megatron/tp2_basic`, in the order in which its state dict was walked.
    #[test]
    fn megatron_compatible_equals_megatron() {
        let object = (false, 0);
        let items: Vec<_> = [
            // embedding, final_layernorm, col, row, both, ids, mask, scalar, u8, f64
            (true, 128),
            (true, 16),
            (true, 32),
            (true, 32),
            (true, 72),
            (true, 40),
            (true, 12),
            (true, 4),
            (true, 5),
            (true, 32),
            // col._extra_state, fp8._extra_state, rng_state, and list.tensor
            object,
            object,
            object,
            (true, 8),
        ]
        .map(|(is_tensor, chunk_bytes)| ItemSize {
            is_tensor,
            byte_len: 1,
            chunk_bytes,
            global_bytes: 1,
        })
        .into();
        let layout = FileLayout::MegatronCompatible(NonZeroUsize::new(2).unwrap());
        let split = layout.split(&items);
        // `__0_0.distcp`: col, rng | embedding, row, final_layernorm, mask, scalar
        assert_eq!(split[0], [10, 12, 0, 3, 1, 6, 7]);
        // `__0_1.distcp`: fp8 | both, ids, col, f64, list.tensor, u8
        assert_eq!(split[1], [11, 4, 5, 2, 9, 13, 8]);
    }
}
