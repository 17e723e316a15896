//! Conversions that several ranks share: the same files as one process writes, or none.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dcp::DType;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};

use crate::ranks::on_ranks;
use crate::support::{Run, copy_of, dcp, fixtures};

/// The files below a folder, or the file itself, by name.
pub(crate) fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut open = vec![path.to_owned()];
    while let Some(next) = open.pop() {
        if next.is_dir() {
            open.extend(fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()));
        } else if next.exists() {
            let name = next.strip_prefix(path).unwrap().display().to_string();
            all.insert(name, fs::read(next).unwrap());
        }
    }
    all
}

/// Runs `command SOURCE TARGET options` by one process and by several, and compares what they print and
/// write.
#[track_caller]
fn writes_the_same(command: &str, source: &str, options: &[&str]) {
    all_write_the_same(&[&[command, source, "TARGET"], options].concat());
}

/// The same for a command with TARGET in place of the target.
#[track_caller]
fn all_write_the_same(args: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let name = if args.contains(&"torch-save") { "target.pt" } else { "target" };
    let args = |target: &str| -> Vec<String> {
        args.iter().map(|arg| arg.replace("TARGET", target)).chain(["--json".to_owned()]).collect()
    };
    let parent = |who: &str| {
        let parent = folder.path().join(who);
        fs::create_dir_all(&parent).unwrap();
        parent.join(name)
    };
    let target = parent("alone");
    let said = dcp(args(target.to_str().unwrap())).json();
    let alone = files(&target);
    assert!(!alone.is_empty());
    for world_size in 1..=4 {
        let target = parent(&format!("by-{world_size}"));
        let args = args(target.to_str().unwrap());
        let together: Vec<&str> = args.iter().map(String::as_str).collect();
        assert_eq!(on_ranks(world_size, &together).json(), said, "{args:?} by {world_size}");
        let together = files(&target);
        let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&together), names(&alone), "{args:?} by {world_size}");
        for (name, bytes) in &together {
            assert!(*bytes == alone[name], "{name} differs: {args:?} by {world_size}");
        }
    }
}

fn pytorch(name: &str) -> String {
    fixtures().join(name).display().to_string()
}

fn megatron(name: &str) -> String {
    dcp_testing::fixture("megatron").join(name).display().to_string()
}

#[test]
fn ranks_reshard_as_one_process_does() {
    writes_the_same("reshard", &pytorch("fsdp2_adam_2r"), &["--ranks", "5"]);
    let compressed = ["--ranks", "5", "--compress", "zstd"];
    writes_the_same("reshard", &pytorch("fsdp2_adam_2r"), &compressed);
    writes_the_same("reshard", &pytorch("tp_fsdp_2x2"), &["--ranks", "3", "--no-optimizer"]);
    writes_the_same("reshard", &megatron("gpt_tp2pp2_swiglu/ckpt"), &["--tp", "4", "--pp", "1"]);
}

#[test]
fn ranks_convert_as_one_process_does() {
    let source = pytorch("fsdp2_adam_2r");
    writes_the_same("convert", &source, &["--to", "dcp", "--ranks", "3", "--dtype", "bf16"]);
    let split = ["--to", "hf", "--max-shard-size", "16KiB", "--dtype", "bf16"];
    writes_the_same("convert", &source, &split);
    writes_the_same("convert", &source, &["--to", "safetensors"]);
    writes_the_same("convert", &source, &["--to", "torch-save"]);
}

#[test]
fn ranks_convert_megatron_as_one_process_does() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf").display().to_string();
    let run = megatron("run_torch_dist_dp2");
    writes_the_same("convert", &run, &["--to", "hf", "--max-shard-size", "64KiB"]);
    dcp(["convert", &run, &hf, "--to", "hf"]).ok();
    writes_the_same("convert", &hf, &["--to", "torch-dist", "--tp", "2", "--integrity"]);
    writes_the_same("convert", &hf, &["--to", "torch-dist", "--compress", "zstd:5"]);
}

#[test]
fn ranks_combine_as_one_process_does() {
    let folder = tempfile::tempdir().unwrap();
    let a = pytorch("fsdp2_adam_2r");
    let b = folder.path().join("b").display().to_string();
    dcp(["convert", &a, &b, "--to", "dcp", "--ranks", "3", "--dtype", "bf16"]).ok();
    let average = ["average", &a, &b, &a, "--out", "TARGET"];
    let sharded = ["--to", "dcp", "--ranks", "5"];
    all_write_the_same(&[&average[..], &sharded, &["--weights", "0.2,0.3,0.1"]].concat());
    let hf = ["--to", "hf", "--max-shard-size", "16KiB", "--dtype", "fp16", "--everything"];
    all_write_the_same(&[&average[..], &hf].concat());
    all_write_the_same(&[&average[..], &["--to", "torch-save"]].concat());
    let merge = ["merge", &a, &pytorch("nested"), &a, "--identical", "--out", "TARGET"];
    all_write_the_same(&[&merge[..], &sharded].concat());
    // What must be equal and is not, is an error of all, and nothing is written.
    let target = folder.path().join("target").display().to_string();
    for world_size in 1..=3 {
        let merge = ["merge", &a, &b, "--identical", "--out", &target, "--to", "dcp"];
        on_ranks(world_size, &merge).fails(2, &["is in checkpoints 1 and 2"]);
        assert_eq!(files(target.as_ref()).keys().collect::<Vec<_>>(), [""; 0]);
    }
}

#[test]
fn ranks_unshard_as_one_process_does() {
    let olmo = dcp_testing::fixture("olmo").join("fsdp2-2rank-nested/ckpt").display().to_string();
    for format in ["safetensors", "pt"] {
        let options = ["--format", format, "--optim", "--strategy"];
        for strategy in [&["one-file"][..], &["per-tensor"], &["chunks", "--chunk-size", "1000"]] {
            writes_the_same("unshard", &olmo, &[&options[..], strategy].concat());
        }
    }
    writes_the_same("unshard", &olmo, &[]);
    // What is there is replaced, by one process and by several.
    let folder = tempfile::tempdir().unwrap();
    let target = |who: &str| folder.path().join(who);
    for who in ["alone", "together"] {
        for strategy in [&["--strategy", "chunks", "--chunk-size", "300"][..], &["--optim"]] {
            let target = target(who);
            dcp([&["unshard", &olmo, target.to_str().unwrap()], strategy].concat()).ok();
        }
    }
    for strategy in [&["--strategy", "chunks", "--chunk-size", "2000"][..], &[]] {
        let (alone, together) = (target("alone"), target("together"));
        let options = [strategy, &["--overwrite", "--format", "safetensors"]].concat();
        dcp([&["unshard", &olmo, alone.to_str().unwrap()], &*options].concat()).ok();
        on_ranks(3, &[&["unshard", &olmo, together.to_str().unwrap()], &*options].concat()).ok();
        assert_eq!(files(&together), files(&alone), "{options:?}");
        on_ranks(2, &["unshard", &olmo, together.to_str().unwrap()]).fails(2, &["exists"]);
    }
}

#[test]
fn ranks_copy_as_one_process_does() {
    writes_the_same("copy", &pytorch("fsdp2_adam_2r"), &[]);
    writes_the_same("copy", &megatron("run_torch_dist_dp2"), &["--lengths"]);
}

#[test]
fn ranks_replace_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let (alone, together) = (folder.path().join("alone"), folder.path().join("together"));
    let (old, new) = (pytorch("tp_fsdp_2x2"), pytorch("fsdp2_adam_2r"));
    for format in [&["--to", "dcp", "--ranks", "4"][..], &["--to", "hf"]] {
        for target in [&alone, &together] {
            let target = target.to_str().unwrap();
            dcp([&["convert", &old, target][..], format].concat()).ok();
        }
        let args = |target: &Path| {
            let target = target.to_str().unwrap().to_owned();
            let args = ["convert", &new, &target, "--overwrite"].map(ToOwned::to_owned);
            [&args[..], &format.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>()].concat()
        };
        dcp(args(&alone)).ok();
        let together_args = args(&together);
        let args: Vec<&str> = together_args.iter().map(String::as_str).collect();
        on_ranks(3, &args).ok();
        assert_eq!(files(&together), files(&alone), "{format:?}");
        fs::remove_dir_all(&alone).unwrap();
        fs::remove_dir_all(&together).unwrap();
    }
}

/// A safetensors file of tensors of random bits.
pub(crate) fn tensors(folder: &Path, count: usize, shape: [u64; 2]) -> String {
    let item = |at: usize| SafetensorsItem {
        name: format!("weight{at}").into(),
        dtype: DType::Float32,
        shape: shape.into(),
    };
    let items: Vec<_> = (0..count).map(item).collect();
    let encoded = encode_header(&items, &Default::default()).unwrap();
    let mut file = encoded.bytes.to_vec();
    let data = 0..u32::try_from(encoded.byte_len).unwrap() - file.len() as u32;
    file.extend(data.map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8));
    let model = folder.join("model.safetensors");
    fs::write(&model, file).unwrap();
    model.display().to_string()
}

/// A checkpoint of one chunk of 8 MiB.
pub(crate) fn one_chunk(folder: &Path) -> String {
    let model = tensors(folder, 1, [1 << 11, 1 << 10]);
    let checkpoint = folder.join("checkpoint").display().to_string();
    dcp(["convert", &model, &checkpoint, "--to", "dcp"]).ok();
    checkpoint
}

#[test]
fn a_chunk_that_several_ranks_read_is_compared_with_its_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let source = one_chunk(folder.path());
    writes_the_same("reshard", &source, &["--ranks", "8"]);
    let data = Path::new(&source).join("__0_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle] ^= 1;
    fs::write(&data, bytes).unwrap();
    for world_size in 1..=4 {
        let target = folder.path().join("target");
        let args = ["reshard", &source, target.to_str().unwrap(), "--ranks", "8"];
        on_ranks(world_size, &args).fails(1, &["weight0", "the data is damaged"]);
        assert_eq!(files(&target).keys().collect::<Vec<_>>(), [""; 0], "by {world_size}");
    }
}

/// A copy of a fixture in which every data file is damaged, in the middle of what is stored.
fn damaged() -> tempfile::TempDir {
    let folder = copy_of("fsdp2_adam_2r");
    for (name, mut bytes) in files(folder.path()) {
        if name.ends_with(".distcp") {
            let at = bytes.len() / 2;
            bytes[at..at + 2048].iter_mut().for_each(|byte| *byte ^= 0x11);
            fs::write(folder.path().join(name), bytes).unwrap();
        }
    }
    folder
}

#[test]
fn damage_that_one_rank_reads_leaves_no_target_on_any() {
    let source = damaged();
    let source = source.path().to_str().unwrap();
    let commands: [&[&str]; 3] = [
        &["reshard", "--ranks", "7"],
        &["convert", "--to", "dcp"],
        &["convert", "--to", "hf", "--everything", "--max-shard-size", "16KiB"],
    ];
    for command in commands {
        for world_size in 1..=4 {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("target");
            let mut args = vec![command[0], source, target.to_str().unwrap()];
            args.extend(&command[1..]);
            let run: Run = on_ranks(world_size, &args);
            let rank = if world_size > 1 { "rank " } else { "" };
            run.fails(1, &[rank, "distcp", "verify --deep"]);
            assert_eq!(files(&target).keys().collect::<Vec<_>>(), [""; 0], "{args:?}");
        }
    }
}
