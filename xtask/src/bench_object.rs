//! Object stores: requests, bytes and speeds, ours beside `object_store` alone and beside PyTorch
//! with s3fs, against the same server in one run.
//!
//! The Rust half is `dcp-cli/examples/bench_object.rs`, PyTorch's is `xtask/python/bench_object.py`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::emulators::Emulators;
use crate::machine::machine;
use crate::process::output;
use crate::{Result, process, venv, workspace};

/// Latencies that are added to every answer, in milliseconds.
const LATENCIES: [u32; 3] = [0, 20, 100];
const ROUNDS: usize = 3;
const BUCKET: &str = "bench";

pub(crate) fn main(args: &[&str]) -> Result {
    let gib = match *args {
        [] => "1",
        ["--gib", gib] => gib,
        _ => return Err("usage: cargo xtask bench object [--gib N]".into()),
    };
    let bench = Bench { rust: build()?, gib };
    println!("{}\n", machine());
    bench.counts()?;
    bench.speeds()?;
    bench.beside_pytorch()
}

struct Bench<'a> {
    rust: PathBuf,
    gib: &'a str,
}

/// A server in a process of its own. Closing its standard input ends it.
struct Server {
    child: Child,
    /// The option that leads to it.
    option: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

impl Bench<'_> {
    fn serve(&self, milliseconds: u32) -> Result<Server> {
        let mut child = Command::new(&self.rust)
            .args(["serve", BUCKET, &milliseconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Server { option: line.trim().to_owned(), child })
    }

    fn counts(&self) -> Result {
        let fixtures = workspace::root().join("fixtures");
        let counted: Value =
            serde_json::from_str(&output(Command::new(&self.rust).arg("count").arg(fixtures))?)?;
        println!("| what | requests | bytes | bytes for each byte needed |");
        println!("|---|---:|---:|---:|");
        for (name, what) in [
            ("olmo_load", "load the model of a 2-rank OLMo-core checkpoint"),
            ("olmo_inspect", "`dcp inspect` of it"),
            ("list", "`dcp ls` of a run of 100 steps"),
            ("reshard", "8 ranks saved, 6 load"),
        ] {
            let number = |field: &str| counted[name][field].as_u64().unwrap_or_default();
            let (bytes, needed) = (number("bytes"), number("bytes_needed"));
            let ratio = match needed {
                0 => "—".to_owned(),
                _ => format!("{:.3}", bytes as f64 / needed as f64),
            };
            println!("| {what} | {} | {bytes} | {ratio} |", number("requests"));
        }
        println!();
        Ok(())
    }

    fn speeds(&self) -> Result {
        let gib = self.gib;
        println!(
            "| {gib} GiB | latency | ours | `object_store` alone | ratio | memory over the state |"
        );
        println!("|---|---:|---:|---:|---:|---:|");
        for milliseconds in LATENCIES {
            for (what, raw, name) in [("save", "raw-save", "save"), ("load", "raw-load", "load")] {
                let (mut ours, mut alone, mut memory) = (f64::INFINITY, f64::INFINITY, 0);
                for round in 0..ROUNDS {
                    let server = self.serve(milliseconds)?;
                    let url = format!("gs://{BUCKET}/{round}");
                    let run = |args: &[&str]| -> Result<Value> {
                        let mut command = Command::new(&self.rust);
                        command.args(args).arg(&server.option);
                        Ok(serde_json::from_str(&output(&mut command)?)?)
                    };
                    if name == "load" {
                        run(&["save", &url, gib])?;
                        run(&["raw-save", BUCKET, gib])?;
                    }
                    let found = run(&[what, &url, gib])?;
                    ours = ours.min(seconds(&found)?);
                    memory = memory.max(found["memory"].as_u64().unwrap_or_default());
                    alone = alone.min(seconds(&run(&[raw, BUCKET, gib])?)?);
                }
                println!(
                    "| {name} | {milliseconds} ms | {} | {} | {:.2} | {} MiB |",
                    self.speed(ours),
                    self.speed(alone),
                    alone / ours,
                    memory >> 20
                );
            }
        }
        println!();
        Ok(())
    }

    fn speed(&self, seconds: f64) -> String {
        let gib: f64 = self.gib.parse().unwrap_or_default();
        format!("{:.0} MB/s", gib * 1_073.741_824 / seconds)
    }
}

fn seconds(report: &Value) -> Result<f64> {
    report["seconds"].as_f64().ok_or_else(|| "no seconds".into())
}

fn build() -> Result<PathBuf> {
    let arguments = ["build", "--quiet", "--profile", "dist", "-p", "dcp-cli"];
    process::run(workspace::cargo().args(arguments).args(["--example", "bench_object"]))?;
    Ok(workspace::target()?.join("dist").join("examples").join("bench_object"))
}

impl Bench<'_> {
    /// The same state by PyTorch with fsspec and s3fs, and by us, at moto: a server in Python, which
    /// both wait for.
    fn beside_pytorch(&self) -> Result {
        /// moto takes hundreds of megabytes a second at most.
        const GIB: &str = "0.25";
        let store = Emulators::s3_only()?;
        let bucket = store.variable("DCP_TEST_S3_BUCKET")?;
        let endpoint = store.variable("DCP_TEST_S3_ENDPOINT")?;
        let python = venv::object()?;
        println!("| {GIB} GiB at moto | ours | PyTorch {} with s3fs | ratio |", venv::NEWEST);
        println!("|---|---:|---:|---:|");
        for what in ["save", "load"] {
            let (mut ours, mut theirs) = (f64::INFINITY, f64::INFINITY);
            for round in 0..ROUNDS {
                let url = |who: &str| format!("s3://{bucket}/{who}{round}");
                let options = [format!("aws_endpoint={endpoint}"), "aws_allow_http=true".into()];
                let mut rust = Command::new(&self.rust);
                rust.envs(store.variables()).args([what, &url("ours"), GIB]).args(&options);
                ours = ours.min(seconds(&serde_json::from_str(&output(&mut rust)?)?)?);
                let script = workspace::root().join("xtask/python/bench_object.py");
                let mut torch = Command::new(&python);
                torch.envs(store.variables()).env("AWS_ENDPOINT_URL", endpoint);
                torch.env("PYTHONDONTWRITEBYTECODE", "1");
                torch.arg(script).args([what, &url("torch"), GIB]);
                theirs = theirs.min(seconds(&serde_json::from_str(&output(&mut torch)?)?)?);
            }
            println!("| {what} | {ours:.2} s | {theirs:.2} s | {:.1} |", theirs / ours);
        }
        Ok(())
    }
}
