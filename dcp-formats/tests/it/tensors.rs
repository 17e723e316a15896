//! Tensors of every layout, against a naive walk over their indices.

use dcp_core::{DType, FormatError};
use dcp_formats::pickle::Writer;
use dcp_formats::torch_object::{decode_object, encode_object};
use dcp_formats::torch_tensor::{ByteOrder, TensorBlob, TensorLayout};
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet, Sparse};
use proptest::prelude::*;

/// A `data.pkl` as `torch.save` writes it for a view.
struct View<'a> {
    storage_class: (&'a str, &'a str),
    numel: u64,
    offset: u64,
    sizes: &'a [u64],
    strides: &'a [u64],
    dtype: Option<&'a str>,
    bits: &'a [&'a str],
}

impl View<'_> {
    fn pickle(&self) -> bytes::Bytes {
        let mut writer = Writer::new();
        let function =
            if self.dtype.is_some() { "_rebuild_tensor_v3" } else { "_rebuild_tensor_v2" };
        writer.global("torch._utils", function);
        let len = 6 + usize::from(self.dtype.is_some()) + usize::from(!self.bits.is_empty());
        writer
            .tuple(len, |writer| {
                writer.tuple(5, |writer| {
                    writer.constant("storage");
                    writer.global(self.storage_class.0, self.storage_class.1);
                    writer.str("0");
                    writer.constant("cpu");
                    writer.uint(self.numel);
                    Ok::<(), FormatError>(())
                })?;
                writer.persistent();
                writer.uint(self.offset);
                writer.uint_tuple(self.sizes);
                writer.uint_tuple(self.strides);
                writer.bool(false);
                writer.none();
                if let Some(dtype) = self.dtype {
                    writer.global("torch", dtype);
                }
                if !self.bits.is_empty() {
                    writer.dict(self.bits.iter(), |writer, bit| {
                        writer.constant(bit);
                        writer.bool(true);
                        Ok::<(), FormatError>(())
                    })?;
                }
                Ok::<(), FormatError>(())
            })
            .unwrap();
        writer.call();
        writer.finish().unwrap()
    }

    fn layout(&self) -> Result<TensorLayout, FormatError> {
        TensorLayout::from_pickle(&self.pickle())
    }
}

const FLOAT: View<'static> = View {
    storage_class: ("torch", "FloatStorage"),
    numel: 6,
    offset: 0,
    sizes: &[2, 3],
    strides: &[3, 1],
    dtype: None,
    bits: &[],
};

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn f05_strides_are_honored() {
    let storage = floats(&[0., 1., 2., 3., 4., 5.]);
    let gather = |view: View<'_>| {
        let layout = view.layout().unwrap();
        layout.gather(&storage, ByteOrder::Little, 1000).unwrap()
    };
    let transposed = View { sizes: &[3, 2], strides: &[1, 3], ..FLOAT };
    assert_eq!(gather(transposed), floats(&[0., 3., 1., 4., 2., 5.]));
    let overlapping = View { sizes: &[3, 2], strides: &[1, 1], offset: 2, ..FLOAT };
    assert_eq!(gather(overlapping), floats(&[2., 3., 3., 4., 4., 5.]));
    let expanded = View { sizes: &[4], strides: &[0], offset: 5, ..FLOAT };
    assert_eq!(gather(expanded), floats(&[5.; 4]));
    let scalar = View { sizes: &[], strides: &[], offset: 4, ..FLOAT };
    assert_eq!(gather(scalar), floats(&[4.]));
    let negative = View { bits: &["neg"], ..FLOAT };
    assert_eq!(gather(negative), floats(&[-0., -1., -2., -3., -4., -5.]));
    let conjugate = View {
        storage_class: ("torch", "ComplexFloatStorage"),
        numel: 3,
        sizes: &[3],
        strides: &[1],
        bits: &["conj"],
        ..FLOAT
    };
    assert_eq!(conjugate.layout().unwrap().contiguous_range(), None);
    assert_eq!(gather(conjugate), floats(&[0., -1., 2., -3., 4., -5.]));
}

#[test]
fn big_endian_storages_are_swapped_by_scalar() {
    let layout = View {
        storage_class: ("torch", "ComplexFloatStorage"),
        numel: 1,
        sizes: &[1],
        strides: &[1],
        ..FLOAT
    }
    .layout()
    .unwrap();
    let big: Vec<u8> = [1.5_f32, -2.5].iter().flat_map(|x| x.to_be_bytes()).collect();
    assert_eq!(layout.gather(&big, ByteOrder::Big, 8).unwrap(), floats(&[1.5, -2.5]));

    let untyped = View {
        storage_class: ("torch.storage", "UntypedStorage"),
        numel: 4,
        sizes: &[2],
        strides: &[1],
        dtype: Some("uint16"),
        ..FLOAT
    };
    let layout = untyped.layout().unwrap();
    assert_eq!(layout.gather(&[1, 2, 3, 4], ByteOrder::Big, 4).unwrap(), [2, 1, 4, 3]);

    let archive =
        ArchiveEncoder::encode(RecordSet::default(), untyped.pickle(), &[&[1, 2, 3, 4]]).unwrap();
    let at = archive.windows(6).position(|window| window == b"little").unwrap();
    let mut archive = archive.to_vec();
    archive[at..at + 6].copy_from_slice(b"big\0\0\0");
    // Three bytes now: their length and CRC in the directory, which is all that counts.
    let name = archive.windows(17).rposition(|window| window == b"archive/byteorder").unwrap();
    archive[name - 30..name - 26].copy_from_slice(&crc32fast::hash(b"big").to_le_bytes());
    for field in [name - 26, name - 22] {
        archive[field] = 3;
    }
    let blob = TensorBlob::parse(&Sparse::whole(&archive)).unwrap().ready().unwrap();
    assert_eq!((blob.byte_order(), blob.element_range()), (ByteOrder::Big, None));
    assert_eq!(blob.decode(&[1, 2, 3, 4], 4).unwrap(), [2, 1, 4, 3]);
}

#[test]
fn elements_must_lie_in_the_storage() {
    for view in [
        View { numel: 5, ..FLOAT },
        View { offset: 1, ..FLOAT },
        View { strides: &[4, 1], ..FLOAT },
        View { strides: &[3], ..FLOAT },
        View { sizes: &[1 << 62, 1 << 62], strides: &[0, 0], ..FLOAT },
        View { offset: u64::MAX >> 1, ..FLOAT },
        View { strides: &[1 << 62, 1 << 62], ..FLOAT },
        View { numel: 1 << 62, ..FLOAT },
        View { dtype: Some("float99"), ..FLOAT },
        View { storage_class: ("torch", "QInt8Storage"), ..FLOAT },
        View { storage_class: ("os", "system"), ..FLOAT },
        View { bits: &["other"], ..FLOAT },
    ] {
        assert!(view.layout().is_err());
    }
    // An empty tensor needs no storage, whatever its offset and strides.
    let empty = View { numel: 0, offset: 7, sizes: &[3, 0], strides: &[9, 9], ..FLOAT };
    assert_eq!(empty.layout().unwrap().gather(&[], ByteOrder::Little, 0).unwrap(), b"");
}

#[test]
fn expansion_is_bounded() {
    let huge = View { sizes: &[1 << 40], strides: &[0], ..FLOAT };
    let layout = huge.layout().unwrap();
    let error = layout.gather(&[0; 24], ByteOrder::Little, 1 << 20).unwrap_err();
    assert!(error.problem().contains("more than"), "{error}");

    // In an object it stays what it is: a description.
    let blob = ArchiveEncoder::encode(RecordSet::default(), huge.pickle(), &[&[0; 24]]).unwrap();
    let value = decode_object(&blob).unwrap();
    assert_eq!(value.kind(), "_rebuild_tensor_v2");
    assert_eq!(encode_object(&value).unwrap(), blob);
}

#[test]
fn f16_an_object_blob_is_no_tensor() {
    let blob = encode_object(&1000.into()).unwrap();
    let error = TensorBlob::parse(&Sparse::whole(&blob)).unwrap_err();
    assert!(error.problem().contains("plain data"), "{error}");
    // The other way round, a tensor is a value.
    let pickle = FLOAT.pickle();
    let blob = ArchiveEncoder::encode(RecordSet::default(), pickle, &[&[0; 24]]).unwrap();
    let value = decode_object(&blob).unwrap();
    assert_eq!(value.as_tensor().unwrap().shape()[..], [2, 3]);
}

#[test]
fn every_dtype_that_is_not_quantized_has_a_pickle() {
    for &dtype in DType::ALL {
        let layout = TensorLayout::contiguous(dtype, [3, 1, 5]);
        if dtype.is_quantized() {
            assert!(layout.unwrap_err().problem().contains("scale"));
            continue;
        }
        let layout = layout.unwrap();
        let pickle = layout.to_pickle().unwrap();
        assert_eq!(TensorLayout::from_pickle(&pickle).unwrap(), layout, "{dtype}");
    }
    assert!(TensorLayout::contiguous(DType::Float64, [1 << 62]).is_err());
    assert!(TensorLayout::contiguous(DType::UInt8, [u64::MAX, 0]).is_err());
}

fn naive(storage: &[u16], offset: u64, sizes: &[u64], strides: &[u64]) -> Vec<u8> {
    let count: u64 = sizes.iter().product();
    let mut out = Vec::new();
    for mut n in 0..count {
        let mut at = offset;
        for (size, stride) in sizes.iter().zip(strides).rev() {
            at += n % size * stride;
            n /= size;
        }
        out.extend(storage[at as usize].to_le_bytes());
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn gathering_agrees_with_a_naive_walk(
        axes in proptest::collection::vec((0_u64..5, 0_u64..7), 0..5),
        offset in 0_u64..20,
    ) {
        let (sizes, strides): (Vec<_>, Vec<_>) = axes.into_iter().unzip();
        let storage: Vec<u16> = (0..200).collect();
        let view = View {
            storage_class: ("torch", "ShortStorage"),
            numel: 200,
            offset,
            sizes: &sizes,
            strides: &strides,
            ..FLOAT
        };
        let bytes: Vec<u8> = storage.iter().flat_map(|n| n.to_le_bytes()).collect();
        let layout = view.layout().unwrap();
        let gathered = layout.gather(&bytes, ByteOrder::Little, u64::MAX).unwrap();
        let expected = naive(&storage, offset, &sizes, &strides);
        prop_assert_eq!(&gathered, &expected);
        if let Some(range) = layout.contiguous_range() {
            prop_assert_eq!(&bytes[range.start as usize..range.end as usize], expected);
        }
    }
}
