//! Files that lie, bombs of every kind, and forms that are refused.

use std::io::Write as _;

use bytes::Bytes;
use dcp_core::{CheckpointError, DType, FormatError, Value};
use dcp_formats::pickle::{Limits, Pickle, Writer};
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};

use crate::torch_save::reading::{fixture, load, metadata, root, stored};

type Written = Result<(), FormatError>;

fn pickle(write: impl FnOnce(&mut Writer) -> Written) -> Bytes {
    let mut writer = Writer::new();
    write(&mut writer).unwrap();
    writer.finish().unwrap()
}

fn archive(pickle: impl Into<Bytes>, storages: &[&[u8]]) -> Bytes {
    ArchiveEncoder::encode(RecordSet::default(), pickle, storages).unwrap()
}

/// A float tensor of `len` elements from `offset` on, over a storage of `numel`.
fn tensor(
    writer: &mut Writer,
    key: &str,
    numel: u64,
    offset: u64,
    len: u64,
    stride: u64,
) -> Written {
    writer.global("torch._utils", "_rebuild_tensor_v2");
    writer.tuple(6, |writer| {
        writer.storage(("torch", "FloatStorage"), key, "cpu", numel);
        writer.uint(offset);
        writer.uint_tuple(&[len]);
        writer.uint_tuple(&[stride]);
        writer.bool(false);
        writer.none();
        Ok::<(), FormatError>(())
    })?;
    writer.call();
    Ok(())
}

#[track_caller]
fn refused(file: impl Into<Vec<u8>>, texts: &[&str]) {
    let error = load(&stored(file)).map(|_| ()).unwrap_err();
    let CheckpointError::Format(format) = &error else { panic!("{error:?}") };
    let message = format.to_string();
    assert_eq!(format.file(), Some("file.pt"), "{message}");
    for text in texts {
        assert!(message.contains(text), "{text:?} is not in {message:?}");
    }
}

/// A zip file as other programs make it: what it says of each record may be a lie.
fn foreign_zip(records: &[(&str, u16, &[u8], u32)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, method, kept, len) in records {
        let at = file.len() as u32;
        let mut fields = Vec::new();
        fields.extend([20, 0, 0, 0]);
        fields.extend(method.to_le_bytes());
        fields.extend([0; 8]);
        fields.extend((kept.len() as u32).to_le_bytes());
        fields.extend(len.to_le_bytes());
        fields.extend((name.len() as u16).to_le_bytes());
        fields.extend([0, 0]);
        file.extend(b"PK\x03\x04");
        file.extend(&fields);
        file.extend(name.as_bytes());
        file.extend(*kept);
        directory.extend(b"PK\x01\x02\x14\x00");
        directory.extend(&fields);
        directory.extend([0; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let start = file.len() as u32;
    let count = (records.len() as u16).to_le_bytes();
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend(count);
    file.extend(count);
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(start.to_le_bytes());
    file.extend([0, 0]);
    file
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn archives_of_other_programs_are_read() {
    let pickle = pickle(|w| {
        w.dict([("w", 0), ("v", 1)].into_iter(), |w, (name, offset)| {
            w.constant(name);
            tensor(w, "0", 4, offset, 2, 2)
        })
    });
    let storage: Vec<u8> = (0..4).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let big: Vec<u8> = (0..4).flat_map(|n| (n as f32).to_be_bytes()).collect();
    for (order, bytes) in [("little", &storage), ("big", &big)] {
        let kept = deflated(bytes);
        let file = foreign_zip(&[
            ("x/data.pkl", 0, &pickle, pickle.len() as u32),
            ("x/byteorder", 0, order.as_bytes(), order.len() as u32),
            ("x/data/0", 8, &kept, 16),
        ]);
        let loaded = load(&stored(file)).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let bytes = loaded.tensors[name].to_vec().unwrap();
            bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        assert_eq!((floats("w"), floats("v")), (vec![0.0, 2.0], vec![1.0, 3.0]));
    }
}

#[test]
fn bombs_are_not_inflated() {
    let bomb = deflated(&vec![0; 80 << 20]);
    refused(foreign_zip(&[("x/data.pkl", 8, &bomb, 80 << 20)]), &["data.pkl", "more than"]);
    refused(foreign_zip(&[("x/data.pkl", 8, b"abc", u32::MAX - 1)]), &["more than is possible"]);
    // It says less than it is.
    refused(foreign_zip(&[("x/data.pkl", 8, &bomb, 9)]), &["stops at"]);
}

#[test]
fn a_deflated_storage_is_inflated_once_for_all_its_parts() {
    use dcp_conformance::CountingStorage;
    use dcp_core::StorageReader as _;
    const LEN: u64 = 3 << 20;
    let pickle = pickle(|w| {
        w.dict([("w", 0), ("v", 1)].into_iter(), |w, (name, offset)| {
            w.constant(name);
            tensor(w, "0", LEN, offset, LEN - 1, 1)
        })
    });
    let bytes: Vec<u8> = (0..LEN).flat_map(|n| ((n % 1000) as f32).to_le_bytes()).collect();
    let kept = deflated(&bytes);
    let whole = [
        ("x/data.pkl", 0, &pickle[..], pickle.len() as u32),
        ("x/data/0", 8, &kept, bytes.len() as u32),
    ];
    let counting = std::sync::Arc::new(CountingStorage::new(stored(foreign_zip(&whole))));
    let reader = dcp_formats::torch_save::TorchSaveReader::new(
        std::sync::Arc::clone(&counting) as _,
        crate::harness::key("file.pt"),
    );
    crate::harness::block_on(async {
        let metadata = reader.metadata().await.unwrap();
        let before = counting.counts().bytes_read;
        for _ in 0..3 {
            let (plan, sink) = crate::harness::whole_plan(&metadata);
            reader.read(&metadata, &plan, std::sync::Arc::clone(&sink) as _).await.unwrap();
            let at = metadata.index_of("v").unwrap();
            let found = sink.tensors[at].as_ref().unwrap().to_vec().unwrap();
            assert!(found == bytes[4..]);
        }
        assert_eq!(counting.counts().bytes_read - before, kept.len() as u64);
    });

    // No deflated data, an end too early, a length that is not its own.
    let wrong = vec![0xff; kept.len()];
    let cut = &kept[..kept.len() / 2];
    for (kept, len, text) in [
        (&wrong[..], bytes.len() as u32, "does not inflate"),
        (cut, bytes.len() as u32, "stops at"),
        (&kept[..], bytes.len() as u32 - 4, "says"),
    ] {
        let bad = [whole[0], ("x/data/0", 8, kept, len)];
        refused(foreign_zip(&bad), &["file.pt", text]);
    }
}

#[test]
fn a_deflated_storage_that_is_too_long_is_refused_with_words() {
    use dcp_formats::torch_zip::{INFLATED_MAX, Inflater, Method, Record};
    let mut record =
        Record { data: 64..2 << 20, byte_len: INFLATED_MAX, crc32: None, method: Method::Deflated };
    assert!(Inflater::new(&record).is_ok());
    record.byte_len += 1;
    let error = Inflater::new(&record).unwrap_err();
    assert!(error.problem().contains("1073741825 bytes"), "{error}");
    assert!(error.problem().contains("save it again"), "{error}");
}

#[test]
fn pickles_that_make_much_of_little_are_refused() {
    let empty_lists = |count: usize| {
        let mut bytes = b"\x80\x02(".to_vec();
        bytes.resize(bytes.len() + count, b']');
        bytes.extend(b"l.");
        bytes
    };
    // PyTorch deflates no pickle: a few KiB of one are not inflated to many MiB.
    let bomb = empty_lists(8 << 20);
    let len = bomb.len() as u32;
    refused(foreign_zip(&[("x/data.pkl", 8, &deflated(&bomb), len)]), &["data.pkl", "more than"]);
    // Stored, it takes no more memory than its length earns.
    refused(archive(bomb, &[]), &["MiB of memory"]);
    // Marks count as well, though they are no objects; the same value again takes little.
    for opcode in [b'(', b'2', b'N'] {
        let mut bytes = b"\x80\x02N".to_vec();
        bytes.resize(3 << 20, opcode);
        bytes.push(b'.');
        let parsed = Pickle::parse(&bytes, &Limits::DEFAULT.with_bytes(16 << 20));
        let taken = parsed.map(|pickle| pickle.node_count());
        match opcode {
            b'(' => assert!(taken.unwrap_err().problem().contains("16 MiB of memory")),
            _ => assert!(taken.is_ok()),
        }
    }
    // Nor do keys: a container that holds itself is descended more than once.
    let mut cyclic = b"\x80\x02}(X\x01\x00\x00\x00x]q\x00(h\x00}".to_vec();
    cyclic.resize(cyclic.len() + 100_000, b'N');
    cyclic.extend(b"eu.");
    refused(archive(cyclic, &[]), &["too many to be listed"]);
}

#[test]
fn large_plain_data_is_read() {
    // 250 000 keys with numbers, as a table of a data loader has them.
    let pickle = pickle(|w| {
        w.dict(0..250_000, |w, n: usize| {
            w.str(&format!("document-{n:06}"));
            w.tuple(2, |w| {
                w.int(n as i64 + 1000);
                w.int(n as i64 + 70_000);
                Ok::<(), FormatError>(())
            })
        })
    });
    let found = metadata(&stored(archive(pickle, &[]))).unwrap();
    assert_eq!(found.len(), 250_000);
}

#[test]
fn sizes_that_lie_are_noticed() {
    let one = |numel, offset, len| {
        pickle(|w| {
            w.dict(["w"].into_iter(), |w, name| {
                w.constant(name);
                tensor(w, "0", numel, offset, len, 1)
            })
        })
    };
    refused(archive(one(4, 0, 4), &[&[0; 12]]), &["\"w\"", "12 bytes", "says 16"]);
    refused(archive(one(4, 1, 4), &[&[0; 16]]), &["\"w\"", "does not fit its storage"]);
    refused(archive(one(4, 0, 4), &[]), &["\"w\"", "\"0\" is missing"]);
    refused(archive(one(1 << 62, 0, 4), &[&[0; 16]]), &["\"w\""]);
    let file = archive(one(4, 0, 4), &[&[0; 16]]);
    let cut = &file[..file.len() - 40];
    refused(cut, &["it has no end record"]);
    // The directory's entry of the storage moved onto the pickle.
    let mut moved = file.to_vec();
    let name = b"archive/data/0";
    let entry = (0..moved.len() - 14).rev().find(|at| moved[*at..].starts_with(name)).unwrap();
    moved[entry - 4..entry].copy_from_slice(&[0; 4]);
    refused(moved, &["torch archive"]);
}

#[test]
fn what_is_no_checkpoint_is_refused_with_words() {
    let mut tar = vec![0; 1024];
    tar[257..262].copy_from_slice(b"ustar");
    refused(tar, &["tar file", "0.4"]);
    let script = [("x/data.pkl", 0, &b"\x80\x02}."[..], 4), ("x/constants.pkl", 0, b"", 0)];
    refused(foreign_zip(&script), &["TorchScript"]);
    refused("something else".to_owned(), &["neither"]);
    refused(Vec::new(), &["neither"]);
    refused(foreign_zip(&[("x/other", 0, b"", 0)]), &["data.pkl"]);
}

#[test]
fn containers_that_are_shared_or_nested_without_end() {
    // 60 levels of {a: x, b: x}: 2^60 leaves.
    let mut shared = b"\x80\x02}q\x00X\x01\x00\x00\x00lK\x01s".to_vec();
    for level in 1..60_u8 {
        shared.extend([b'}', b'q', level, b'(']);
        for name in *b"ab" {
            shared.extend([b'X', 1, 0, 0, 0, name, b'h', level - 1]);
        }
        shared.push(b'u');
    }
    shared.push(b'.');
    refused(archive(shared, &[]), &["shared too often"]);
    // A list of as many levels holds no tensor: one object, shown as far as it can be.
    let mut lists = b"\x80\x02]q\x000".to_vec();
    for level in 1..60_u8 {
        lists.extend([b']', b'q', level, b'(', b'h', level - 1, b'h', level - 1, b'e', b'0']);
    }
    lists.extend(b"}X\x01\x00\x00\x00lh\x3bs.");
    let loaded = load(&stored(archive(lists, &[]))).unwrap();
    assert!(matches!(&loaded.objects["l"], Value::Opaque(_)));
    refused(archive(&b"\x80\x02}q\x00X\x01\x00\x00\x00dh\x00s."[..], &[]), &["in itself"]);
    let mut deep = b"\x80\x02".to_vec();
    deep.extend(b"}X\x01\x00\x00\x00d".repeat(100_000));
    deep.push(b'N');
    deep.extend(b"s".repeat(100_000));
    deep.push(b'.');
    refused(archive(deep, &[]), &["512 deep"]);
    let mut tuples = b"\x80\x02}X\x01\x00\x00\x00tN".to_vec();
    tuples.extend(b"\x85".repeat(100_000));
    tuples.extend(b"s.");
    let loaded = load(&stored(archive(tuples, &[]))).unwrap();
    assert!(matches!(&loaded.objects["t"], Value::Opaque(_)));
}

#[test]
fn names_that_clash_are_named() {
    let clash = pickle(|w| {
        w.dict([0, 1].into_iter(), |w, n| {
            w.str(if n == 0 { "aa.bb" } else { "aa" });
            w.dict(0..n, |w, _| {
                w.str("bb");
                w.none();
                Ok::<(), FormatError>(())
            })?;
            if n == 0 {
                // The empty dict would vanish.
                w.build();
            }
            Ok::<(), FormatError>(())
        })
    });
    // State for a dict is no pickle that Python could load either.
    refused(archive(clash, &[]), &["a value without state"]);
    let clash = b"\x80\x02}(X\x03\x00\x00\x00a.bNX\x01\x00\x00\x00a}X\x01\x00\x00\x00bNsu.";
    let loaded = load(&stored(archive(&clash[..], &[]))).unwrap();
    assert_eq!(loaded.objects.keys().collect::<Vec<_>>(), ["[\"a\"][\"b\"]", "[\"a.b\"]"]);
    // A number and its text have one path.
    let clash = b"\x80\x02}(K\x01NX\x01\x00\x00\x001Nu.";
    refused(archive(&clash[..], &[]), &["two values are named \"1\""]);
    let twice = b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u.";
    let loaded = load(&stored(archive(&twice[..], &[]))).unwrap();
    assert!(loaded.objects["a"].same(&2.into()));
}

#[test]
fn a_type_of_a_later_pytorch_is_kept_as_an_object() {
    let pickle = pickle(|w| {
        w.dict(["t"].into_iter(), |w, name| {
            w.constant(name);
            w.global("torch._utils", "_rebuild_tensor_v3");
            w.tuple(7, |w| {
                w.storage(("torch.storage", "UntypedStorage"), "0", "cpu", 3);
                w.uint(0);
                w.uint_tuple(&[3]);
                w.uint_tuple(&[1]);
                w.bool(false);
                w.none();
                w.global("torch", "float7_new");
                Ok::<(), FormatError>(())
            })?;
            w.call();
            Ok::<(), FormatError>(())
        })
    });
    let loaded = load(&stored(archive(pickle, &[b"abc"]))).unwrap();
    let Value::Opaque(opaque) = &loaded.objects["t"] else { panic!() };
    assert!(opaque.encoded.windows(10).any(|window| window == b"float7_new"));
    assert!(opaque.encoded.windows(3).any(|window| window == b"abc"));
}

#[test]
fn tensors_that_repeat_elements_without_end_are_refused() {
    // Each of so many tensors repeats one element.
    let file = |count: usize, len: u64| {
        let pickle = pickle(|w| {
            w.dict(0..count, |w, n| {
                w.str(&format!("mask{n}"));
                tensor(w, "0", 1, 0, len, 0)
            })
        });
        stored(archive(pickle, &[&[0; 4]]))
    };
    for (count, len, key) in [(1, 1 << 40, "\"mask0\""), (40, 1 << 24, "\"mask16\"")] {
        let error = metadata(&file(count, len)).unwrap_err().to_string();
        for text in [key, "repeats", "4 bytes", "expand()", "file.pt"] {
            assert!(error.contains(text), "{text} is not in {error}");
        }
    }
    let loaded = load(&file(3, 1 << 20)).unwrap();
    assert_eq!(loaded.tensors["mask2"].to_vec().unwrap().len(), 4 << 20);
}

#[test]
fn repeated_elements_of_objects_take_no_memory() {
    // A tuple of a tensor with 2^40 elements, all of them the same one.
    let pickle = pickle(|w| {
        w.dict(["t"].into_iter(), |w, name| {
            w.constant(name);
            w.tuple(1, |w| tensor(w, "0", 1, 0, 1 << 40, 0))
        })
    });
    let loaded = load(&stored(archive(pickle, &[&[0; 4]]))).unwrap();
    assert!(matches!(&loaded.objects["t"], Value::Opaque(_)));
}

#[test]
fn many_objects_that_share_one_are_not_taken_apart_forever() {
    // 3000 keys, each a tuple of the same list of 3000 numbers.
    let mut bytes = b"\x80\x02}(X\x01\x00\x00\x00_]q\x00(".to_vec();
    bytes.extend(b"J\x00\x00\x01\x00".repeat(3000));
    bytes.push(b'e');
    for n in 0..3000_u32 {
        bytes.extend(b"X\x06\x00\x00\x00");
        bytes.extend(format!("k{n:05}").bytes());
        bytes.extend(b"h\x00\x85");
    }
    bytes.extend(b"u.");
    refused(archive(bytes, &[]), &["shared by too many"]);
}

#[test]
fn the_older_form_is_checked_as_well() {
    let file = std::fs::read(root().join("t215/legacy.pt")).unwrap();
    let loaded = load(&fixture("t215", "legacy.pt")).unwrap();
    assert_eq!(loaded.tensors["model.w"].dtype(), DType::Float32);
    refused(&file[..file.len() - 1], &["ends before", "cut short"]);
    refused(&file[..1400], &["bad "]);
    for (from, to, texts) in [
        // Another version, another count of elements, a storage listed twice.
        (&b"M\xe9\x03."[..], &b"M\xe8\x03."[..], &["unknown version"][..]),
        (b"\xc0\x13\0\0\0\0\0\0", b"\xc1\x13\0\0\0\0\0\0", &["5057 elements", "says 5056"]),
        (b"X\x0e\0\0\x0094810382579168", b"X\x0e\0\0\x0094810381680192", &[]),
    ] {
        let mut bad = file.clone();
        let starts: Vec<_> =
            (0..bad.len() - from.len()).filter(|at| bad[*at..].starts_with(from)).collect();
        for at in starts {
            bad[at..at + to.len()].copy_from_slice(to);
        }
        refused(bad, texts);
    }
}

#[test]
fn the_older_form_is_little_endian_whatever_it_says_of_the_machine() {
    let mut file = std::fs::read(root().join("t215/legacy.pt")).unwrap();
    let name = file.windows(13).position(|bytes| bytes == b"little_endian").unwrap();
    let flag = name + file[name..].iter().position(|byte| *byte == 0x88).unwrap();
    file[flag] = 0x89;
    let (flipped, real) =
        (load(&stored(file)).unwrap(), load(&fixture("t215", "legacy.pt")).unwrap());
    assert!(!real.tensors.is_empty());
    for (fqn, tensor) in &real.tensors {
        assert_eq!(flipped.tensors[fqn].to_vec().unwrap(), tensor.to_vec().unwrap(), "{fqn}");
    }
}

#[test]
fn only_headers_are_read_for_the_index() {
    use dcp_conformance::CountingStorage;
    use dcp_core::StorageReader as _;
    let items = 50_u64;
    let pickle = pickle(|w| {
        w.dict(0..items as usize, |w, n| {
            w.str(&format!("key{n}"));
            tensor(w, &n.to_string(), 1 << 16, 0, 1 << 16, 1)
        })
    });
    let storage = vec![0; 4 << 16];
    let all: Vec<&[u8]> = (0..items).map(|_| &storage[..]).collect();
    let counting = CountingStorage::new(stored(archive(pickle, &all)));
    let counted = std::sync::Arc::new(counting);
    let reader = dcp_formats::torch_save::TorchSaveReader::new(
        std::sync::Arc::clone(&counted) as _,
        crate::harness::key("file.pt"),
    );
    let found = crate::harness::block_on(reader.metadata()).unwrap();
    assert_eq!(found.len() as u64, items);
    let read = counted.counts().bytes_read;
    assert!(read < 100 << 10, "{read} bytes");
    drop(metadata(&fixture("t215", "zip.pt")));
}
