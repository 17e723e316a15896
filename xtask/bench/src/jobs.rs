//! What several processes make of a command that they share: bytes per second, and bytes read per
//! byte that is needed.
//!
//! The processes are started on this machine with the variables of a launcher. Their reads are
//! those of the trace of each (`--trace`), in a run of its own.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::machine::machine;
use xtask_host::process::{Scratch, output, run, run_ranks};
use xtask_host::{Result, port, workspace};

const ROUNDS: usize = 3;
const PROCESSES: [u32; 3] = [1, 2, 4];
/// Longer than any of it takes.
const LIMIT: Duration = Duration::from_secs(1800);
/// Files of the checkpoint that is read.
const FILES: u32 = 8;
const USAGE: &str = "usage: cargo xtask bench jobs [--gib N] [--folder DIR]";

pub(crate) fn main(args: &[&str]) -> Result {
    let (mut gib, mut folder) = (1_u64, PathBuf::from("/dev/shm"));
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let value = args.next().ok_or(USAGE)?;
        match *arg {
            "--gib" => gib = value.parse::<u64>()?.max(1),
            "--folder" => folder = PathBuf::from(value),
            _ => return Err(USAGE.into()),
        }
    }
    let arguments = ["build", "--quiet", "--profile", "dist", "-p", "dcp-cli", "--bin", "dcp"];
    run(workspace::cargo().args(arguments))?;
    let command = workspace::target()?.join("dist").join("dcp");
    let machine = machine();
    let scratch = Scratch::new(&folder, "dcp-bench", false)?;
    let bench = Bench { command, folder: scratch.path().to_owned(), bytes: gib << 30 };
    bench.checkpoint()?;
    let rows = JOBS.iter().map(|job| bench.row(job)).collect::<Result<Vec<_>>>()?;

    println!("\n{machine}\n");
    println!("| {gib} GiB in {FILES} files | 1 process | 2 | 4 | read per byte |");
    println!("|---|---:|---:|---:|---:|");
    rows.iter().for_each(|row| println!("{row}"));
    Ok(())
}

/// A command that processes share.
struct Job {
    name: &'static str,
    /// The command with SOURCE and TARGET in place of their names.
    args: &'static [&'static str],
    writes: bool,
}

const JOBS: [Job; 7] = [
    Job { name: "`verify --deep`", args: &["verify", "SOURCE", "--deep"], writes: false },
    Job { name: "`stats`", args: &["stats", "SOURCE"], writes: false },
    Job { name: "`diff`", args: &["diff", "SOURCE", "SOURCE"], writes: false },
    Job {
        name: "`reshard --ranks 12`",
        args: &["reshard", "SOURCE", "TARGET", "--ranks", "12"],
        writes: true,
    },
    Job {
        name: "`convert --to hf --max-shard-size 128MiB`",
        args: &["convert", "SOURCE", "TARGET", "--to", "hf", "--max-shard-size", "128MiB"],
        writes: true,
    },
    Job {
        name: "`average --to dcp --ranks 12` of two",
        args: &["average", "SOURCE", "SOURCE", "--out", "TARGET", "--to", "dcp", "--ranks", "12"],
        writes: true,
    },
    Job {
        name: "`copy --lengths`",
        args: &["copy", "SOURCE", "TARGET", "--lengths"],
        writes: true,
    },
];

struct Bench {
    command: PathBuf,
    folder: PathBuf,
    bytes: u64,
}

impl Bench {
    /// A checkpoint of PyTorch's format, made of a safetensors file of 64 tensors.
    fn checkpoint(&self) -> Result {
        const TENSORS: u64 = 64;
        let each = self.bytes / TENSORS;
        let tensor = |at: u64| {
            let (start, end) = (at * each, (at + 1) * each);
            format!(
                r#""layers.{at}.weight":{{"dtype":"F32","shape":[{},256],"data_offsets":[{start},{end}]}}"#,
                each / 1024
            )
        };
        let header = format!("{{{}}}", (0..TENSORS).map(tensor).collect::<Vec<_>>().join(","));
        let file = self.folder.join("made.safetensors");
        let mut out = std::io::BufWriter::new(fs::File::create(&file)?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        // Random values from 1 to 2: processors take a hundred times as long to add subnormal ones,
        // which weights hardly have.
        const FRACTIONS: u64 = 0x007f_ffff_007f_ffff;
        const ONES: u64 = 0x3f80_0000_3f80_0000;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..self.bytes / 8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            out.write_all(&((state >> 9) & FRACTIONS | ONES).to_le_bytes())?;
        }
        out.flush()?;
        drop(out);
        let mut convert = Command::new(&self.command);
        convert.args(["-q", "--single", "convert"]).args([&file, &self.source()]);
        output(convert.args(["--to", "dcp", "--ranks", &FILES.to_string()]))?;
        fs::remove_file(file)?;
        Ok(())
    }

    fn source(&self) -> PathBuf {
        self.folder.join("checkpoint")
    }

    fn row(&self, job: &Job) -> Result<String> {
        let mut row = format!("| {} |", job.name);
        let mut alone = None;
        let mut read = Vec::new();
        for processes in PROCESSES {
            let mut fastest = f64::INFINITY;
            for _ in 0..ROUNDS {
                fastest = fastest.min(self.run(job, processes, None)?);
            }
            let of_alone = match alone {
                None => String::new(),
                Some(alone) => format!(" ({:.2} ×)", alone / fastest),
            };
            alone = alone.or(Some(fastest));
            let rate = self.bytes as f64 / fastest / f64::from(1 << 20);
            row.push_str(&format!(" {rate:.0} MiB/s{of_alone} |"));
            read.push(format!("{:.3}", self.read_per_byte(job, processes)?));
        }
        Ok(format!("{row} {} |", read.join(", ")))
    }

    /// Seconds from the start of the processes to the end of the last.
    fn run(&self, job: &Job, processes: u32, trace: Option<&Path>) -> Result<f64> {
        let (_reserved, port) = port::reserved()?;
        let target = self.folder.join("target");
        let of_rank = |rank: u32| {
            let mut command = Command::new(&self.command);
            command.arg("-q").args(job.args.iter().map(|&arg| match arg {
                "SOURCE" => self.source(),
                "TARGET" => target.clone(),
                arg => PathBuf::from(arg),
            }));
            if let Some(trace) = trace {
                command.arg("--trace").arg(trace.join("trace.json"));
            }
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", processes.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("DCP_MASTER_PORT", port.to_string())
                .stdout(std::process::Stdio::null());
            command
        };
        let commands = (0..processes).map(of_rank).collect();
        let start = Instant::now();
        run_ranks(commands, LIMIT)?;
        let seconds = start.elapsed().as_secs_f64();
        if job.writes {
            fs::remove_dir_all(target)?;
        }
        Ok(seconds)
    }

    /// Bytes that all processes read from storages, per byte of the checkpoint.
    fn read_per_byte(&self, job: &Job, processes: u32) -> Result<f64> {
        let traces = self.folder.join("traces");
        fs::create_dir(&traces)?;
        self.run(job, processes, Some(&traces))?;
        let mut read = 0;
        for entry in fs::read_dir(&traces)? {
            let json =
                output(Command::new(&self.command).args(["trace", "--json"]).arg(entry?.path()))?;
            let trace: Value = serde_json::from_str(&json)?;
            let files = trace["files"].as_array().ok_or("a trace without files")?;
            let reads = files.iter().filter(|file| file["written"] == false);
            read += reads.filter_map(|file| file["bytes"].as_u64()).sum::<u64>();
        }
        fs::remove_dir_all(traces)?;
        Ok(read as f64 / self.bytes as f64)
    }
}
