//! Whatever the division into files and ranks, the same is read back.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{DType, Region, Storage, StorageReader as _};
use dcp_formats::hf::{HfLayout, HfPart, HfReader, HfWriteOptions, write_folder};
use proptest::prelude::*;

use crate::harness::{block_on, cut};
use crate::hf::folder::{data, tensors};

#[derive(Clone, Debug)]
struct Tensor {
    dtype: DType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
    /// For each axis, where it is cut.
    cuts: Vec<Vec<u64>>,
}

fn tensor() -> impl Strategy<Value = Tensor> {
    let dtypes = prop::sample::select(DType::ALL);
    let axes = prop::collection::vec((0_u64..7, prop::collection::vec(0_u64..8, 0..3)), 0..4);
    (dtypes, axes, any::<u8>()).prop_map(|(dtype, axes, seed)| {
        let shape: Vec<u64> = axes.iter().map(|(size, _)| *size).collect();
        let len = shape.iter().product::<u64>() * dtype.size() as u64;
        let bytes = (0..len).map(|n| (n as u8).wrapping_mul(31) ^ seed).collect();
        let cuts = axes
            .iter()
            .map(|(size, cuts)| {
                let mut cuts: Vec<u64> = cuts.iter().map(|cut| cut % (size + 1)).collect();
                cuts.extend([0, *size]);
                cuts.sort_unstable();
                cuts
            })
            .collect();
        Tensor { dtype, shape, bytes, cuts }
    })
}

impl Tensor {
    /// The boxes that the cuts make of it. Of boxes at the same place only one has elements, and
    /// only that one is kept.
    fn boxes(&self) -> Vec<Region> {
        let mut boxes = vec![(Vec::new(), Vec::new())];
        for cuts in &self.cuts {
            let spans = cuts.windows(2);
            boxes = boxes
                .iter()
                .flat_map(|(offsets, sizes)| {
                    spans.clone().map(|span| {
                        let add = |list: &Vec<u64>, n| [&list[..], &[n]].concat();
                        (add(offsets, span[0]), add(sizes, span[1] - span[0]))
                    })
                })
                .collect();
        }
        let mut kept: BTreeMap<Vec<u64>, Vec<u64>> = BTreeMap::new();
        for (offsets, sizes) in boxes {
            let held = kept.entry(offsets).or_insert_with(|| sizes.clone());
            if held.contains(&0) {
                *held = sizes;
            }
        }
        kept.into_iter().map(|(offsets, sizes)| Region::new(offsets, sizes).unwrap()).collect()
    }
}

fn layout() -> impl Strategy<Value = HfLayout> {
    prop_oneof![
        (0_u64..200).prop_map(HfLayout::MaxFileBytes),
        prop::collection::vec(1_u32..5, 6).prop_map(|numbers| {
            let named = numbers.into_iter().enumerate();
            HfLayout::Mapping(named.map(|(n, file)| (format!("t{n}").into(), file)).collect())
        }),
    ]
}

fn write(parts: Vec<HfPart>, bytes: Vec<Vec<u8>>, layout: &HfLayout) -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::new());
    let plan = layout.plan(parts).unwrap();
    let shared = Arc::clone(&storage) as Arc<dyn Storage>;
    let mut options = HfWriteOptions::default();
    options.parallelism = 3;
    block_on(write_folder(&shared, &plan, data(bytes), &options, None)).unwrap();
    storage
}

fn check(storage: &Arc<MemoryStorage>, all: &[Tensor]) {
    let reader = HfReader::new(Arc::clone(storage) as _);
    let notes = block_on(reader.notes()).unwrap();
    assert!(notes.iter().all(|note| note.contains("the names of the files")), "{notes:?}");
    let found = tensors(&reader).unwrap();
    assert_eq!(found.len(), all.len());
    for (n, tensor) in all.iter().enumerate() {
        let read = &found[&format!("t{n}")];
        assert_eq!((read.dtype(), &**read.shape()), (tensor.dtype, &tensor.shape[..]));
        assert_eq!(read.to_vec().unwrap(), tensor.bytes);
    }
    let metadata = block_on(reader.metadata()).unwrap();
    assert!(metadata.iter().all(|(_, entry)| entry.as_tensor().is_some()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn whole_tensors_in_any_files(
        all in prop::collection::vec(tensor(), 1..6),
        layout in layout(),
    ) {
        let parts = all.iter().enumerate().map(|(n, tensor)| {
            HfPart::whole(format!("t{n}"), tensor.dtype, tensor.shape.clone())
        });
        let bytes = all.iter().map(|tensor| tensor.bytes.clone()).collect();
        check(&write(parts.collect(), bytes, &layout), &all);
    }

    #[test]
    fn parts_of_tensors_on_any_ranks(
        all in prop::collection::vec(tensor(), 1..4),
        layout in layout(),
        first_rank in 0_u32..9,
    ) {
        let (mut parts, mut bytes) = (Vec::new(), Vec::new());
        for (n, tensor) in all.iter().enumerate() {
            // A file has one tensor of a name, so every part is on a rank of its own.
            for (rank, region) in (first_rank..).zip(tensor.boxes()) {
                let (offsets, sizes) = (region.offsets().clone(), region.sizes().clone());
                parts.push(HfPart::part_of(format!("t{n}"), tensor.dtype, sizes, offsets, rank));
                bytes.push(cut(&tensor.bytes, tensor.dtype, &tensor.shape, &region));
            }
        }
        check(&write(parts, bytes, &layout), &all);
    }
}
