//! What a `.metadata` may be: as large as a large run needs, and no larger in memory.

use dcp_core::metadata::{Encoding, Entry, Placement, TensorEntry};
use dcp_core::{CheckpointMetadata, DType, Key};
use dcp_formats::metadata::{Profile, decode, encode};
use dcp_formats::pickle::{Limits, Pickle};

/// An empty index, and a place in its one file.
fn one_place() -> (CheckpointMetadata, Option<Placement>) {
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&Key::new("__0_0.distcp").unwrap()).unwrap();
    let encoding = metadata.intern_encoding(&Encoding::default()).unwrap();
    (metadata, Some(Placement { file, encoding, byte_offset: 0, byte_len: 1577 }))
}

#[test]
fn the_index_of_a_large_run_fits_the_limits() {
    let (mut metadata, place) = one_place();
    // A sixteenth of what a large run has, and of the memory that it may take.
    for n in 0..50 {
        let mut tensor = TensorEntry::new(DType::Float32, [1_000_000, 8192]);
        for chunk in 0..1000 {
            tensor.chunks.push(&[chunk * 1000, 0], &[1000, 8192], place).unwrap();
        }
        metadata.insert(&*format!("model.blocks.{n}.weight"), Entry::Tensor(tensor));
    }
    let bytes = encode(&metadata, Profile::Compat).unwrap();
    assert!(bytes.len() > 4 << 20, "{}", bytes.len());
    Pickle::parse(&bytes, &Limits::DEFAULT.with_bytes(128 << 20)).unwrap();
    let error = Pickle::parse(&bytes, &Limits::DEFAULT.with_bytes(16 << 20)).unwrap_err();
    assert!(error.problem().contains("16 MiB of memory"), "{error}");
    assert_eq!(decode(&bytes).unwrap().len(), metadata.len());
}

#[test]
fn lists_that_are_shared_over_and_over_are_refused() {
    // 2000 tensors that all refer to one list of 2000 chunks.
    const COUNT: usize = 2000;
    let (mut metadata, place) = one_place();
    let mut tensor = TensorEntry::new(DType::Float32, [1]);
    for _ in 0..COUNT {
        tensor.chunks.push(&[0], &[1], place).unwrap();
    }
    metadata.insert("many", Entry::Tensor(tensor));
    let bytes = encode(&metadata, Profile::Compat).unwrap();
    decode(&bytes).unwrap();

    let module = "torch.distributed.checkpoint.metadata";
    let mut bytes = Vec::from(&b"\x80\x02"[..]);
    bytes.extend(format!("c{module}\nMetadata\n)\x7f}}X\x13\0\0\0state_dict_metadata}}(").bytes());
    let fix = bytes.iter().position(|b| *b == 0x7f).unwrap();
    bytes[fix] = 0x81;
    for n in 0..COUNT {
        let fqn = format!("t{n:05}");
        bytes.extend(b"X\x06\0\0\0");
        bytes.extend(fqn.bytes());
        bytes.extend(format!("c{module}\nTensorStorageMetadata\n)").bytes());
        bytes.extend(b"\x81}(X\x0a\0\0\0properties");
        bytes.extend(format!("c{module}\nTensorProperties\n)").bytes());
        bytes
            .extend(b"\x81(ctorch\nfloat32\nN\x89N\x89tbX\x04\0\0\0sizeK\x01\x85X\x06\0\0\0chunks");
        if n == 0 {
            bytes.extend(b"](");
            for _ in 0..COUNT {
                bytes.extend(format!("c{module}\nChunkStorageMetadata\n)").bytes());
                bytes.extend(b"\x81}(X\x07\0\0\0offsetsK\0\x85X\x05\0\0\0sizesK\x01\x85ub");
            }
            bytes.extend(b"eq\x00");
        } else {
            bytes.extend(b"h\x00");
        }
        bytes.extend(b"ub");
    }
    bytes.extend(b"usb.");
    let error = decode(&bytes).unwrap_err();
    assert!(error.problem().contains("over and over"), "{error}");
}
