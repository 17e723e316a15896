//! Statistics and differences that several ranks compute together: what one process prints, to the last
//! bit.

use std::fs;

use crate::ranks::on_ranks;
use crate::ranks_write::{files, one_chunk};
use crate::support::{copy_of, dcp, fixtures};

/// Runs a command by one process and by several, and compares what they print and return.
#[track_caller]
fn says_the_same(args: &[&str]) -> String {
    let alone = dcp(args);
    for world_size in 1..=4 {
        let together = on_ranks(world_size, args);
        assert_eq!(together.code, alone.code, "{args:?} by {world_size}: {}", together.stderr);
        assert_eq!(together.stdout, alone.stdout, "{args:?} by {world_size}");
    }
    alone.stdout
}

#[test]
fn ranks_compute_the_statistics_of_one_process() {
    let megatron = dcp_testing::fixture("megatron").join("run_torch_dist_dp2");
    for checkpoint in ["fsdp2_adam_2r", "tp_fsdp_2x2", "zstd_2r", "strided_4r"] {
        says_the_same(&["stats", "--json", fixtures().join(checkpoint).to_str().unwrap()]);
    }
    says_the_same(&["stats", "--json", megatron.to_str().unwrap()]);
    says_the_same(&["stats", "--filter", "model.*", "--sort", "std", "fsdp2_adam_2r"]);
}

#[test]
fn sums_of_a_tensor_that_several_ranks_read_have_the_bits_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    // Of random bits: numbers of all magnitudes, infinities and NaNs.
    let checkpoint = one_chunk(folder.path());
    let args = ["stats", "--json", "--max-memory", "1MiB", &checkpoint];
    let said = says_the_same(&args);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let weight = &said["tensors"]["weight0"];
    assert!(weight["nan"].as_u64() > Some(0) && weight["std"].is_number(), "{weight}");
    says_the_same(&["stats", "--fail-on", "nan", "--max-memory", "1MiB", &checkpoint]);
}

#[test]
fn ranks_find_the_differences_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (one_chunk(folder.path()), folder.path().join("model.safetensors"));
    let mut bytes = fs::read(&b).unwrap();
    let data = bytes.len() - (8 << 20);
    for at in [data, data + (3 << 20) + 1, bytes.len() - 3] {
        bytes[at] ^= 0x41;
    }
    fs::write(&b, bytes).unwrap();
    let b = b.to_str().unwrap();
    let args = ["diff", &a, b, "--max-memory", "1MiB"];
    let said = says_the_same(&[&args[..], &["--json"]].concat());
    assert!(said.contains("\"different\": 3") || said.contains("\"different\":3"), "{said}");
    says_the_same(&[&args[..], &["--rtol", "0.1"]].concat());
    says_the_same(&["diff", "--json", &a, &a]);
    says_the_same(&["diff", "--json", "fsdp2_adam_2r", "tp_fsdp_2x2"]);
    says_the_same(&["diff", "fsdp2_adam_2r", "nested", "--model-only"]);
}

#[test]
fn damage_that_one_rank_reads_is_neither_a_statistic_nor_a_difference() {
    let source = copy_of("fsdp2_adam_2r");
    for (name, mut bytes) in files(source.path()) {
        if name.ends_with("1_0.distcp") {
            let at = bytes.len() / 2;
            bytes[at..at + 2048].iter_mut().for_each(|byte| *byte ^= 0x11);
            fs::write(source.path().join(name), bytes).unwrap();
        }
    }
    let damaged = source.path().to_str().unwrap();
    for world_size in 2..=4 {
        on_ranks(world_size, &["stats", damaged]).fails(1, &["rank ", "__1_0.distcp"]);
        let diff = on_ranks(world_size, &["diff", "fsdp2_adam_2r", damaged]);
        diff.fails(3, &["rank ", "__1_0.distcp"]);
    }
}
