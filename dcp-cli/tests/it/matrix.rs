//! Every command on every format, and the table in README.md that says so.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::{dcp, fixtures, path, tensors};

/// A checkpoint of each format; the header of its column.
const FORMATS: [(&str, &str); 9] = [
    ("PyTorch DCP", "pytorch/fsdp2_adam_2r"),
    ("OLMo-core", "olmo/fsdp2-2rank-nested/ckpt"),
    ("torch.save", "torch_save/t215/zip.pt"),
    ("torch.save before 1.6", "torch_save/t215/legacy.pt"),
    ("safetensors", "pytorch/fsdp2_adam_2r/expected.safetensors"),
    ("Hugging Face", "hf/consolidated_index_4r/ckpt"),
    ("Megatron torch_dist", "megatron/gpt_tp2pp2_swiglu/ckpt"),
    ("Megatron zarr", "megatron/v09_zarr/ckpt"),
    ("Megatron mp_rank", "megatron/run_legacy_torch_tp2"),
];

/// The table's rows: what is run. `SRC` is the checkpoint, `OUT` a place that is free, `RANKS` a
/// layout that the format can have.
const ROWS: &[(&str, &[&str])] = &[
    ("`inspect`", &["inspect", "SRC", "--json"]),
    ("`verify --deep`", &["verify", "SRC", "--deep", "--json"]),
    ("`get`", &["get", "SRC", "KEY", "--json"]),
    ("`stats`", &["stats", "SRC", "--json"]),
    ("`diff`", &["diff", "SRC", "SRC", "--json"]),
    ("`report`", &["report", "SRC", "-o", "OUT.html"]),
    ("`convert --to safetensors`", &["convert", "SRC", "OUT", "--to=safetensors", "--json"]),
    (
        "`convert --to hf`",
        &["convert", "SRC", "OUT", "--to=hf", "--everything", "--arch=none", "--json"],
    ),
    ("`convert --to torch-save`", &["convert", "SRC", "OUT", "--to=torch-save", "--json"]),
    (
        "`convert --to torch-save --legacy`",
        &["convert", "SRC", "OUT", "--to=torch-save", "--legacy"],
    ),
    ("`convert --to dcp`", &["convert", "SRC", "OUT", "--to=dcp", "--json"]),
    ("`convert --to torch-dist`", &["convert", "SRC", "OUT", "--to=torch-dist", "--json"]),
    ("`reshard`", &["reshard", "SRC", "OUT", "RANKS", "--json"]),
    ("`average`", &["average", "SRC", "SRC", "--out", "OUT", "--to=safetensors", "--json"]),
    ("`merge`", &["merge", "SRC", "--out", "OUT", "--to=safetensors", "--json"]),
];

type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

/// All tensors of a checkpoint of any format.
fn all_tensors(uri: &str, folder: &tempfile::TempDir) -> Tensors {
    let file = path(folder, "compared.safetensors");
    dcp(["-q", "convert", uri, &file, "--everything", "--overwrite"]).ok();
    let mut all = tensors(file.as_ref());
    // A file of torch.save shows the tensors in an object as tensors.
    all.retain(|name, _| !name.contains("/shard_") && !name.starts_with("common_state"));
    all
}

#[test]
fn every_command_works_on_every_format() {
    for (format, source) in FORMATS {
        let source = fixtures().join("..").join(source).display().to_string();
        let folder = tempfile::tempdir().unwrap();
        let wanted = all_tensors(&source, &folder);
        assert!(!wanted.is_empty(), "{format}");
        let key = wanted.keys().next().unwrap();
        for (row, args) in ROWS {
            let target = path(&folder, "out");
            let fill = |arg: &&str| {
                let ranks = if format.starts_with("Megatron") { "--tp=1" } else { "--ranks=3" };
                let arg = arg.replace("SRC", &source).replace("OUT", &target);
                arg.replace("KEY", key).replace("RANKS", ranks)
            };
            let run = dcp(args.iter().map(fill));
            assert_eq!(run.code, 0, "{row} of {format}: {}", run.stderr);
            if Path::new(&target).exists() {
                assert_eq!(all_tensors(&target, &folder), wanted, "{row} of {format}");
                fs::remove_file(&target).or_else(|_| fs::remove_dir_all(&target)).unwrap();
            }
        }
    }
}

#[test]
fn the_book_has_the_table_of_what_is_tested() {
    let columns: Vec<_> = FORMATS.iter().map(|(format, _)| *format).collect();
    let mut table = format!("| | {} |\n|---|", columns.join(" | "));
    table.push_str(&":-:|".repeat(FORMATS.len()));
    table.push('\n');
    for (row, _) in ROWS {
        table.push_str(&format!("| {row} |{}\n", " ✓ |".repeat(FORMATS.len())));
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/command.md");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains(&table), "docs/reference/command.md should have this table:\n{table}");
}
