//! Files of `torch.save` on the command line.

use std::fs;

use serde_json::json;

use crate::support::{dcp, path, tensors};

const ZIP: &str = "../torch_save/kinds/zip.pt";

#[test]
fn a_file_is_told_by_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let renamed = path(&folder, "model.safetensors");
    for name in ["kinds/zip.pt", "kinds/legacy.pt", "t21/zip.pt", "t215/legacy.pt"] {
        fs::copy(crate::support::fixtures().join("../torch_save").join(name), &renamed).unwrap();
        let shown = dcp(["inspect", &renamed, "--json"]).json();
        assert_eq!(shown["format"], "torch_save", "{name}");
        let text = dcp(["inspect", &renamed]).ok();
        assert!(text.contains("torch_save") || text.contains("torch.save"), "{text}");
    }
}

#[test]
fn the_older_form_is_read_in_every_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let file = |protocol: u8| format!("../torch_save/protocols/legacy{protocol}.pt");
    for protocol in [1, 3, 4, 5] {
        dcp(["verify", &file(protocol), "--deep"]).ok();
        dcp(["diff", &file(2), &file(protocol)]).ok();
        let copy = path(&folder, &format!("{protocol}.pt"));
        dcp(["convert", &file(protocol), &copy]).ok();
        dcp(["diff", &file(2), &copy]).ok();
        // In a folder, where the content shows which files are of torch.save.
        let model = folder.path().join(format!("model{protocol}"));
        fs::create_dir(&model).unwrap();
        let source = crate::support::fixtures().join(file(protocol));
        fs::copy(source, model.join("pytorch_model.bin")).unwrap();
        dcp(["diff", &file(2), &model.display().to_string()]).ok();
    }
}

#[test]
fn everything_in_a_file_is_shown_and_can_be_taken_out() {
    let shown = dcp(["inspect", ZIP, "--json"]).json();
    let keys = &shown["keys"];
    assert_eq!(keys["views.t"]["shape"], json!([6, 4]));
    assert_eq!(keys["args"]["value"]["type"], "__main__.TrainArgs");
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "t.npy");
    dcp(["get", ZIP, "views.t", "-o", &out]).ok();
    assert_eq!(fs::read(&out).unwrap().len(), 128 + 96);
    dcp(["verify", ZIP, "--deep"]).ok();
    dcp(["verify", "../torch_save/kinds/legacy.pt", "--deep"]).ok();
}

#[test]
fn a_flipped_byte_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "model.pt");
    let mut bytes = fs::read(crate::support::fixtures().join(ZIP)).unwrap();
    let shown = dcp(["inspect", ZIP, "--json"]).json();
    let chunk = &shown["keys"]["tied.b"]["chunks"][0];
    bytes[chunk["byte_offset"].as_u64().unwrap() as usize + 5] ^= 4;
    fs::write(&file, bytes).unwrap();
    let run = dcp(["verify", &file, "--deep"]);
    assert_eq!(run.code, 1);
    for text in ["tied.a", "\"tied.b\", \"tied.c\" share it", "model.pt", "CRC-32"] {
        assert!(run.stdout.contains(text), "{text}: {}{}", run.stdout, run.stderr);
    }
    dcp(["get", &file, "tied.b"]).fails(1, &["CRC-32", "tied.b", "model.pt"]);
}

#[test]
fn a_file_becomes_a_sharded_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["zip.pt", "legacy.pt"] {
        let (file, out) = (format!("../torch_save/kinds/{name}"), path(&folder, name));
        // It holds instances of the classes of the script that wrote it.
        dcp(["reshard", &file, "--ranks", "2", &out]).fails(1, &["__main__.TrainArgs"]);
        let own = ["--allow-callable", "__main__"];
        dcp(["reshard", &file, "--ranks", "2", &out].iter().chain(&own)).ok();
        let (before, after) =
            (dcp(["inspect", &file, "--json"]).json(), dcp(["inspect", &out, "--json"]).json());
        let keys = |shown: &serde_json::Value| {
            let keys = shown["keys"].as_object().unwrap();
            let mut keys: Vec<_> = keys
                .iter()
                .map(|(key, shown)| (key.clone(), shown["shape"].clone(), shown["value"].clone()))
                .collect();
            keys.sort_by(|a, b| a.0.cmp(&b.0));
            keys
        };
        assert_eq!(keys(&before), keys(&after), "{name}");
        dcp(["verify", &out, "--deep"]).ok();
    }
}

#[test]
fn the_old_stream_takes_every_type() {
    let folder = tempfile::tempdir().unwrap();
    let (zip, old) = (path(&folder, "zip.pt"), path(&folder, "old.pt"));
    dcp(["convert", "all_dtypes", &zip]).ok();
    dcp(["convert", "all_dtypes", &old, "--legacy"]).ok();
    dcp(["diff", &zip, &old]).ok();
    let head = fs::read(&old).unwrap();
    assert!(head.starts_with(b"\x80\x02\x8a\x0a"));
}

/// torchao's quantized tensors are several tensors each, which DCP lists as one.
#[test]
fn tensors_of_classes_of_their_own_are_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let one = "../torch_save/subclasses/one";
    let class = "torchao.quantization.Int8Tensor";
    let shown = dcp(["inspect", one, "--json"]).json();
    let value = &shown["keys"]["w"]["value"];
    assert_eq!((&value["type"], &value["dtype"]), (&json!(class), &json!("bfloat16")));
    assert_eq!(value["shape"], json!([64, 64]));
    assert_eq!(value["state"]["qdata"]["dtype"], "int8");
    let text = dcp(["inspect", one]).ok();
    assert!(text.contains(&format!("{class}(bfloat16, [64, 64])")), "{text}");
    dcp(["verify", "--deep", one]).ok();
    dcp(["stats", one]).ok();
    // In PyTorch's format it is what it was, byte for byte, and listed as PyTorch does.
    let copy = path(&folder, "copy");
    dcp(["reshard", one, &copy, "--ranks=1"]).ok();
    let data = |place: &str| fs::read(crate::support::fixtures().join(place).join("__0_0.distcp"));
    assert_eq!(data(one).unwrap(), data(&copy).unwrap());
    dcp(["diff", one, &copy]).ok();
    let listed = |place: &str| {
        let bytes = fs::read(crate::support::fixtures().join(place).join(".metadata")).unwrap();
        let metadata = dcp::formats::metadata::decode(&bytes).unwrap();
        let tensor = metadata.get("w").unwrap().as_tensor().unwrap();
        (tensor.dtype, tensor.shape.to_vec(), tensor.chunks.len())
    };
    assert_eq!(listed(one), listed(&copy));
    // Formats of tensors alone have no room for it.
    for source in [one, "../torch_save/subclasses/small.pt"] {
        for to in ["--to=hf", "--to=safetensors"] {
            let target = path(&folder, "x");
            dcp(["convert", source, &target, to, "--everything"])
                .fails(2, &[class, "--exclude leaves them out"]);
            assert!(!folder.path().join("x").exists());
        }
    }
}

/// torchao's own `dequantize` made the numbers in `plain.pt`: `float32` of optimizer states,
/// `bfloat16` of weights.
#[test]
fn tensors_of_torchao_become_the_numbers_that_it_makes() {
    let folder = tempfile::tempdir().unwrap();
    let (quantized, plain) =
        ("../torch_save/subclasses/small.pt", "../torch_save/subclasses/plain.pt");
    let convert = |source: &str, name: &str, options: &[&str]| {
        let target = path(&folder, name);
        dcp([&["convert", source, &target], options].concat()).ok();
        tensors(std::path::Path::new(&target))
    };
    let wanted = convert(plain, "wanted.safetensors", &[]);
    let found = convert(quantized, "f32.safetensors", &["--dequantize", "f32"]);
    for name in ["w.signed", "w.unsigned", "w.four", "w.fp8", "w.bias"] {
        assert_eq!(found[name], wanted[name], "{name}");
    }
    let wanted = convert(plain, "wanted16.safetensors", &["--dtype", "bf16"]);
    let found = convert(quantized, "bf16.safetensors", &["--dequantize", "bf16"]);
    assert_eq!(found.len(), wanted.len());
    for (name, tensor) in &wanted {
        // `--dequantize` leaves what is not quantized as it is.
        if name != "w.bias" {
            assert_eq!(&found[name], tensor, "{name}");
        }
    }
    // One of DCP, read in parts of its rows.
    let one = "../torch_save/subclasses/one";
    convert(one, "one.safetensors", &["--dequantize", "bf16"]);
    let target = path(&folder, "ranks");
    dcp(["convert", one, &target, "--to=dcp", "--ranks=3", "--dequantize=bf16"]).ok();
    dcp(["diff", &target, &path(&folder, "one.safetensors")]).ok();
}

/// A dict may have keys that are the same once they are joined by dots.
#[test]
fn keys_that_clash_are_shown_by_their_paths() {
    let folder = tempfile::tempdir().unwrap();
    let source = "../torch_save/names/clash.pt";
    let shown = dcp(["inspect", source, "--json"]);
    assert!(shown.stderr.contains("would all be \"a.b\""), "{}", shown.stderr);
    let shown = shown.json();
    for name in ["[\"a.b\"]", "[\"a\"][\"b\"]"] {
        assert_eq!(shown["keys"][name]["kind"], "tensor", "{shown}");
        let tree = dcp(["inspect", source]).ok();
        assert!(tree.contains(name), "{tree}");
    }
    assert_eq!(dcp(["verify", source, "--deep", "--json"]).json()["ok"], true);
    // In torch.save's form the dict is what it was.
    let copy = path(&folder, "copy.pt");
    dcp(["convert", source, &copy]).ok();
    dcp(["diff", source, &copy]).ok();
    let target = path(&folder, "x.safetensors");
    let one = dcp([
        "convert",
        source,
        &target,
        "--exclude",
        "[\"a\"][\"b\"]",
        "--rename",
        r#"s/^\["a\.b"\]$/a.b/"#,
    ]);
    assert!(one.stderr.contains("leave all but one out, or rename them"), "{}", one.stderr);
    assert_eq!(tensors(std::path::Path::new(&target)).keys().collect::<Vec<_>>(), ["a.b"]);
}

/// Python's texts can have halves of surrogate pairs; no other text can.
#[test]
fn keys_that_are_no_text_are_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let source = "../torch_save/names/surrogate.pt";
    let shown = dcp(["inspect", source, "--json"]);
    assert!(shown.stderr.contains("half of a surrogate pair"), "{}", shown.stderr);
    assert_eq!(shown.json()["keys"]["a\\ud800b"]["kind"], "tensor");
    let copy = path(&folder, "copy.pt");
    let kept = dcp(["convert", source, &copy]);
    assert!(kept.stderr.contains("half of a surrogate pair"), "{}", kept.stderr);
    let bytes = fs::read(&copy).unwrap();
    assert!(bytes.windows(5).any(|window| window == b"a\xed\xa0\x80b"));
}

/// torch.load puts tensors where they were saved from, and fails where there is no such device.
#[test]
fn devices_are_shown_and_kept_or_set() {
    let folder = tempfile::tempdir().unwrap();
    let source = "../torch_save/names/cuda.pt";
    assert_eq!(dcp(["inspect", source, "--json"]).json()["keys"]["w"]["device"], "cuda:0");
    let dcp_of_it = path(&folder, "dcp");
    dcp(["convert", source, &dcp_of_it, "--to=dcp"]).ok();
    let tags = |from: &str, options: &[&str]| {
        let target = path(&folder, "x.pt");
        dcp([&["convert", from, &target, "--overwrite"], options].concat()).ok();
        let bytes = fs::read(&target).unwrap();
        let has = |tag: &[u8]| bytes.windows(tag.len()).any(|window| window == tag);
        (has(b"X\x06\0\0\0cuda:0"), has(b"X\x03\0\0\0cpu"))
    };
    // The tensors of a checkpoint of DCP have no device; those in an object keep theirs.
    assert_eq!(tags(source, &[]), (true, false));
    assert_eq!(tags(source, &["--exclude=o"]), (false, true));
    assert_eq!(tags(&dcp_of_it, &[]), (true, true));
    for source in [source, &dcp_of_it] {
        assert_eq!(tags(source, &["--device=cpu"]), (false, true));
        assert_eq!(tags(source, &["--device=cpu", "--legacy"]), (false, true));
    }
    let target = path(&folder, "x.safetensors");
    dcp(["convert", source, &target, "--device=cpu"]).fails(2, &["--device is for torch-save"]);
}

#[test]
fn programs_of_torch_export_are_named() {
    dcp(["inspect", "../torch_save/names/program.pt2"])
        .fails(1, &["a program of torch.export", "torch.export.load()"]);
}

/// What one rank saved of a state dict of DTensors is a part of each, and so are `ShardedTensor`s.
#[test]
fn files_of_one_rank_become_no_checkpoint_of_whole_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let model = path(&folder, "model");
    fs::create_dir(&model).unwrap();
    let rank = "../torch_save/dtensors/rank_0.pt";
    fs::copy(crate::support::fixtures().join(rank), format!("{model}/pytorch_model.bin")).unwrap();
    let sharded = "../torch_save/sharded_tensors/rank_0.bin";
    let target = path(&folder, "x");
    let refused = |arguments: &[&str], class: &str, name: &str| {
        let name = format!("{name}\" ({class})");
        dcp([&["-q"], arguments].concat()).fails(2, &[&name, "one rank's part", "of all ranks"]);
        assert!(!folder.path().join("x").exists(), "{arguments:?}");
    };
    for (source, class, name) in [
        (rank, "torch.distributed.tensor.DTensor", "w"),
        (&*model, "torch.distributed.tensor.DTensor", "w"),
        (sharded, "torch.distributed._shard.sharded_tensor.api.ShardedTensor", "embed.weight"),
    ] {
        for to in ["hf", "safetensors", "dcp", "torch-dist"] {
            refused(&["convert", source, &target, "--to", to], class, name);
            refused(&["convert", source, &target, "--to", to, "--dry-run"], class, name);
        }
        refused(&["reshard", source, &target, "--ranks=2"], class, name);
        // Another file of torch.save keeps the parts as they are.
        let copy = path(&folder, "copy.pt");
        let callables = "--allow-callable=*";
        dcp(["-q", "convert", source, &copy, "--overwrite", callables]).ok();
    }
    let other = path(&folder, "other.safetensors");
    dcp(["convert", "t24_plain", &other]).ok();
    refused(
        &["merge", rank, &other, "--to=dcp", "--out", &target],
        "torch.distributed.tensor.DTensor",
        "w",
    );
    // Without the parts it is a checkpoint.
    dcp(["-q", "convert", rank, &target, "--to=dcp", "--exclude=model.w", "--exclude=model.b"])
        .ok();
    dcp(["verify", "--deep", &target]).ok();
    dcp(["convert", "../torch_save/dtensors", &path(&folder, "y"), "--to=hf"])
        .fails(1, &["files of torch.save"]);
}

/// The index of PyTorch lists tensors of subclasses as plain tensors. A reader finds those whose archive
/// is shorter than a plain tensor.
#[test]
fn tensors_of_classes_of_their_own_that_no_reader_finds_again_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let small = "../torch_save/subclasses/small.pt";
    let one = "../torch_save/subclasses/one";
    let target = path(&folder, "x");
    let refused = |arguments: &[&str], name: &str| {
        dcp(arguments).fails(2, &[name, "torchao.", "--to torch-save", "--dequantize makes"]);
        assert!(!folder.path().join("x").join(".metadata").exists(), "{arguments:?}");
    };
    refused(&["convert", small, &target, "--to=dcp"], "w.signed");
    refused(&["reshard", small, &target, "--ranks=2"], "w.signed");
    refused(&["convert", small, &target, "--to=dcp", "--dry-run"], "w.signed");
    refused(&["convert", one, &target, "--to=dcp", "--compress=zstd"], "\"w\"");
    // Both ways out, and a tensor that is found.
    dcp(["convert", small, &target, "--to=dcp", "--dequantize=bf16"]).ok();
    dcp(["verify", "--deep", &target]).ok();
    dcp(["convert", small, &path(&folder, "again.pt"), "--to=torch-save"]).ok();
    let found = path(&folder, "found");
    dcp(["convert", one, &path(&folder, "one.pt")]).ok();
    dcp(["convert", &path(&folder, "one.pt"), &found, "--to=dcp"]).ok();
    dcp(["verify", "--deep", &found]).ok();
    dcp(["diff", one, &found]).ok();
}

/// `ShardedTensor` contains a class of four numbers, which Python pickles as a `getattr`.
#[test]
fn the_file_of_a_rank_of_fsdp1_is_sound() {
    let sharded = "../torch_save/sharded_tensors/rank_0.bin";
    assert_eq!(dcp(["verify", "--deep", sharded, "--json"]).json()["ok"], true);
}
