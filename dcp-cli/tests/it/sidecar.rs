//! What commands do with the sidecar of a save.

use std::fs;
use std::path::Path;

use dcp::formats::dcp::{DcpWriter, Sidecar};
use dcp::{Checkpointer, DType, StateDict, Tensor};
use serde_json::json;

use crate::support::{dcp, path};

/// A save whose sidecar has step, parent step and mesh.
fn saved(place: &str, step: u64) {
    let elements: Vec<u8> = (0..32_u8).map(|at| at + step as u8).collect();
    let mut state = StateDict::new();
    state.insert("weight", Tensor::replicated(DType::UInt8, [8, 4], elements).unwrap());
    state.insert("step", step);
    let checkpointer = Checkpointer::new().writer(move |storage| {
        DcpWriter::builder(storage)
            .steps(step, Some(step - 10))
            .mesh([("dp", 2), ("tp", 4)])
            .build()
    });
    checkpointer.save(&state, place).blocking().unwrap();
}

/// The file of the sidecar, and its content.
fn sidecar(place: &str) -> (String, Sidecar) {
    let names = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names = names.map(|name| name.into_string().unwrap());
    let name = names.find(|name| name.ends_with(".cbor")).unwrap();
    let read = |name: &str| fs::read(Path::new(place).join(name)).unwrap();
    let index: u32 = u32::from_str_radix(&name[".dcp-".len()..][..8], 16).unwrap();
    let sidecar = Sidecar::decode(&read(&name), index).unwrap();
    (name, sidecar)
}

/// The line of `dcp inspect` about the sidecar, which follows the name and the summary.
fn shown(place: &str) -> String {
    let tree = dcp(["inspect", place]).ok();
    tree.lines().nth(2).unwrap().to_owned()
}

#[test]
fn inspect_shows_what_the_save_noted() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(&folder, "source");
    saved(&source, 20);
    let tool = concat!("dcp-formats ", env!("CARGO_PKG_VERSION"));
    let noted = "1 rank (dp=2 tp=4) · step 20 after 10 · CRC-32 of 2 items";
    assert_eq!(shown(&source), format!("sidecar of {tool} · {noted}"));
    let json = dcp(["inspect", &source, "--json"]).json();
    let expected = json!({
        "state": "found", "tool": tool, "world_size": 1, "mesh": {"dp": 2, "tp": 4}, "step": 20,
        "parent_step": 10, "checksums": {"covered": 2, "of": 2}, "digests": {"covered": 0, "of": 1},
    });
    assert_eq!(json["sidecar"], expected);

    let file = Path::new(&source).join(sidecar(&source).0);
    fs::write(&file, "no sidecar").unwrap();
    assert!(shown(&source).starts_with("sidecar cannot be read: "), "{}", shown(&source));
    assert_eq!(dcp(["inspect", &source, "--json"]).json()["sidecar"]["state"], "damaged");
    fs::remove_file(&file).unwrap();
    assert_eq!(shown(&source), "no sidecar of dcp");
    let absent = dcp(["inspect", &source, "--json"]).json();
    assert_eq!(absent["sidecar"], json!({"state": "absent"}));
}

/// Checksums are counted of what is shown, not of the objects that an index of some keys has too.
#[test]
fn inspect_counts_the_checksums_of_what_it_shows() {
    let folder = tempfile::tempdir().unwrap();
    let source = path(&folder, "source");
    saved(&source, 20);
    for (filter, items, files) in [("weight", 1, 1), ("st*", 1, 1), ("*", 2, 1), ("none", 0, 0)] {
        let json = dcp(["inspect", &source, "--json", "--filter", filter]).json();
        let covered = (&json["sidecar"]["checksums"], &json["sidecar"]["digests"]);
        let expected =
            (&json!({"covered": items, "of": items}), &json!({"covered": 0, "of": files}));
        assert_eq!(covered, expected, "{filter}");
    }
    let tree = dcp(["inspect", &source, "--filter", "weight"]).ok();
    assert!(tree.contains("CRC-32 of 1 item"), "{tree}");
    dcp(["convert", &source, &path(&folder, "two"), "--to", "dcp", "--ranks", "2"]).ok();
    let args = ["inspect", &path(&folder, "two"), "--json", "--filter", "step"];
    let sidecar = &dcp(args).json()["sidecar"];
    assert_eq!((&sidecar["checksums"]["of"], &sidecar["digests"]["of"]), (&json!(1), &json!(1)));
}

/// The formats without sidecars say nothing of one.
#[test]
fn inspect_names_no_sidecar_where_a_format_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let [source, file] = ["source", "weights.safetensors"].map(|name| path(&folder, name));
    saved(&source, 20);
    dcp(["convert", &source, &file]).ok();
    assert!(!dcp(["inspect", &file]).ok().contains("sidecar"));
    assert!(dcp(["inspect", &file, "--json"]).json().get("sidecar").is_none());
}

#[test]
fn a_copy_keeps_what_the_save_noted() {
    let folder = tempfile::tempdir().unwrap();
    let (source, copy) = (path(&folder, "source"), path(&folder, "copy"));
    saved(&source, 20);
    dcp(["copy", &source, &copy]).ok();
    let (name, noted) = sidecar(&copy);
    assert_eq!((name, noted.clone()), sidecar(&source));
    assert_eq!((noted.step, noted.parent_step, noted.mesh.len()), (Some(20), Some(10), 2));
    assert_eq!(noted.files[0].chunks.len(), 2);
    dcp(["verify", &copy, "--deep"]).ok();
}

/// The ranks and the step of the save are not those of the conversion.
#[test]
fn a_conversion_notes_its_own_files_and_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let (source, converted) = (path(&folder, "source"), path(&folder, "converted"));
    saved(&source, 20);
    dcp(["convert", &source, &converted, "--to", "dcp", "--ranks", "2"]).ok();
    let (name, noted) = sidecar(&converted);
    assert_ne!(name, sidecar(&source).0);
    assert_eq!((noted.step, noted.parent_step, noted.mesh.len()), (None, None, 0));
    assert_eq!((noted.world_size, noted.files.len()), (2, 2));
    assert_eq!(noted.files.iter().map(|file| file.chunks.len()).sum::<usize>(), 3);
    dcp(["verify", &converted, "--deep"]).ok();
}

#[test]
fn an_object_of_another_save_is_named_by_verify_and_refused_by_a_conversion() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| path(&folder, name));
    saved(&one, 20);
    saved(&other, 30);
    // The objects precede the tensor: what follows stays that of the save.
    let file = |place: &str| Path::new(place).join("__0_0.distcp");
    let (mut bytes, others) = (fs::read(file(&one)).unwrap(), fs::read(file(&other)).unwrap());
    let index = dcp(["inspect", &one, "--json"]).json();
    assert_eq!(index["keys"].as_object().unwrap().len(), 2);
    let tensor = bytes.windows(32).position(|window| window == (20..52).collect::<Vec<u8>>());
    let end = tensor.unwrap() - 704;
    bytes[..end].copy_from_slice(&others[..end]);
    fs::write(file(&one), bytes).unwrap();
    dcp(["verify", &one]).ok();
    let wrong = |text: &str| text.contains("step") && text.contains("not the bytes of this save");
    let verified = dcp(["verify", &one, "--deep"]);
    assert!(verified.code == 1 && wrong(&verified.stdout), "{}", verified.stdout);
    let target = path(&folder, "converted");
    let converted = dcp(["convert", &one, &target, "--to", "dcp"]);
    assert!(converted.code != 0 && wrong(&converted.stderr), "{}", converted.stderr);
}
