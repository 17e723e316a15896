//! `get`: single tensors, whole and in part, to the terminal and to files.

use std::fs;

use serde_json::json;

use crate::support::{assert_same_tensors, dcp, expected, expected_tensors, path, tensors};

const FIXTURES: [&str; 7] = [
    "all_dtypes",
    "dtensor_uneven_4r",
    "empty_zero",
    "strided_4r",
    "tp_fsdp_2x2",
    "views",
    "safetensors_fmt_2r",
];

#[test]
fn files_hold_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in FIXTURES {
        let mut found = expected_tensors(fixture);
        for (index, (name, tensor)) in found.iter_mut().enumerate() {
            if expected(fixture)["tensors"][name]["encoding"] == "native" {
                let file = path(&folder, &format!("{fixture}_{index}.safetensors"));
                dcp(["get", fixture, name, "--output", &file]).ok();
                let mut all = tensors(file.as_ref());
                assert_eq!(all.len(), 1);
                *tensor = all.remove(name).unwrap();
            } else {
                let file = path(&folder, &format!("{fixture}_{index}.npy"));
                dcp(["get", fixture, name, "--output", &file]).ok();
                tensor.2 = npy(&file).1;
            }
        }
        assert_same_tensors(&found, fixture);
    }
}

/// The header's text and the data of an `.npy` file.
fn npy(file: &str) -> (String, Vec<u8>) {
    let bytes = fs::read(file).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!(end % 64, 0);
    (String::from_utf8(bytes[10..end].to_vec()).unwrap(), bytes[end..].to_vec())
}

#[test]
fn npy_files_say_what_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.npy");
    let run = dcp(["get", "fsdp2_adam_2r", "model.embed.weight", "-o", &file, "--slice", "4:6,1:"]);
    assert_eq!((run.code, &*run.stderr), (0, ""));
    let (header, data) = npy(&file);
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 7), }"));
    // Rows 4 and 5 lie in different shards.
    let whole = &expected_tensors("fsdp2_adam_2r")["model.embed.weight"].2;
    let row = |row: usize| &whole[row * 32 + 4..row * 32 + 32];
    assert_eq!(data, [row(4), row(5)].concat());

    let run = dcp(["get", "all_dtypes", "bfloat16", "-o", &path(&folder, "b.npy")]);
    assert!(run.stderr.contains("note: NumPy has no bfloat16"), "{}", run.stderr);
    assert!(npy(&path(&folder, "b.npy")).0.contains("'descr': '<u2'"));
}

/// What `torch.load` returns of a file is the tensor or object itself; `cargo xtask interop` loads
/// them.
#[test]
fn files_of_torch_save_hold_one_tensor_or_object() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.pt");
    let get = |from: &str, name: &str, more: &[&str]| {
        let args = ["get", from, name, "-o", &file, "--overwrite"];
        dcp(args.iter().chain(more).copied())
    };
    let only = |kind: &str| {
        dcp(["verify", "--deep", &file]).ok();
        let keys = dcp(["inspect", &file, "--json"]).json()["keys"].clone();
        assert_eq!(keys.as_object().unwrap().len(), 1);
        let (name, key) = keys.as_object().unwrap().iter().next().unwrap();
        assert_eq!(key["kind"], kind, "{keys}");
        dcp(["get", &file, name, "--json"]).json()
    };
    get("fsdp2_adam_2r", "model.embed.weight", &["--slice=4:6,1:"]).ok();
    let values = only("tensor");
    let wanted = ["get", "fsdp2_adam_2r", "model.embed.weight", "--slice=4:6,1:", "--json"];
    assert_eq!(values, dcp(wanted).json());
    get("all_dtypes", "complex128", &[]).ok();
    assert_eq!(only("tensor")["dtype"], "complex128");
    get("fsdp2_adam_2r", "optimizer.param_groups.0.lr", &[]).ok();
    assert_eq!(only("object")["value"], 0.001);
    get("quantized", "qint8", &[]).ok();
    let quantizer = only("object")["value"]["args"][1].to_string();
    assert!(quantizer.contains("torch.per_tensor_affine"), "{quantizer}");
    get("quantized", "qint8", &["--slice=0"]).fails(2, &["only the whole has a scale"]);
    // What Python would run is written when it is named.
    let kinds = "../torch_save/kinds/zip.pt";
    get(kinds, "args", &[]).fails(1, &["--allow-callable __main__.TrainArgs"]);
    get(kinds, "args", &["--allow-callable=__main__.*"]).ok();
    for (name, hint) in [("x.npy", "file in .pt"), ("x.safetensors", "file in .pt"), ("x", ".pt")] {
        let file = path(&folder, name);
        dcp(["get", "fsdp2_adam_2r", "step", "-o", &file]).fails(2, &[hint]);
    }
}

#[test]
fn a_tensor_is_cast_as_conversions_cast_it() {
    let folder = tempfile::tempdir().unwrap();
    let (one, all) = (path(&folder, "one.safetensors"), path(&folder, "all.safetensors"));
    let name = "model.embed.weight";
    let run = dcp(["get", "fsdp2_adam_2r", name, "-o", &one, "--dtype=bf16"]);
    assert!(run.stderr.contains("note: cast 1 tensor to bfloat16; values changed by at most"));
    dcp(["convert", "fsdp2_adam_2r", &all, "--dtype=bf16"]).ok();
    assert_eq!(tensors(one.as_ref())[name], tensors(all.as_ref())[name]);
    let json = ["get", "fsdp2_adam_2r", name, "-o", &one, "--overwrite", "--dtype=bf16", "--json"];
    let report = dcp(json).json();
    assert_eq!(report["dtype"], "bfloat16");
    assert_eq!(report["cast"]["tensors"][name]["to"], "bfloat16");
    let text = dcp(["get", "fsdp2_adam_2r", name, "--dtype=bf16"]).ok();
    assert!(text.contains("dtype=torch.bfloat16"), "{text}");
    let run = dcp(["get", "all_dtypes", "int32", "--dtype=bf16"]);
    assert!(run.stderr.contains("no tensor had to be cast") && run.ok().contains("int32"));
}

#[test]
fn safetensors_files_take_no_type_that_they_cannot_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    for name in ["complex128", "complex32"] {
        let run = dcp(["get", "all_dtypes", name, "-o", &file]);
        assert!(!run.stderr.contains("dcp verify"), "{}", run.stderr);
        run.fails(2, &[&format!("is {name}"), "write a .pt or a .npy file"]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn tensors_print_as_pytorch_prints_them() {
    let get = |args: &[&str]| dcp([&["get"], args].concat()).ok();
    assert_eq!(
        get(&["fsdp2_adam_2r", "model.embed.weight", "--slice", "0:2,:"]),
        "tensor([[-1.1238, -1.1543, -0.2525, -0.4320,  0.8493,  0.6901, -0.3155, -2.1137],\n        \
         [ 0.3211, -1.2628,  0.3520,  0.3101,  0.1179,  1.2357,  1.1150, -0.2489]])\n"
    );
    assert_eq!(get(&["fsdp2_adam_2r", "model.bn.num_batches_tracked"]), "tensor(0)\n");
    let last = get(&["fsdp2_adam_2r", "model.embed.weight", "--slice=-1,-2:"]);
    assert_eq!(last, "tensor([-0.1398,  0.8051])\n");
    assert!(get(&["all_dtypes", "bfloat16"]).ends_with(", dtype=torch.bfloat16)\n"));
    assert!(get(&["objects", "rng_cpu"]).contains(" ..., "));
}

#[test]
fn json_has_nested_values() {
    let get = |args: &[&str]| dcp([&["get", "--json"], args].concat()).json();
    let found = get(&["sharded_tensor_raw_4r", "st_multi", "--slice", "0:2,0"]);
    assert_eq!(found["shape"], json!([2]));
    assert_eq!(found["kind"], "tensor");
    let values = found["values"].as_array().unwrap();
    assert!(values.len() == 2 && values.iter().all(|value| value.is_f64()), "{found}");
    assert_eq!(get(&["empty_zero", "empty2d_b"])["values"], json!([[], [], [], [], []]));
    let empty = get(&["empty_zero", "empty2d"]);
    assert_eq!(empty["values"], json!([]));
}

/// With `use_collectives=False` each rank of PyTorch loads its own objects.
#[test]
fn objects_of_ranks_without_collectives_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let source = "no_collectives_2r";
    let shown = dcp(["get", source, "per_rank"]);
    assert!(shown.stderr.contains("differ in \"per_rank\""), "{}", shown.stderr);
    assert_eq!(shown.ok().trim(), "0");
    for rank in ["0", "1"] {
        let target = path(&folder, rank);
        assert_eq!(dcp(["get", source, "per_rank", "--rank", rank]).ok().trim(), rank);
        dcp(["convert", source, &target, "--to=dcp", "--rank", rank]).ok();
        assert_eq!(dcp(["get", &target, "per_rank"]).ok().trim(), rank);
    }
    let target = path(&folder, "x");
    for command in
        [&["convert", source, &target, "--to=dcp"][..], &["reshard", source, &target, "-n1"]]
    {
        dcp(command).fails(2, &["differ in per_rank", "--rank takes"]);
        assert!(!folder.path().join("x").exists());
    }
    dcp(["inspect", source, "--rank=7"]).fails(2, &["rank 7 has nothing", "ranks that have: 0, 1"]);
    dcp(["inspect", "nested", "--rank=1"]).fails(2, &["--rank is for ranks that differ"]);
}

/// What torch takes silently from each rank's own file needs a choice, tensors of other shapes too.
#[test]
fn tensors_of_ranks_without_collectives_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = crate::support::fixtures().join("../rank_local");
    let at = |name: &str| fixtures.join(name).to_str().unwrap().to_owned();
    let differ = at("differ");
    let target = path(&folder, "x.pt");
    dcp(["convert", &differ, &target]).fails(2, &["cursor", "buffer", "state", "--rank takes"]);
    let noted = dcp(["verify", &differ, "--deep"]);
    for (rank, first) in [("0", 0.0), ("1", 1.0)] {
        let target = path(&folder, &format!("{rank}.pt"));
        dcp(["convert", &differ, &target, "--rank", rank]).ok();
        let buffer = dcp(["get", &target, "buffer", "--slice", "0", "--json"]).json();
        assert_eq!(buffer["values"], json!(first));
        let cursor = dcp(["get", &target, "cursor", "--json"]).json();
        assert_eq!(cursor["shape"], json!([3 + rank.parse::<u64>().unwrap()]));
    }
    assert!(noted.stdout.contains("what the lowest rank has is used"), "{}", noted.stdout);
    let stale = at("stale_sharded");
    let left = "__2.metadata, __3.metadata are left from an earlier save of more ranks";
    for command in [&["convert", &stale, &target][..], &["verify", &stale]] {
        let failed = dcp(command);
        assert!(failed.stderr.contains(left) || failed.stdout.contains(left), "{failed:?}");
    }
    let noted = dcp(["inspect", &at("stale_replicated")]);
    assert!(noted.stderr.contains("ranks below 2 agree"), "{}", noted.stderr);
}
