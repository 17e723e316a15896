//! `reshard`: other ranks, the same contents.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use dcp::DType;
use dcp::core::StorageReader;
use dcp::core::metadata::{Entry, Placement};
use dcp::core::registry::Access;
use dcp::core::storage::StorageExt;
use dcp::formats::dcp::DcpReader;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};
use serde_json::Value;

use crate::support::{assert_same_tensors, dcp, fixtures, path, tensors};

const FIXTURES: [&str; 8] = [
    "all_dtypes",
    "dtensor_uneven_4r",
    "empty_zero",
    "nested",
    "objects",
    "t21_plain",
    "tp_fsdp_2x2",
    "views",
];

/// The stored bytes of every object.
fn objects(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let uri = folder.display().to_string();
    dcp_testing::block_on(async {
        let storage = dcp::default_storages().open(&uri, Access::Read).await.unwrap();
        let reader = DcpReader::new(Arc::clone(&storage));
        let metadata = reader.metadata().await.unwrap();
        let mut all = BTreeMap::new();
        for (fqn, entry) in metadata.iter() {
            let Entry::Object(object) = entry else { continue };
            let Placement { file, byte_offset, byte_len, .. } = object.placement.unwrap();
            let key = metadata.file(file).unwrap();
            let bytes = storage.read_range(key, byte_offset..byte_offset + byte_len).await.unwrap();
            all.insert(fqn.to_string(), bytes.to_vec());
        }
        all
    })
}

#[test]
fn contents_stay_whatever_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in FIXTURES {
        for ranks in ["1", "3", "8"] {
            let target = path(&folder, &format!("{fixture}_{ranks}"));
            let file = format!("{target}.safetensors");
            dcp(["reshard", fixture, &target, "--ranks", ranks]).ok();
            dcp(["verify", &target, "--deep"]).ok();
            dcp(["convert", &target, &file, "--to", "safetensors"]).ok();
            let mut found = tensors(file.as_ref());
            for (name, tensor) in &mut found {
                let wanted = crate::support::expected(fixture)["tensors"][name].clone();
                if wanted["encoding"] != "native" {
                    tensor.0 = "uint8".to_owned();
                }
            }
            assert_same_tensors(&found, fixture);
            let kept = objects(target.as_ref());
            assert!(kept == objects(&fixtures().join(fixture)), "objects of {fixture}");
        }
    }
}

#[test]
fn compressed_contents_stay_and_take_less_room() {
    let folder = tempfile::tempdir().unwrap();
    let plain = path(&folder, "plain");
    let plain = dcp(["reshard", "fsdp2_adam_2r", &plain, "--ranks", "2", "--json"]).json();
    let file = path(&folder, "x.safetensors");
    for (name, level) in [("usual", "zstd"), ("smallest", "zstd:19")] {
        let target = path(&folder, name);
        let args = ["reshard", "fsdp2_adam_2r", &target, "--ranks", "2", "--compress", level];
        let report = dcp([&args[..], &["--json"]].concat()).json();
        let bytes = |report: &Value| report["bytes"].as_u64().unwrap();
        assert!(bytes(&report) * 2 < bytes(&plain), "{report} {plain}");
        dcp(["verify", &target, "--deep"]).ok();
        dcp(["convert", &target, &file, "--to", "safetensors", "--overwrite"]).ok();
        assert_same_tensors(&tensors(file.as_ref()), "fsdp2_adam_2r");
        // Of compressed data, a copy is not compressed.
        let again = path(&folder, &format!("{name}_again"));
        let report = dcp(["convert", &target, &again, "--to", "dcp", "--json"]).json();
        assert!(bytes(&report) * 2 > bytes(&plain));
    }
}

#[test]
fn what_cannot_be_compressed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, format) in [("a.safetensors", "safetensors"), ("b.pt", "torch-save"), ("c", "hf")] {
        let target = path(&folder, name);
        let args = ["convert", "t21_plain", &target, "--to", format, "--compress", "zstd"];
        dcp(args)
            .fails(2, &["--compress is for dcp and formats that compress", "hint: leave it out"]);
        assert!(!Path::new(&target).exists());
    }
    let target = path(&folder, "d");
    for level in ["zstd:0", "zstd:23", "gzip"] {
        let args = ["reshard", "t21_plain", &target, "-n", "1", "--compress", level];
        dcp(args).fails(2, &["--compress <METHOD>", "zstd"]);
    }
}

#[test]
fn tensors_are_cut_along_their_first_axis() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "r4");
    let report = dcp(["reshard", "fsdp2_adam_2r", &target, "-n", "4", "--json"]).json();
    assert_eq!(report["tensors"], 39);
    assert_eq!(report["objects"], 17);
    assert_eq!(report["files"].as_object().unwrap().len(), 4);
    let found = dcp(["inspect", &target, "--json"]).json();
    let rows = |name: &str| -> Vec<Value> {
        let chunks = found["keys"][name]["chunks"].as_array().unwrap();
        chunks.iter().map(|chunk| chunk["sizes"][0].clone()).collect()
    };
    assert_eq!(rows("model.embed.weight"), [3, 3, 3, 1]);
    assert_eq!(rows("model.norm.bias"), [2, 2, 2, 2]);
    let files = found["files"].as_object().unwrap();
    let names: Vec<_> = files.keys().collect();
    assert_eq!(names, ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]);
}

/// An index has a row for each chunk, and none for what a rank does not hold.
#[test]
fn many_ranks_are_planned_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let item = |name: String, rows: u64| SafetensorsItem {
        name: name.into(),
        dtype: DType::UInt8,
        shape: [rows].as_slice().into(),
    };
    let file = |name: &str, items: &[SafetensorsItem]| {
        let header = encode_header(items, &Default::default()).unwrap();
        let mut out = fs::File::create(at(name)).unwrap();
        out.write_all(&header.bytes).unwrap();
        out.set_len(header.byte_len).unwrap();
    };
    let large: Vec<_> = (0..300).map(|n| item(format!("w{n}"), 4000)).collect();
    file("large.safetensors", &large);
    let few: Vec<_> = (0..3000).map(|n| item(format!("w{n}"), 7)).collect();
    file("few.safetensors", &few);
    let reshard = |name: &str, more: &[&str]| {
        let (from, to) = (at(name), at("out"));
        let args = ["-q", "convert", &from, &to, "--to=dcp", "--overwrite"];
        dcp(args.iter().chain(more).copied())
    };
    reshard("large.safetensors", &["--ranks=4000", "--max-memory=1MiB"])
        .fails(2, &["1200000 chunks, as 4000 ranks write it", "1048576 chunks", "fewer ranks"]);
    assert!(!folder.path().join("out").exists());
    reshard("large.safetensors", &["--ranks=4000", "--dry-run"]).ok();
    reshard("few.safetensors", &["--ranks=5"]).ok();
    let report = dcp(["inspect", &at("out"), "--json"]).json();
    let chunks = report["keys"]["w0"]["chunks"].as_array().unwrap();
    let sizes: Vec<_> = chunks.iter().map(|chunk| chunk["sizes"][0].as_u64().unwrap()).collect();
    assert_eq!(sizes, [2, 2, 2, 1]);
}

#[test]
fn the_same_checkpoint_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (path(&folder, "a"), path(&folder, "b"));
    for target in [&a, &b] {
        dcp(["reshard", "tp_fsdp_2x2", target, "--ranks", "2"]).ok();
    }
    for name in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        let read = |folder: &str| fs::read(Path::new(folder).join(name)).unwrap();
        assert!(read(&a) == read(&b), "{name} differs");
    }
}

#[test]
fn a_checkpoint_is_replaced_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "x");
    dcp(["reshard", "tp_fsdp_2x2", &target, "--ranks", "2"]).ok();
    dcp(["reshard", "zstd_2r", &target, "--ranks", "1"]).fails(2, &["exists already", "hint:"]);
    assert_eq!(dcp(["inspect", &target, "--json"]).json()["files"].as_object().unwrap().len(), 2);
    dcp(["reshard", "zstd_2r", &target, "--ranks", "1", "--overwrite"]).ok();
    let found = dcp(["inspect", &target, "--json"]).json();
    assert_eq!(found["keys"].as_object().unwrap().len(), 3);
    dcp(["verify", &target, "--deep"]).ok();
}
