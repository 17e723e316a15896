//! Parts of tensors of any strides, and names of any nesting.

use std::sync::Arc;

use dcp_core::metadata::{Encoding, Layout};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::value::Dict;
use dcp_core::{Region, StorageReader as _, Tensor, Value};
use dcp_formats::pickle::Writer;
use dcp_formats::torch_object::encode_object;
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_planner::{FlattenRule, flatten};
use proptest::prelude::*;

use crate::harness::{Sink, block_on};
use crate::torch_save::reading::{metadata, reader, stored};

/// A tensor of 16-bit integers, each element its own position in the storage.
fn file(sizes: &[u64], strides: &[u64], offset: u64) -> Vec<u8> {
    let last: u64 = sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
    let numel = offset + last + 3;
    let mut writer = Writer::new();
    writer
        .dict(["t"].into_iter(), |writer, name| {
            writer.constant(name);
            writer.global("torch._utils", "_rebuild_tensor_v2");
            writer.tuple(6, |writer| {
                writer.storage(("torch", "ShortStorage"), "0", "cpu", numel);
                writer.uint(offset);
                writer.uint_tuple(sizes);
                writer.uint_tuple(strides);
                writer.bool(false);
                writer.none();
                Ok::<(), ()>(())
            })?;
            writer.call();
            Ok::<(), ()>(())
        })
        .unwrap();
    let storage: Vec<u8> = (0..numel).flat_map(|n| (n as u16).to_le_bytes()).collect();
    let pickle = writer.finish().unwrap();
    ArchiveEncoder::encode(RecordSet::default(), pickle, &[&storage]).unwrap().to_vec()
}

fn axes() -> impl Strategy<Value = Vec<(u64, u64, u64, u64)>> {
    // Size, stride, where a part begins and how long it is.
    prop::collection::vec((1..7_u64, 0..40_u64, 0..7_u64, 1..7_u64), 0..4)
}

proptest! {
    #[test]
    fn any_part_of_any_strides_is_found(axes in axes(), offset in 0..9_u64) {
        let sizes: Vec<_> = axes.iter().map(|axis| axis.0).collect();
        let strides: Vec<_> = axes.iter().map(|axis| axis.1).collect();
        let starts: Vec<_> = axes.iter().map(|(size, _, at, _)| at % size).collect();
        let lens: Vec<_> = axes.iter().zip(&starts).map(|((size, _, _, len), at)| {
            1 + (len - 1) % (size - at)
        }).collect();
        let region = Region::new(starts.as_slice(), lens.as_slice()).unwrap();
        let storage = stored(file(&sizes, &strides, offset));
        let reader = reader(&storage);
        let metadata = block_on(reader.metadata()).unwrap();
        let entry = metadata.get("t").unwrap().as_tensor().unwrap();
        let tensor = Tensor::zeros_sharded(entry.dtype, entry.shape.clone(), [region.clone()]).unwrap();
        let sink = Sink::new(vec![Some(tensor.clone())]);
        let kind = ReadKind::Tensor { chunk: 0, shard: 0, region: region.clone() };
        let plan = LoadPlan { items: vec![ReadItem { entry: 0, leaf: 0, kind }] };
        block_on(reader.read(&metadata, &plan, sink)).unwrap();
        let found = tensor.shards()[0].view().unwrap().payload().unwrap().to_bytes();
        let found: Vec<u64> =
            found.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect();
        let mut expected = vec![offset];
        for ((at, len), stride) in starts.iter().zip(&lens).zip(&strides) {
            expected = expected
                .iter()
                .flat_map(|from| (*at..at + len).map(move |n| from + n * stride))
                .collect();
        }
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_large_transposed_tensor_is_read_in_bounded_pieces() {
    // 3000 x 2000, transposed: 12 MB, of which a part is 100 columns.
    let storage = stored(file(&[2000, 3000], &[1, 2000], 0));
    let reader = reader(&storage);
    let metadata = block_on(reader.metadata()).unwrap();
    let entry = metadata.get("t").unwrap().as_tensor().unwrap();
    let placement = entry.chunks.get(0).unwrap().placement.unwrap();
    assert_eq!(metadata.encoding(&placement), Some(&Encoding::new(Layout::TorchSave)));
    let region = Region::new([500, 0], [100, 3000]).unwrap();
    let tensor = Tensor::zeros_sharded(entry.dtype, entry.shape.clone(), [region.clone()]).unwrap();
    let sink = Sink::new(vec![Some(tensor.clone())]);
    let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
    let plan = LoadPlan { items: vec![ReadItem { entry: 0, leaf: 0, kind }] };
    let report = block_on(reader.read(&metadata, &plan, sink)).unwrap();
    // Rows of 200 bytes, 4000 bytes apart: only these are read.
    assert_eq!((report.bytes_needed, report.bytes_read), (600_000, 600_000));
    let bytes = tensor.shards()[0].view().unwrap().payload().unwrap().to_bytes();
    let at = |row: usize, column: usize| {
        let at = 2 * (row * 3000 + column);
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    };
    assert_eq!((at(0, 0), at(99, 2999)), (500, ((599 + 2999 * 2000) % 65_536) as u16));
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        (0..99_i64).prop_map(Value::Int),
        Just(Value::Float(0.5)),
        Just(Value::Tensor(Tensor::zeros(dcp_core::DType::Int8, [2]).unwrap())),
    ];
    leaf.prop_recursive(5, 40, 4, |inner| {
        let key = prop_oneof![
            "[a-c]{2}".prop_map(Value::from),
            (0..3_i64).prop_map(Value::Int),
            Just(Value::Tuple(vec![1.into(), "x".into()])),
            Just(Value::Float(1.5)),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::List),
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Tuple),
            prop::collection::vec((key, inner), 0..4)
                .prop_map(|entries| Value::Dict(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn names_are_those_of_the_planner(
        entries in prop::collection::vec(("[a-d]{2}", value()), 1..5),
    ) {
        let state: Dict = entries.into_iter().collect();
        let encoded = encode_object(&Value::Dict(state.clone())).unwrap();
        let found = metadata(&stored(encoded.to_vec()));
        match flatten(&state, FlattenRule::Torch24) {
            Ok(leaves) => {
                let found = found.unwrap();
                let mut found: Vec<_> = found
                    .iter()
                    .map(|(fqn, entry)| {
                        (Arc::clone(fqn), entry.path().cloned(), entry.as_tensor().is_some())
                    })
                    .collect();
                let expected: Vec<_> = leaves
                    .iter()
                    .map(|leaf| {
                        let is_tensor = matches!(leaf.value, Value::Tensor(_));
                        (Arc::clone(&leaf.fqn), leaf.path.clone(), is_tensor)
                    })
                    .collect();
                // The planner has no leaf for an empty dict.
                found.retain(|(fqn, _, is_tensor)| {
                    *is_tensor || expected.iter().any(|(name, ..)| name == fqn)
                });
                prop_assert_eq!(found, expected);
            }
            Err(error) => {
                prop_assert!(found.is_err(), "{error}");
            }
        }
    }
}
