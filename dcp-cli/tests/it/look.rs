//! How it looks: help, trees and shard maps, held as files.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test -p dcp-cli` writes them again; review the difference.

use std::path::Path;

use dcp::DType;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};

use crate::support::{command, dcp, finish, path};

#[track_caller]
pub(crate) fn snapshot(name: &str, args: &[&str], columns: &str) {
    let output = command().args(args).env("COLUMNS", columns).output().unwrap();
    let run = finish(output);
    let text = format!("{}{}", run.stdout, run.stderr);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let held = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(text, held, "{name}: run with UPDATE_SNAPSHOTS=1 and review the difference");
    let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    if args.first() != Some(&"--help") {
        assert!(widest <= columns.parse().unwrap(), "{widest} columns");
    }
}

#[test]
fn help() {
    snapshot("help.txt", &["--help"], "100");
    snapshot("help_short.txt", &["-h"], "100");
    snapshot("help_inspect.txt", &["inspect", "--help"], "100");
    snapshot("help_convert.txt", &["convert", "--help"], "100");
    snapshot("help_average.txt", &["average", "--help"], "100");
    snapshot("help_merge.txt", &["merge", "--help"], "100");
}

#[test]
fn trees() {
    snapshot("tree_fsdp2_80.txt", &["inspect", "fsdp2_adam_2r"], "80");
    snapshot("tree_fsdp2_50.txt", &["inspect", "fsdp2_adam_2r", "--filter", "model.*"], "50");
    snapshot("tree_nested.txt", &["inspect", "nested"], "80");
    snapshot("tree_objects.txt", &["inspect", "objects"], "100");
    snapshot("tree_file_per_item.txt", &["inspect", "threads4_file_per_item"], "80");
}

/// A model of alike layers, but for the last.
fn layers(folder: &tempfile::TempDir) -> String {
    let tensor = |name: String, shape: &[u64]| SafetensorsItem {
        name: name.into(),
        dtype: DType::BFloat16,
        shape: shape.into(),
    };
    let mut items = vec![tensor("model.embed.weight".to_owned(), &[64, 8])];
    for layer in 0..12 {
        let rows = if layer < 11 { 8 } else { 16 };
        items.push(tensor(format!("model.layers.{layer}.mlp.up.weight"), &[rows, 8]));
        items.push(tensor(format!("model.layers.{layer}.norm.weight"), &[8]));
    }
    let encoded = encode_header(&items, &Default::default()).unwrap();
    let mut file = encoded.bytes.to_vec();
    file.resize(usize::try_from(encoded.byte_len).unwrap(), 0);
    let path = path(folder, "layers.safetensors");
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn layers_that_are_alike_are_shown_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = layers(&folder);
    let tree = dcp(["inspect", &file]).ok();
    let lines: Vec<&str> = tree.lines().map(str::trim_end).collect();
    let at = lines.iter().position(|line| line.contains("0…10 ×11")).unwrap();
    assert!(lines[at].ends_with("1.5 KiB"), "the bytes of all: {}", lines[at]);
    assert!(lines[at + 1].contains("mlp.up.weight") && lines[at + 1].contains("[8, 8]"));
    assert!(lines[at + 3].starts_with("│  └─ 11") || lines[at + 3].starts_with("   └─ 11"));
    let all = dcp(["inspect", &file, "--all"]).ok();
    assert_eq!(all.matches("mlp.up.weight").count(), 12);
}

#[test]
fn hostile_names_are_harmless() {
    let folder = tempfile::tempdir().unwrap();
    let item =
        |name: &str| SafetensorsItem { name: name.into(), dtype: DType::UInt8, shape: [0].into() };
    let deep = "a.".repeat(200_000) + "b";
    let items = [item(&deep), item("\x1b[2Jclear"), item(""), item("..")];
    let file = path(&folder, "names.safetensors");
    std::fs::write(&file, encode_header(&items, &Default::default()).unwrap().bytes).unwrap();
    let output = command().args(["inspect", &file]).env("COLUMNS", "80").output().unwrap();
    let tree = finish(output).ok();
    assert!(!tree.contains('\x1b') && tree.contains("\\u{1b}[2Jclear"), "{tree}");
    assert!(tree.lines().count() < 12, "{tree}");
    dcp(["get", &file, "\x1b[2Jcleer"]).fails(2, &["did you mean \"\\u{1b}[2Jclear\"?"]);
}

#[test]
fn many_chunks_are_still_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let (file, target) = (layers(&folder), path(&folder, "r32"));
    dcp(["reshard", &file, &target, "--ranks", "32"]).ok();
    let map = dcp(["inspect", &target, "--shards", "model.embed.weight"]).ok();
    assert!(map.contains("│          AF           │"), "{map}");
}

#[test]
fn shard_maps() {
    let shards = |name: &str, fixture: &str, fqn: &str| {
        snapshot(name, &["inspect", fixture, "--shards", fqn], "80");
    };
    shards("shards_rows.txt", "fsdp2_adam_2r", "model.embed.weight");
    shards("shards_line.txt", "dtensor_uneven_4r", "vec5");
    shards("shards_grid.txt", "tp_fsdp_2x2", "model.layers.1.weight");
    shards("shards_middle_axis.txt", "dtensor_uneven_4r", "d3_mid");
    shards("shards_many.txt", "sharded_tensor_raw_4r", "st_multi");
    shards("shards_scalar.txt", "empty_zero", "scalar_f32");
    shards("shards_nothing.txt", "dtensor_uneven_4r", "zero_other");
}

#[test]
fn verification() {
    snapshot("verify_ok.txt", &["verify", "fsdp2_adam_2r", "--deep"], "80");
}

#[test]
fn color_only_where_it_is_wanted() {
    let inspect = |color: &str| dcp(["inspect", "zstd_2r", "--color", color]).ok();
    assert!(!inspect("auto").contains('\x1b'), "no terminal, no color");
    assert!(!inspect("never").contains('\x1b'));
    let colored = inspect("always");
    assert!(colored.contains("\x1b[1m"));
    // Without its color it is the same text.
    let mut plain = String::new();
    let mut rest = colored.as_str();
    while let Some((text, code)) = rest.split_once('\x1b') {
        plain.push_str(text);
        rest = code.split_once('m').unwrap().1;
    }
    plain.push_str(rest);
    let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
    assert_eq!(trimmed(&plain), trimmed(&inspect("never")));
}

#[test]
fn help_is_a_command_too() {
    assert_eq!(dcp(["help"]).ok(), dcp(["--help"]).ok());
    for name in ["convert", "ls", "help", "completions"] {
        assert_eq!(dcp(["help", name]).ok(), dcp([name, "--help"]).ok(), "{name}");
    }
    dcp(["help", "konvert"]).fails(2, &["there is no command \"konvert\"", "dcp help"]);
}

#[test]
fn shells_get_completions() {
    for (shell, mark) in [("bash", "_dcp()"), ("zsh", "#compdef dcp"), ("fish", "complete -c dcp")]
    {
        let script = dcp(["completions", shell]).ok();
        assert!(script.contains(mark) && script.contains("reshard"), "{shell}");
    }
}
