//! Ranks whose source or target is on each node's own disk. In these tests each rank has a path of its
//! own, as it has where one path leads to another disk on each node.

use std::fs;
use std::path::Path;

use crate::ranks::{on_ranks, on_ranks_with, one_result};
use crate::ranks_write::files;
use crate::support::{copy_of, dcp, path};

const SOURCE: &str = "fsdp2_adam_2r";
const OLMO: &str = "../olmo/fsdp2-2rank-nested/ckpt";

/// Every command that ranks divide and that writes a folder, with SOURCE and TARGET in their places.
const WRITERS: [&[&str]; 9] = [
    &["copy", "SOURCE", "TARGET"],
    &["reshard", "SOURCE", "TARGET", "--ranks", "3"],
    &["convert", "SOURCE", "TARGET", "--to", "dcp"],
    &["convert", "SOURCE", "TARGET", "--to", "hf", "--everything", "--max-shard-size", "16KiB"],
    &["convert", "SOURCE", "TARGET", "--to", "hf", "--everything"],
    &["average", "SOURCE", "SOURCE", "--out", "TARGET", "--to", "hf", "--everything"],
    &["average", "SOURCE", "SOURCE", "--out", "TARGET", "--to", "dcp"],
    &["merge", "SOURCE", "SOURCE", "--identical", "--out", "TARGET", "--to", "dcp"],
    &["unshard", OLMO, "TARGET", "--strategy", "per-tensor"],
];

/// Those that read.
const READERS: [&[&str]; 3] =
    [&["verify", "--deep", "SOURCE"], &["stats", "SOURCE"], &["diff", "SOURCE", SOURCE]];

fn filled(args: &[&str], source: &str, target: &str) -> Vec<String> {
    let fill = |arg: &&str| arg.replace("SOURCE", source).replace("TARGET", target);
    args.iter().map(fill).collect()
}

#[test]
fn a_target_that_a_rank_does_not_share_is_refused_by_all() {
    let folder = tempfile::tempdir().unwrap();
    for (at, writer) in WRITERS.into_iter().enumerate() {
        for (private, world_size) in [(1, 2), (2, 3)] {
            let target = |rank| {
                let node = if rank == private { "private" } else { "shared" };
                path(&folder, &format!("{at}/{world_size}/{node}/target"))
            };
            let runs = on_ranks_with(world_size, |rank| filled(writer, SOURCE, &target(rank)));
            let says = format!("rank {private} ");
            one_result(runs).fails(3, &[&says, "what rank 0 writes", "--single"]);
            for rank in 0..world_size {
                assert!(!Path::new(&target(rank)).exists(), "{writer:?}: {rank}");
            }
        }
    }
}

#[test]
fn a_source_that_is_another_on_a_rank_is_refused_by_all() {
    let folder = tempfile::tempdir().unwrap();
    let (good, other) = (copy_of(SOURCE), copy_of(SOURCE));
    let data = other.path().join("__1_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&data, bytes).unwrap();
    let at = |rank| if rank == 1 { &other } else { &good }.path().to_str().unwrap();
    let target = path(&folder, "target");
    let writers = WRITERS.into_iter().filter(|writer| writer.contains(&"SOURCE"));
    let file = &["convert", "SOURCE", "TARGET", "--to", "safetensors"][..];
    for command in writers.chain(READERS).chain([file]) {
        let run = one_result(on_ranks_with(2, |rank| filled(command, at(rank), &target)));
        run.fails(3, &["rank 1 ", "lengths or versions", "--single"]);
        assert!(!Path::new(&target).exists(), "{command:?}");
    }
}

#[test]
fn another_index_on_a_rank_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let sources = [SOURCE, "tp_fsdp_2x2"];
    let target = path(&folder, "target");
    for command in READERS.into_iter().chain([WRITERS[1], WRITERS[3]]) {
        let source = |rank: u32| sources[usize::from(rank == 1)];
        let run = one_result(on_ranks_with(2, |rank| filled(command, source(rank), &target)));
        run.fails(3, &["rank 1 ", "another index"]);
        assert!(!Path::new(&target).exists(), "{command:?}");
    }
}

/// Ranks that each write their part of another result would mix the two.
#[test]
fn another_option_or_job_on_a_rank_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "target");
    let config = path(&folder, "config");
    fs::create_dir(&config).unwrap();
    fs::write(Path::new(&config).join("config.json"), "{}").unwrap();
    for (command, of_rank_0, of_rank_1, says) in [
        (WRITERS[2], &["--dtype", "f32"][..], &["--dtype", "bf16"][..], "\"--dtype\""),
        (WRITERS[2], &[], &["--exclude", "optim.*"], "\"keys\""),
        (WRITERS[2], &[], &["--dry-run"], "\"dry run\""),
        (WRITERS[1], &[], &["--compress", "zstd"], "\"--compress\""),
        (WRITERS[6], &[], &["--weights", "0.25,0.75"], "\"how it averages\""),
        (WRITERS[8], &[], &["--optim"], "\"options of unshard\""),
        (READERS[2], &["--atol", "1"], &["--atol", "2"], "\"what is compared\""),
        (READERS[2], &[], &["--max-memory", "128MiB"], "\"--max-memory\""),
        (READERS[1], &[], &["--max-memory", "128MiB"], "\"--max-memory\""),
        (WRITERS[4], &[], &["--config", &config], "\"--config\""),
        (&["stats", "SOURCE"], &[], &["model.embed.weight"], "\"keys\""),
    ] {
        let args = |rank| {
            let more = if rank == 1 { of_rank_1 } else { of_rank_0 };
            filled(&[command, more].concat(), SOURCE, &target)
        };
        let run = one_result(on_ranks_with(2, args));
        run.fails(3, &["rank 1 ", "option", says, "of rank 0", "same options"]);
        assert!(!Path::new(&target).exists(), "{command:?}");
    }
    let args = |rank| match rank {
        1 => filled(READERS[1], SOURCE, &target),
        _ => filled(READERS[0], SOURCE, &target),
    };
    let run = one_result(on_ranks_with(2, args));
    run.fails(3, &["rank 1 ", "\"stats\"", "\"verify\""]);
}

/// Options count by what they mean.
#[test]
fn a_default_that_one_rank_names_is_that_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let megatron = dcp_testing::fixture("megatron").join("gpt_tp2dp2_fully_reshardable/ckpt");
    let megatron = megatron.display().to_string();
    for (at, (source, to, given)) in [
        (SOURCE, "dcp", &["--ranks", "1"][..]),
        (SOURCE, "dcp", &["--everything"]),
        (SOURCE, "hf", &["--model-only"]),
        (SOURCE, "hf", &["--max-shard-size", "5GB"]),
        (SOURCE, "dcp", &["--max-memory", "256MiB"]),
        (&megatron, "torch-dist", &["--tp", "2", "--pp", "1", "--form", "compatible"]),
    ]
    .into_iter()
    .enumerate()
    {
        let target = path(&folder, &at.to_string());
        let args = |rank| {
            let args = ["convert", source, &target, "--to", to];
            let more = if rank == 1 { given } else { &[] };
            args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
        };
        let run = one_result(on_ranks_with(2, args));
        assert_eq!(run.code, 0, "{given:?}: {}", run.stderr);
    }
}

#[test]
fn a_command_that_one_rank_does_not_divide_is_refused_by_all() {
    let args = |keys_only: bool| {
        let args = ["diff", SOURCE, SOURCE, "--keys-only"].map(ToOwned::to_owned);
        args[..if keys_only { 4 } else { 3 }].to_vec()
    };
    for odd in 0..2 {
        let run = one_result(on_ranks_with(2, |rank| args(rank == odd)));
        run.fails(
            3,
            &["rank 1 ", "\"diff\" on rank 0 alone", "divided among the ranks", "--single"],
        );
    }
    let other = |rank| match rank {
        0 => ["prune", "runs", "--keep-last=1", "--dry-run"].map(ToOwned::to_owned).to_vec(),
        _ => ["report", SOURCE, "-o", "/dev/null"].map(ToOwned::to_owned).to_vec(),
    };
    let run = one_result(on_ranks_with(2, other));
    run.fails(3, &["rank 1 ", "\"report\"", "\"prune\""]);
}

/// What a rank that was killed between two exchanges left is no file of a checkpoint.
#[test]
fn a_file_by_which_ranks_found_one_target_is_no_obstacle() {
    let folder = tempfile::tempdir().unwrap();
    for (at, writer) in WRITERS.into_iter().enumerate() {
        let (target, alone) =
            (path(&folder, &at.to_string()), path(&folder, &format!("{at}-alone")));
        fs::create_dir(&target).unwrap();
        let token = ".dcp-ranks.0123456789abcdef0123456789abcdef";
        fs::write(Path::new(&target).join(token), "0123456789abcdef0123456789abcdef").unwrap();
        let args = filled(writer, SOURCE, &target);
        on_ranks(2, &args.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        dcp(filled(writer, SOURCE, &alone)).ok();
        let mut found = files(target.as_ref());
        assert!(found.remove(token).is_some());
        assert!(found == files(alone.as_ref()), "{writer:?}");
    }
}
