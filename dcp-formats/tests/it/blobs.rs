//! Every blob of every fixture, taken apart and put together again.

use crate::support::{self, Item};
use bytes::Bytes;
use dcp_core::{DType, Region, Value};
use dcp_formats::torch_object::{decode_object, encode_object};
use dcp_formats::torch_tensor::{Quantizer, TensorBlob, TensorLayout};
use dcp_formats::torch_zip::{ArchiveEncoder, ArchiveIndex, RecordSet, Sparse};

/// Fixtures whose items are no archives that PyTorch wrote.
const FOREIGN: &[&str] = &["foreign_minimal", "safetensors_fmt_2r", "safetensors_fmt_with_objects"];

fn torch_items() -> impl Iterator<Item = Item> {
    let names = support::names().into_iter().filter(|name| !FOREIGN.contains(&name.as_str()));
    names.flat_map(|name| support::items(&name))
}

fn record(index: &ArchiveIndex, blob: &Bytes, name: &str) -> Vec<u8> {
    let entry = index.require(name).unwrap();
    let record = entry.locate(&Sparse::whole(blob)).unwrap().ready().unwrap();
    let kept = &blob[record.data.start as usize..record.data.end as usize];
    record.decode(kept, u64::MAX).unwrap().into_owned()
}

/// The archive without the digits of its serialization id and what follows from them.
fn without_serialization_id(blob: &[u8]) -> Vec<u8> {
    let mut blob = blob.to_vec();
    let find = |blob: &[u8], from: usize, name: &[u8]| {
        from + blob[from..].windows(name.len()).position(|w| w == name).unwrap()
    };
    let name = b".data/serialization_id";
    let local = find(&blob, 0, name);
    let data = (local + name.len()).next_multiple_of(64);
    blob[data..data + 40].fill(0);
    blob[data + 44..data + 48].fill(0);
    let central = find(&blob, local + 1, name) - "archive/".len() - 46;
    blob[central + 16..central + 20].fill(0);
    blob
}

#[test]
fn f01_f02_f04_archives_are_rebuilt_byte_for_byte() {
    let mut rebuilt = 0;
    for item in torch_items() {
        let index = ArchiveIndex::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
        let records = match index.entry(".format_version") {
            Some(_) => RecordSet::Torch2_7,
            None => RecordSet::Torch2_1,
        };
        let pickle = record(&index, &item.blob, "data.pkl");
        let storages: Vec<_> = (0..)
            .map_while(|n| index.entry(&format!("data/{n}")).map(|_| format!("data/{n}")))
            .map(|name| record(&index, &item.blob, &name))
            .collect();
        let slices: Vec<&[u8]> = storages.iter().map(Vec::as_slice).collect();
        let ours = ArchiveEncoder::encode(records, pickle, &slices).unwrap();
        assert_eq!(ours.len(), item.blob.len());
        assert!(
            without_serialization_id(&ours) == without_serialization_id(&item.blob),
            "{} {}",
            item.fixture,
            item.fqn
        );
        rebuilt += 1;
    }
    assert!(rebuilt > 800, "{rebuilt}");
}

#[test]
fn tensor_pickles_are_rebuilt_byte_for_byte() {
    let (mut row_major, mut rebuilt) = (0, 0);
    for item in torch_items().filter(|item| item.tensor.is_some()) {
        let index = ArchiveIndex::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
        let pickle = record(&index, &item.blob, "data.pkl");
        let layout = TensorLayout::from_pickle(&pickle).unwrap();
        assert_eq!(layout.to_pickle().unwrap(), pickle, "{} {}", item.fixture, item.fqn);
        let contiguous = TensorLayout::contiguous(layout.dtype(), layout.sizes().clone());
        if let Some(contiguous) = contiguous.ok().filter(|contiguous| *contiguous == layout) {
            assert_eq!(contiguous.to_pickle().unwrap(), pickle, "{} {}", item.fixture, item.fqn);
            row_major += 1;
        }
        rebuilt += 1;
    }
    assert!(row_major > 500 && rebuilt > row_major + 10, "{row_major} of {rebuilt}");
}

#[test]
fn f05_f10_every_tensor_chunk_has_the_expected_elements() {
    for name in support::names() {
        if name.starts_with("safetensors_fmt") {
            continue;
        }
        let expected = support::expected_tensors(&name);
        for item in support::items(&name) {
            let Some(tensor) = &item.tensor else { continue };
            let blob = TensorBlob::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
            let layout = blob.layout();
            assert_eq!(layout.sizes()[..], item.sizes, "{name} {}", item.fqn);
            assert_eq!(layout.dtype().name(), tensor["dtype"].as_str().unwrap());
            let storage = &blob.storage().data;
            let kept = &item.blob[storage.start as usize..storage.end as usize];
            let elements = blob.decode(kept, layout.byte_len()).unwrap();
            if let Some(range) = blob.element_range() {
                assert_eq!(elements, item.blob[range.start as usize..range.end as usize]);
            }
            let Some((_, whole)) = expected.get(&item.fqn) else { continue };
            let shape = support::uints(&tensor["size"]);
            let offset = item.offset.clone().unwrap();
            let region = Region::new(&offset[..], &item.sizes[..]).unwrap();
            let size = layout.dtype().size();
            let mut at = 0;
            for (first, count) in region.runs_in(&shape) {
                let len = count as usize * size;
                let start = first as usize * size;
                assert_eq!(
                    elements[at..at + len],
                    whole[start..start + len],
                    "{name} {}",
                    item.fqn
                );
                at += len;
            }
            assert_eq!(at, elements.len());
        }
    }
}

#[test]
fn f01_f02_head_and_tail_are_enough_and_the_head_alone_agrees() {
    let mut from_head = 0;
    for item in torch_items().filter(|item| item.tensor.is_some()) {
        let whole = TensorBlob::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
        let len = item.blob.len();
        let (head, tail) = (&item.blob[..len.min(4096)], &item.blob[len.saturating_sub(1024)..]);
        let sparse = Sparse::tail(len as u64, tail).with(0, head);
        let parsed = TensorBlob::parse(&sparse).unwrap();
        // Three storages make the directory of a per-channel quantized tensor longer.
        if item.fqn != "qint8_per_channel" {
            assert_eq!(parsed.ready().unwrap().storage(), whole.storage());
        }
        if let Some(located) = TensorBlob::locate_from_head(head, len as u64) {
            assert_eq!(located.layout(), whole.layout());
            assert_eq!(located.storage().data, whole.storage().data);
            assert_eq!(located.element_range(), whole.element_range());
            assert!(TensorBlob::locate_from_head(head, len as u64 + 1).is_none());
            from_head += 1;
        }
    }
    assert!(from_head > 600, "{from_head}");
}

#[test]
fn f03_empty_storages_have_no_descriptor() {
    let layout = TensorLayout::contiguous(DType::Float32, [0, 5]).unwrap();
    assert_eq!(layout.strides(), [5, 1]);
    let items = support::items("empty_zero");
    let empty = items.iter().find(|item| item.sizes == [0, 5]).unwrap();
    let ours =
        ArchiveEncoder::encode(RecordSet::default(), layout.to_pickle().unwrap(), &[b""]).unwrap();
    assert!(without_serialization_id(&ours) == without_serialization_id(&empty.blob));
    let blob = TensorBlob::parse(&Sparse::whole(&ours)).unwrap().ready().unwrap();
    assert_eq!(blob.decode(b"", 0).unwrap(), b"");
}

#[test]
fn quantized_tensors_keep_their_scales() {
    for item in support::items("quantized") {
        let blob = TensorBlob::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
        match (item.fqn.as_str(), blob.layout().quantizer().unwrap()) {
            ("qint8_per_channel", Quantizer::PerChannel { scales, zero_points, axis, .. }) => {
                assert_eq!(
                    (scales.dtype(), &scales.sizes()[..], *axis),
                    (DType::Float64, &[3][..], 0)
                );
                assert_eq!(&*zero_points.storage().key, "2");
            }
            (_, Quantizer::PerTensor { scale, zero_point }) => {
                assert_eq!((*scale, *zero_point), (0.1, 2), "{}", item.fqn);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn f10_f11_objects_decode_to_what_python_had() {
    let expected = support::json(&support::root().join("objects/expected.json"));
    let expected = expected["objects"].as_object().unwrap();
    let mut seen = 0;
    for item in support::items("objects").into_iter().filter(|item| item.tensor.is_none()) {
        let value = decode_object(&item.blob).unwrap();
        let mut tagged = support::tagged::tagged(&value);
        if item.fqn == "size" {
            // A `torch.Size` is seen as the tuple that it is.
            assert!(matches!(value, Value::Opaque(_)));
            tagged["t"] = "torch.Size".into();
        }
        assert_eq!(tagged, expected[&item.fqn], "{}", item.fqn);
        seen += 1;
    }
    assert_eq!(seen, expected.len());
}

#[test]
fn objects_of_all_fixtures_are_rebuilt_byte_for_byte() {
    let (mut plain, mut opaque) = (0, 0);
    for item in torch_items().filter(|item| item.tensor.is_none()) {
        let value = decode_object(&item.blob).unwrap();
        let ours = encode_object(&value).unwrap();
        if matches!(value, Value::Opaque(_)) {
            assert_eq!(ours, item.blob);
            opaque += 1;
            continue;
        }
        let index = ArchiveIndex::parse(&Sparse::whole(&item.blob)).unwrap().ready().unwrap();
        if index.entry(".format_version").is_some() {
            assert!(
                without_serialization_id(&ours) == without_serialization_id(&item.blob),
                "{} {} {value:?}",
                item.fixture,
                item.fqn
            );
        }
        plain += 1;
    }
    assert!(plain > 200 && opaque > 15, "{plain} {opaque}");
}
