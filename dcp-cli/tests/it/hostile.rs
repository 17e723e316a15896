//! Files that claim more than they are: what shares memory stays shared, and nothing that is made
//! of a file is out of proportion to it.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use dcp::DType;
use dcp::formats::pickle::Writer;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};
use dcp::formats::torch_zip::{ArchiveEncoder, RecordSet};

use crate::memory::{outcome, outcome_into};
use crate::support::{dcp, path};

type Written = Result<(), dcp::core::FormatError>;

const MIB: usize = 1 << 20;
/// References in a list, and names: each a MiB where it is written out.
const LIST: i32 = 2_000;
const NAMES: i32 = 600;

fn save(file: &Path, write: impl FnOnce(&mut Writer) -> Written) {
    let mut writer = Writer::new();
    write(&mut writer).unwrap();
    let pickle = writer.finish().unwrap();
    let archive = ArchiveEncoder::encode(RecordSet::default(), pickle, &[]).unwrap();
    fs::write(file, archive).unwrap();
}

fn long() -> Arc<str> {
    "x".repeat(MIB).into()
}

/// Files of little more than a MiB that refer to one text again and again: in a list, under many
/// names, as bytes, as a key, in objects of a class.
fn sharing(folder: &Path) -> Vec<String> {
    let text = long();
    let each = |name: &str, write: &dyn Fn(&mut Writer) -> Written| {
        let file = folder.join(format!("{name}.pt"));
        save(&file, write);
        assert!(fs::metadata(&file).unwrap().len() < 3 * MIB as u64, "{name}");
        file.display().to_string()
    };
    let shared = |writer: &mut Writer| {
        writer.shared_str(&text);
        Ok(())
    };
    vec![
        each("list", &|writer| writer.list(0..LIST, |writer, _| shared(writer))),
        each("names", &|writer| {
            writer.dict(0..NAMES, |writer, n| {
                writer.str(&format!("n{n}"));
                shared(writer)
            })
        }),
        each("objects", &|writer| {
            writer.dict(0..NAMES, |writer, n| {
                writer.str(&format!("n{n}"));
                writer.global("argparse", "Namespace");
                writer.empty_tuple();
                writer.new_object();
                writer.dict(0..1, |writer, _| {
                    writer.constant("a");
                    shared(writer)
                })?;
                writer.build();
                Ok(())
            })
        }),
        each("keys", &|writer| {
            writer.list(0..NAMES, |writer, n| {
                writer.tuple(1, |writer| {
                    writer.dict(0..1, |writer, _| {
                        shared(writer)?;
                        writer.int(i64::from(n));
                        Ok::<_, dcp::core::FormatError>(())
                    })
                })
            })
        }),
        each("bytes", &|writer| {
            let bytes = bytes_of(&text);
            writer.list(0..LIST, |writer, _| {
                writer.shared_bytes(&bytes);
                Ok(())
            })
        }),
    ]
}

fn bytes_of(text: &Arc<str>) -> bytes::Bytes {
    text.as_bytes().to_vec().into()
}

#[test]
fn what_shares_memory_is_not_made_anew_wherever_it_is_shown_or_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| path(&folder, name);
    for file in sharing(folder.path()) {
        let (html, dcp_folder, again, st) =
            (out("out.html"), out("dcp"), out("again.pt"), out("m.safetensors"));
        let commands: [&[&str]; 10] = [
            &["inspect", &file],
            &["inspect", &file, "--json"],
            &["report", &file, "-o", &html, "--overwrite"],
            &["stats", &file, "--json"],
            &["diff", &file, &file, "--json"],
            &["get", &file, "value"],
            &["verify", &file, "--deep"],
            &["convert", &file, &dcp_folder, "--to", "dcp", "--overwrite"],
            &["convert", &file, &again, "--to", "torch-save", "--overwrite"],
            &["convert", &file, &st, "--to", "safetensors", "--overwrite"],
        ];
        for args in commands {
            let said = out("said");
            let stdout = fs::File::create(&said).unwrap();
            let (code, peak) = outcome_into(args, stdout);
            assert!(matches!(code.code(), Some(0..=2)), "{args:?}: {code}");
            assert!(peak < 384 * MIB as u64, "{args:?}: {} MiB", peak >> 20);
            let said = fs::metadata(&said).unwrap().len();
            assert!(said < 64 * MIB as u64, "{args:?}: {} MiB", said >> 20);
        }
        let written = fs::metadata(&html).unwrap().len();
        assert!(written < 64 * MIB as u64, "{file}: a page of {written} bytes");
        let _ = fs::remove_dir_all(&dcp_folder);
    }
}

#[test]
fn what_is_cut_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = sharing(folder.path()).remove(0);
    let value = dcp(["inspect", &file, "--json"]).json()["keys"]["value"]["value"].clone();
    let items = value.as_array().unwrap();
    assert_eq!(items.len(), LIST as usize);
    assert_eq!(items[0].as_str().unwrap().len(), MIB);
    let cut = serde_json::json!({ "type": "truncated", "kind": "str", "bytes": MIB });
    assert_eq!(items[LIST as usize - 1], cut);
    assert!(dcp(["get", &file, "value"]).ok().ends_with("…, …]\n"));
}

/// A tensor of a header: name, dtype and shape.
type Claim<'a> = (&'a str, DType, &'a [u64]);

/// Of a file of a few hundred bytes, whatever shapes its header claims, nothing large is made: what
/// it does not have is refused, and what has no elements needs none.
#[test]
fn a_header_that_claims_a_large_shape_claims_no_memory() {
    const LARGE: u64 = 1 << 30;
    let (weight, scales, bytes) = (DType::Float8E4M3Fn, DType::Float32, DType::UInt8);
    let claims: [(&[Claim], i32); 7] = [
        (&[("w", weight, &[LARGE, 4]), ("w_scale_inv", scales, &[LARGE / 4, 1])], 1),
        (&[("w", weight, &[4, LARGE]), ("w_scale_inv", scales, &[1, LARGE / 4])], 1),
        (&[("w_blocks", bytes, &[1, LARGE]), ("w_scales", bytes, &[1])], 1),
        (&[("w_blocks", bytes, &[LARGE, 16]), ("w_scales", bytes, &[LARGE])], 1),
        (&[("w", weight, &[LARGE, 0]), ("w_scale_inv", scales, &[LARGE / 4, 0])], 0),
        (&[("w", weight, &[LARGE, 0, 4]), ("w_scale_inv", scales, &[LARGE, 0, 1])], 0),
        (&[("w_blocks", bytes, &[LARGE, 0, 1, 16]), ("w_scales", bytes, &[LARGE, 0, 1])], 0),
    ];
    for (tensors, code) in claims {
        let folder = tempfile::tempdir().unwrap();
        let item = |(name, dtype, shape): &Claim| SafetensorsItem {
            name: (*name).into(),
            dtype: *dtype,
            shape: (*shape).into(),
        };
        let items: Vec<_> = tensors.iter().map(item).collect();
        let header = encode_header(&items, &Default::default()).unwrap();
        let source = folder.path().join("model");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("model.safetensors"), &header.bytes).unwrap();
        fs::write(source.join("config.json"), "{}").unwrap();
        let source = source.display().to_string();
        for (to, target) in [("hf", "hf"), ("safetensors", "a.safetensors"), ("dcp", "dcp")] {
            let target = path(&folder, target);
            let dequantize = ["--dequantize", "bf16", "--block-size", "4x4", "--quiet"];
            let args = [&["convert", &source, &target, "--to", to], &dequantize[..]].concat();
            let (status, peak) = outcome(&args);
            assert_eq!(status.code(), Some(code), "{tensors:?} {to}");
            assert!(peak < 96 * MIB as u64, "{tensors:?} {to}: {} MiB", peak >> 20);
        }
    }
}
