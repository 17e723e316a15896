//! One command on several ranks, each a process with the variables of a launcher.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread;

use dcp_testing::{loopback, reserved_port};

use crate::support::{Run, command, copy_of, dcp, finish, fixtures, without_progress};

/// Variables of launchers that the tests may be run under.
const OTHERS: [&str; 10] = [
    "RANK",
    "WORLD_SIZE",
    "DCP_RANK",
    "DCP_WORLD_SIZE",
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_STEP_ID",
    "MASTER_PORT",
];

/// The command without the variables of a launcher.
fn without_launcher(mut command: Command) -> Command {
    for name in OTHERS {
        command.env_remove(name);
    }
    command
}

/// The command of one rank, as torchrun would start it.
pub(crate) fn of_rank(rank: u32, world_size: u32, port: u16) -> Command {
    let mut command = without_launcher(command());
    command
        .env("MASTER_ADDR", loopback().to_string())
        .env("DCP_MASTER_PORT", port.to_string())
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world_size.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a command on ranks, each with arguments of its own.
pub(crate) fn on_ranks_with(world_size: u32, args: impl Fn(u32) -> Vec<String>) -> Vec<Run> {
    let (_reserved, port) = reserved_port();
    let start = |rank| of_rank(rank, world_size, port).args(args(rank)).spawn().unwrap();
    let ranks: Vec<Child> = (0..world_size).map(start).collect();
    let waits = ranks.into_iter().map(|rank| thread::spawn(|| rank.wait_with_output().unwrap()));
    let waits: Vec<_> = waits.collect();
    waits.into_iter().map(|wait| without_waits(finish(wait.join().unwrap()))).collect()
}

/// The run without what a rank says where it waits for others to start.
pub(crate) fn without_waits(mut run: Run) -> Run {
    let says = |line: &&str| !line.contains(" waits for ");
    run.stderr = run.stderr.lines().filter(says).map(|line| format!("{line}\n")).collect();
    run
}

/// Runs a command on ranks, and returns what rank 0 prints. The others print nothing, and all have one
/// exit code.
#[track_caller]
pub(crate) fn on_ranks(world_size: u32, args: &[&str]) -> Run {
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    one_result(on_ranks_with(world_size, |_| args.clone()))
}

#[track_caller]
pub(crate) fn one_result(runs: Vec<Run>) -> Run {
    let mut runs = runs.into_iter();
    let first = runs.next().unwrap();
    for (rank, run) in (1..).zip(runs) {
        assert_eq!(run.code, first.code, "rank {rank}: {}\nrank 0: {}", run.stderr, first.stderr);
        assert_eq!((&*run.stdout, &*run.stderr), ("", ""), "rank {rank}");
    }
    first
}

#[test]
fn ranks_divide_a_deep_check_and_report_what_one_process_reports() {
    let megatron = dcp_testing::fixture("megatron");
    let checkpoints = [
        fixtures().join("fsdp2_adam_2r"),
        fixtures().join("tp_fsdp_2x2"),
        fixtures().join("t21_plain"),
        megatron.join("gpt_tp2dp2_fully_reshardable/ckpt"),
        megatron.join("run_torch_dist_dp2"),
        megatron.join("gpt_fully_reshardable_multibucket_CORRUPT/ckpt"),
    ];
    for checkpoint in checkpoints {
        let args = ["verify", "--deep", "--json", checkpoint.to_str().unwrap()];
        let alone = dcp(args);
        for world_size in 1..=4 {
            let together = on_ranks(world_size, &args);
            assert_eq!(together.code, alone.code, "{}", together.stderr);
            assert_eq!(together.stdout, alone.stdout, "{} on {world_size}", checkpoint.display());
        }
    }
}

#[test]
fn damage_that_any_rank_finds_fails_all_in_one_report() {
    let folder = copy_of("fsdp2_adam_2r");
    for entry in fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "distcp") {
            let mut bytes = fs::read(&path).unwrap();
            for at in (0..bytes.len()).step_by(4096) {
                bytes[at] ^= 0x40;
            }
            fs::write(&path, bytes).unwrap();
        }
    }
    let args = ["verify", "--deep", "--json", folder.path().to_str().unwrap()];
    let alone = dcp(args);
    assert_eq!(alone.code, 1);
    let problems = alone.stdout.matches("\"corrupt\"").count();
    assert!(problems > 4, "{}", alone.stdout);
    for world_size in 2..=4 {
        let together = on_ranks(world_size, &args);
        assert_eq!((together.code, &together.stdout), (1, &alone.stdout), "{world_size}");
    }
}

#[test]
fn an_error_of_one_rank_is_that_of_all() {
    let good = fixtures().join("fsdp2_adam_2r").display().to_string();
    for (failing, world_size) in [(0, 2), (1, 2), (2, 3)] {
        let args = |rank| {
            let uri = if rank == failing { "/no/such/checkpoint" } else { &*good };
            ["verify", "--deep", uri].map(ToOwned::to_owned).to_vec()
        };
        let run = one_result(on_ranks_with(world_size, args));
        run.fails(3, &[&format!("rank {failing}: "), "/no/such/checkpoint"]);
    }
}

#[test]
fn commands_that_are_not_divided_run_on_rank_0() {
    let checkpoint = fixtures().join("fsdp2_adam_2r").display().to_string();
    let args = ["diff", "--keys-only", "--json", &*checkpoint, &*checkpoint];
    assert_eq!(on_ranks(3, &args).ok(), dcp(args).ok());
    let target = tempfile::tempdir().unwrap();
    let target = target.path().join("model.safetensors");
    on_ranks(3, &["convert", &checkpoint, target.to_str().unwrap()]).ok();
    let twice = on_ranks(2, &["convert", &checkpoint, target.to_str().unwrap()]);
    twice.fails(2, &["rank 0: ", "exists"]);
}

#[test]
fn a_process_works_alone_without_a_launcher_or_when_it_is_to() {
    let checkpoint = fixtures().join("fsdp2_adam_2r").display().to_string();
    let args = ["verify", "--deep", "--json", &*checkpoint];
    let alone = dcp(args).ok();
    // Nobody else comes, so a rank that waited would fail.
    let (_reserved, port) = reserved_port();
    let single = of_rank(1, 8, port).args(args).arg("--single").output().unwrap();
    assert_eq!(finish(single).ok(), alone);
    // A batch script of Slurm is one process, whatever the allocation is for.
    let mut script = without_launcher(command());
    script.envs([("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "64")]);
    assert_eq!(finish(script.args(args).output().unwrap()).ok(), alone);
}

#[test]
fn half_of_a_launcher_is_an_error_that_names_the_way_out() {
    let mut half = without_launcher(command());
    half.env("WORLD_SIZE", "2").args(["verify", "--deep", "fsdp2_adam_2r"]);
    finish(half.output().unwrap()).fails(2, &["RANK", "--single"]);
}

#[test]
fn a_taken_port_is_an_error_of_rank_0_that_names_the_variable_alone() {
    let (_taken, port) = dcp_testing::listener();
    let run = of_rank(0, 2, port).args(["verify", "--deep", "fsdp2_adam_2r"]).output().unwrap();
    let run = without_waits(finish(run));
    let address = format!("rank 0 cannot listen at {}:{port}", loopback());
    assert!(run.stderr.contains(&address) && run.stderr.contains("set DCP_MASTER_PORT"), "{run:?}");
    assert!(!run.stderr.contains("on all ranks; --single"), "{run:?}");
    assert_ne!(run.code, 0);
}

/// A rank of a check that takes long, killed when dropped.
struct Working(Child);

impl Drop for Working {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts a long check on two ranks, has `harm` act on rank 1 in the middle of it, and returns how
/// rank 0 ends.
#[cfg(target_os = "linux")]
fn rank_0_after(timeout: &str, harm: impl Fn(&mut Child)) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = crate::interrupt::larger(&folder);
    let (_reserved, port) = reserved_port();
    let start = |rank| {
        let mut command = of_rank(rank, 2, port);
        command.args(["verify", "--deep", "--rank-timeout", timeout, &checkpoint]);
        Working(command.spawn().unwrap())
    };
    let (mut zero, mut one) = (start(0), start(1));
    let mut said = BufReader::new(zero.0.stderr.take().unwrap());
    let mut line = String::new();
    // The first line of its progress: both work.
    while !line.contains("verifying: ") {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it ended before it was harmed");
    }
    harm(&mut one.0);
    let mut stderr = String::new();
    said.read_to_string(&mut stderr).unwrap();
    let code = zero.0.wait().unwrap().code().unwrap();
    Run { code, stdout: String::new(), stderr: without_progress(&stderr) }
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_rank_ends_the_others() {
    let run = rank_0_after("300", |rank| rank.kill().unwrap());
    run.fails(3, &["rank 1", "run the command again"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_stopped_rank_ends_the_others_after_the_timeout() {
    let stop = |rank: &mut Child| {
        let status = Command::new("kill").args(["-STOP", &rank.id().to_string()]).status();
        assert!(status.unwrap().success());
    };
    rank_0_after("20", stop).fails(3, &["rank 1"]);
}

#[test]
fn mpirun_starts_a_deep_check() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("skipped: there is no mpirun");
        return;
    }
    let checkpoint = fixtures().join("fsdp2_adam_2r").display().to_string();
    let args = ["verify", "--deep", "--json", &*checkpoint];
    let output = without_launcher(Command::new("mpirun"))
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["-n", "4", "--oversubscribe", env!("CARGO_BIN_EXE_dcp")])
        .args(args)
        .output()
        .unwrap();
    assert_eq!(finish(output).ok(), dcp(args).ok());
}
