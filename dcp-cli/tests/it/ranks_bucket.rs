//! Several ranks on a bucket, and a rank that is killed in the middle of what all write.

use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::Duration;

use dcp_conformance::http::{FaultProxy, FaultRule, HttpFault, S3Double};
use dcp_testing::reserved_port;

use crate::ranks::{of_rank, on_ranks_with, one_result, without_waits};
use crate::ranks_write::{files, one_chunk};
use crate::support::{Run, dcp, finish, fixtures};

const RANKS: u32 = 3;
/// The rank that is killed.
const KILLED: u32 = 1;

/// A bucket, to which [`KILLED`] has a connection of its own.
pub(crate) struct Bucket {
    pub(crate) proxy: FaultProxy,
    double: S3Double,
}

impl Bucket {
    pub(crate) fn start() -> Self {
        let double = S3Double::start(&["bucket"], Duration::ZERO).unwrap();
        Self { proxy: FaultProxy::start(&double.endpoint()).unwrap(), double }
    }

    /// The arguments of a rank; `proxied` are the ranks that the proxy serves.
    pub(crate) fn args(&self, args: &[impl AsRef<str>], proxied: bool) -> Vec<String> {
        let endpoint = if proxied { self.proxy.endpoint() } else { self.double.endpoint() };
        let options = [
            &*format!("aws_endpoint={endpoint}"),
            "aws_allow_http=true",
            "aws_access_key_id=test",
            "aws_secret_access_key=test",
            "aws_region=us-east-1",
        ];
        let options = options.map(|option| format!("--storage-option={option}"));
        options.into_iter().chain(args.iter().map(|arg| arg.as_ref().to_owned())).collect()
    }

    pub(crate) fn alone(&self, args: &[impl AsRef<str>]) -> Run {
        dcp(self.args(args, false))
    }

    fn on_ranks(&self, args: &[impl AsRef<str>]) -> Run {
        one_result(on_ranks_with(RANKS, |_| self.args(args, false)))
    }

    /// Runs a command on ranks of which one is killed when its requests are stalled. Returns how the
    /// others end.
    fn killed(&self, args: &[&str]) -> Vec<Run> {
        let (_reserved, port) = reserved_port();
        let start = |rank: u32| {
            let args = self.args(&[&["--quiet"], args].concat(), rank == KILLED);
            of_rank(rank, RANKS, port).args(args).spawn().unwrap()
        };
        let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
        let mut killed = ranks.remove(KILLED as usize);
        let waits = ranks.into_iter().map(|rank| thread::spawn(|| rank.wait_with_output()));
        let waits: Vec<_> = waits.collect();
        let is_stalled = self.proxy.kill_when_stalled(&mut killed).unwrap();
        assert!(is_stalled, "rank {KILLED} ended without a stall");
        let runs = waits.into_iter().map(|wait| finish(wait.join().unwrap().unwrap()));
        runs.map(without_waits).collect()
    }

    /// The files below a URL, copied to a local folder.
    fn fetch(&self, url: &str, folder: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
        self.alone(&["copy", url, folder.to_str().unwrap()]).ok();
        files(folder)
    }
}

/// Whether rank 0 says which rank was lost, and the others fail as it does.
#[track_caller]
fn name_the_lost_rank(runs: Vec<Run>) {
    let run = one_result(runs);
    run.fails(3, &[&format!("rank {KILLED}"), "run the command again"]);
}

#[test]
fn settings_of_a_bucket_before_and_after_the_command_all_count() {
    let bucket = Bucket::start();
    bucket.alone(&["copy", "fsdp2_adam_2r", "s3://bucket/a"]).ok();
    // Without the endpoint that is before the command, the request would leave this machine.
    let after = "--storage-option=attempts_max=1";
    let listed = bucket.alone(&["inspect", "s3://bucket/a", after]).ok();
    assert!(listed.contains("__0_0.distcp"), "{listed}");
    // The last one of a name counts.
    let right = format!("--storage-option=aws_endpoint={}", bucket.double.endpoint());
    let mut args = bucket.args(&["inspect", "s3://bucket/a", after, &right], false);
    args[0] = "--storage-option=aws_endpoint=http://127.0.0.1:1".to_owned();
    assert_eq!(dcp(args).ok(), listed);
}

#[test]
fn ranks_write_to_a_bucket_what_one_process_writes() {
    let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
    let source = "s3://bucket/source";
    bucket.alone(&["copy", fixtures().join("fsdp2_adam_2r").to_str().unwrap(), source]).ok();
    let commands: [&[&str]; 5] = [
        &["convert", source, "OUT", "--to", "dcp", "--ranks", "5"],
        &["convert", source, "OUT", "--to", "hf", "--max-shard-size", "16KiB", "--everything"],
        &["reshard", source, "OUT", "--ranks", "4"],
        &["average", source, source, "--out", "OUT", "--to", "dcp", "--ranks", "4"],
        &["copy", source, "OUT"],
    ];
    for (at, command) in commands.iter().enumerate() {
        let (alone, together) =
            (format!("s3://bucket/{at}/alone"), format!("s3://bucket/{at}/together"));
        let to = |target: &str| -> Vec<String> {
            command.iter().map(|arg| arg.replace("OUT", target)).collect()
        };
        bucket.alone(&to(&alone)).ok();
        bucket.on_ranks(&to(&together)).ok();
        let alone = bucket.fetch(&alone, &folder.path().join(format!("{at}-alone")));
        let together = bucket.fetch(&together, &folder.path().join(format!("{at}-together")));
        assert!(!alone.is_empty());
        assert_eq!(together.keys().collect::<Vec<_>>(), alone.keys().collect::<Vec<_>>());
        assert!(together == alone, "{command:?}");
    }
    for command in [&["verify", "--deep", "--json", source][..], &["stats", "--json", source]] {
        assert_eq!(bucket.on_ranks(command).ok(), bucket.alone(command).ok());
    }
}

/// What each conversion is killed in: one that writes checkpoints of PyTorch, and models of Hugging Face.
const CONVERSIONS: [&[&str]; 2] =
    [&["--to", "dcp", "--ranks", "9"], &["--to", "hf", "--max-shard-size", "64KiB"]];

/// A model of 24 tensors of 64 KiB each.
fn model(folder: &Path) -> String {
    crate::ranks_write::tensors(folder, 24, [64, 256])
}

#[test]
fn a_rank_that_is_killed_while_all_write_to_a_bucket_ends_them_and_leaves_no_checkpoint() {
    for options in CONVERSIONS {
        let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
        let model = model(folder.path());
        let target = "s3://bucket/run/target";
        let args = [&["convert", &model, target], options].concat();
        // It has written a file, and is in the middle of the next.
        let stall = FaultRule::new(HttpFault::Stall).method("PUT").containing("target/").after(1);
        bucket.proxy.add(stall);
        name_the_lost_rank(bucket.killed(&args));
        bucket.proxy.calm();
        let listed = bucket.alone(&["ls", "s3://bucket/run", "--json"]);
        assert!(!listed.stdout.contains("\"complete\": true"), "{}", listed.stdout);
        assert_ne!(bucket.alone(&["verify", target]).code, 0, "{options:?}");
        bucket.on_ranks(&args).ok();
        bucket.alone(&["diff", &model, target]).ok();
        bucket.alone(&["verify", target, "--deep"]).ok();
    }
}

#[test]
fn a_rank_that_is_killed_while_all_write_to_a_disk_ends_them_and_leaves_no_checkpoint() {
    for options in CONVERSIONS {
        let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
        let (model, source) = (model(folder.path()), "s3://bucket/source");
        bucket.alone(&["convert", &model, source, "--to", "dcp", "--ranks", "9"]).ok();
        let run = folder.path().join("run");
        let target = run.join("target").display().to_string();
        let args = [&["convert", source, &target], options].concat();
        // It has read some data, and is in the middle of the next.
        let stall = FaultRule::new(HttpFault::Stall).method("GET").containing(".distcp").after(1);
        bucket.proxy.add(stall);
        name_the_lost_rank(bucket.killed(&args));
        bucket.proxy.calm();
        if run.exists() {
            let listed = dcp(["ls", run.to_str().unwrap(), "--json"]);
            assert!(!listed.stdout.contains("\"complete\": true"), "{}", listed.stdout);
        }
        assert_ne!(dcp(["verify", &target]).code, 0, "{options:?}");
        bucket.on_ranks(&args).ok();
        dcp(["diff", &model, &target]).ok();
        dcp(["verify", &target, "--deep"]).ok();
        let left = files(target.as_ref());
        let is_left = |name: &String| name.contains(".dcp-tmp.") || name.contains(".dcp-lock.");
        assert!(!left.keys().any(is_left), "{:?}", left.keys());
    }
}

#[test]
fn a_rank_that_is_killed_while_all_unshard_leaves_no_file() {
    let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
    let (model, source) = (model(folder.path()), "s3://bucket/source");
    bucket.alone(&["convert", &model, source, "--to", "dcp", "--rename", "s/^/model./"]).ok();
    let target = "s3://bucket/target";
    let args = ["unshard", source, target, "--strategy", "per-tensor"];
    // It has written a file, and is in the middle of the next.
    let stall = FaultRule::new(HttpFault::Stall).method("PUT").containing("model-weight").after(1);
    bucket.proxy.add(stall);
    name_the_lost_rank(bucket.killed(&args));
    bucket.proxy.calm();
    // Without --overwrite, any file there is an error.
    bucket.on_ranks(&args).ok();
    bucket.alone(&["diff", &model, "s3://bucket/target/model"]).ok();
}

#[test]
fn a_rank_that_is_killed_ends_statistics_and_differences() {
    let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
    let source = "s3://bucket/source";
    bucket.alone(&["copy", &one_chunk(folder.path()), source]).ok();
    for args in [&["stats", source, "--max-memory", "1MiB"][..], &["diff", source, source]] {
        let stall = FaultRule::new(HttpFault::Stall).method("GET").containing(".distcp").after(1);
        bucket.proxy.add(stall);
        name_the_lost_rank(bucket.killed(args));
        bucket.proxy.calm();
    }
}
