//! Object stores: requests, bytes and speeds, ours beside `object_store` alone and beside PyTorch
//! with s3fs, at the same server in one run.
//!
//! The Rust half is `dcp-cli/examples/bench_object.rs`, PyTorch's is `xtask/bench/python/bench_object.py`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::machine::machine;
use xtask_host::emulators::Emulators;
use xtask_host::process::output;
use xtask_host::{Result, process, venv, workspace};

/// Latencies that are added to every answer, in milliseconds.
const LATENCIES: [u32; 3] = [0, 20, 100];
const BUCKET: &str = "bench";
/// moto takes hundreds of megabytes a second at most.
const MOTO_GIB: &str = "0.25";
/// The bytes that a save, and a load, may have in flight.
const BUDGET_MIB: u64 = 256;
const USAGE: &str = "usage: cargo xtask bench object [--gib N] [--rounds N] [--no-torch]";

pub(crate) fn main(args: &[&str]) -> Result {
    let (mut gib, mut rounds, mut with_torch) = ("1", 5, true);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--gib" => gib = args.next().ok_or(USAGE)?,
            "--rounds" => rounds = args.next().ok_or(USAGE)?.parse::<usize>()?.max(1),
            "--no-torch" => with_torch = false,
            _ => return Err(USAGE.into()),
        }
    }
    let python = with_torch.then(venv::object).transpose()?;
    let rust = build()?;
    let machine = machine();
    let mut bench = Bench { rust, python, rounds, rows: Vec::new(), measured: Vec::new() };
    let counts = bench.counts()?;
    for milliseconds in LATENCIES {
        bench.speeds(gib, milliseconds)?;
    }
    bench.moto()?;

    println!("\n{machine}\n");
    println!("| what | ours | beside | ratio (of each round) |");
    println!("|---|---:|---:|---:|");
    for Row { what, ours, beside, ratio } in &bench.rows {
        println!("| {what} | {ours} | {beside} | {ratio} |");
    }
    let measured = bench.measured;
    println!("\n{}", json!({"machine": machine, "counts": counts, "measured": measured}));
    Ok(())
}

struct Row {
    what: String,
    ours: String,
    beside: String,
    ratio: String,
}

struct Bench {
    rust: PathBuf,
    /// PyTorch's, unless it is left out.
    python: Option<PathBuf>,
    rounds: usize,
    rows: Vec<Row>,
    measured: Vec<Value>,
}

/// A server in a process of its own. Closing its standard input ends it.
struct Server {
    child: Child,
    endpoint: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

/// Who is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Ours,
    Alone,
    Torch,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Alone => "object_store",
            Self::Torch => "torch",
        }
    }
}

/// What one process took.
#[derive(Clone, Copy)]
struct Taken {
    seconds: f64,
    cpu_seconds: f64,
    memory: u64,
}

/// The processes of one job, a round in each element.
struct Rounds {
    ours: Vec<Taken>,
    alone: Vec<Taken>,
    torch: Vec<Taken>,
}

impl Bench {
    fn serve(&self, milliseconds: u32) -> Result<Server> {
        let mut child = Command::new(&self.rust)
            .args(["serve", BUCKET, &milliseconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Server { child, endpoint: line.trim().to_owned() })
    }

    /// Requests and bytes, which do not depend on the machine.
    fn counts(&mut self) -> Result<Value> {
        let fixtures = workspace::root().join("fixtures");
        let counted: Value =
            serde_json::from_str(&output(Command::new(&self.rust).arg("count").arg(fixtures))?)?;
        for (name, what, beside) in [
            (
                "olmo_load",
                "load the 14 tensors of the model of a 2-rank OLMo-core checkpoint",
                "30 requests by OLMo-core",
            ),
            ("olmo_unchecked", "the same with `check_files(false)`", "30 requests by OLMo-core"),
            ("olmo_inspect", "`dcp inspect` of it", "—"),
            ("list", "`dcp ls` of a run of 100 steps", "—"),
            ("reshard", "8 ranks saved, 6 load", "bytes needed"),
        ] {
            let number = |field: &str| counted[name][field].as_u64().unwrap_or_default();
            let (requests, bytes, needed) =
                (number("requests"), number("bytes"), number("bytes_needed"));
            let ratio = match name {
                "olmo_load" | "olmo_unchecked" => format!("{:.2}", requests as f64 / 30.0),
                "reshard" => format!("{:.3}", bytes as f64 / needed as f64),
                _ => "—".into(),
            };
            let beside = match needed {
                needed if name == "reshard" => format!("{needed} {beside}"),
                _ => beside.into(),
            };
            self.rows.push(Row {
                what: what.into(),
                ours: format!("{requests} requests, {bytes} bytes"),
                beside,
                ratio,
            });
        }
        let waits = |name: &str| counted["answers"][name].as_u64().unwrap_or_default();
        for (name, what) in [("first", "first save"), ("overwrite", "overwrite")] {
            self.rows.push(Row {
                what: format!("{what} of 64 MiB: answers waited for, one after the other"),
                ours: waits(name).to_string(),
                beside: format!("{} by `object_store` alone", waits("alone")),
                ratio: "—".into(),
            });
        }
        Ok(counted)
    }

    /// Saves and loads at a server that is fast, and far away.
    fn speeds(&mut self, gib: &str, milliseconds: u32) -> Result {
        let mut all = [Rounds::new(), Rounds::new()];
        for round in 0..self.rounds {
            let server = self.serve(milliseconds)?;
            let environment = Environment::new(&server.endpoint, BUCKET);
            self.round(round, gib, &environment, &mut all)?;
        }
        self.add(&format!("{gib} GiB, {milliseconds} ms"), gib, all)
    }

    /// The same at moto: a server in Python, which all wait for.
    fn moto(&mut self) -> Result {
        let store = Emulators::s3_only()?;
        let bucket = store.variable("DCP_TEST_S3_BUCKET")?;
        let environment = Environment::new(store.variable("DCP_TEST_S3_ENDPOINT")?, bucket);
        let mut all = [Rounds::new(), Rounds::new()];
        for round in 0..self.rounds.min(3) {
            self.round(round, MOTO_GIB, &environment, &mut all)?;
        }
        self.add(&format!("{MOTO_GIB} GiB, moto"), MOTO_GIB, all)
    }

    /// One process of each. They take turns, in another order in every second round, so that what
    /// else the machine does meets all.
    fn round(
        &self,
        round: usize,
        gib: &str,
        environment: &Environment,
        [saves, loads]: &mut [Rounds; 2],
    ) -> Result {
        let mut order = vec![Who::Ours, Who::Alone];
        if self.python.is_some() {
            order.push(Who::Torch);
        }
        if round % 2 == 1 {
            order.reverse();
        }
        for (job, rounds) in [("save", saves), ("load", loads)] {
            for who in &order {
                eprintln!("round {round}: {job} {gib} GiB, {}", who.name());
                let taken = self.measure(*who, job, round, gib, environment)?;
                rounds.of(*who).push(taken);
            }
        }
        Ok(())
    }

    fn measure(
        &self,
        who: Who,
        job: &str,
        round: usize,
        gib: &str,
        environment: &Environment,
    ) -> Result<Taken> {
        let bucket = &environment.bucket;
        let url = format!("s3://{bucket}/{}{round}", who.name());
        let mut command = match (who, &self.python) {
            (Who::Torch, Some(python)) => {
                let mut command = Command::new(python);
                command.env("PYTHONDONTWRITEBYTECODE", "1");
                command.arg(workspace::root().join("xtask/bench/python/bench_object.py"));
                command.args([job, &url, gib]);
                command
            }
            (Who::Alone, _) => {
                let mut command = Command::new(&self.rust);
                command.args([&format!("raw-{job}"), bucket, gib]);
                command
            }
            _ => {
                let mut command = Command::new(&self.rust);
                command.args([job, &url, gib]);
                command
            }
        };
        if who != Who::Torch {
            command.arg(format!("aws_endpoint={}", environment.endpoint));
            command.arg("aws_allow_http=true");
        }
        command.env("AWS_ENDPOINT_URL", &environment.endpoint);
        command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
        command.env("AWS_REGION", "us-east-1").env("AWS_DEFAULT_REGION", "us-east-1");
        let report: Value = serde_json::from_str(&output(&mut command)?)?;
        Ok(Taken {
            seconds: report["seconds"].as_f64().ok_or("no seconds")?,
            cpu_seconds: report["cpu_seconds"].as_f64().ok_or("no cpu_seconds")?,
            memory: report["memory"].as_u64().ok_or("no memory")?,
        })
    }

    /// The rows of one place.
    fn add(&mut self, place: &str, gib: &str, [saves, loads]: [Rounds; 2]) -> Result {
        let bytes = gib.parse::<f64>()? * f64::from(1 << 30);
        let speed = |taken: &[Taken]| {
            format!("{:.0} MB/s", bytes / 1e6 / median(taken.iter().map(|taken| taken.seconds)))
        };
        for (job, rounds) in [("save", saves), ("load", loads)] {
            let what = format!("{job} {place}");
            let mut row = |beside: String, ratio: String| {
                let ours = speed(&rounds.ours);
                self.rows.push(Row { what: what.clone(), ours, beside, ratio });
            };
            row(
                format!("{} by `object_store` alone", speed(&rounds.alone)),
                rounds.ratios(&rounds.alone, |taken| taken.seconds),
            );
            if !rounds.torch.is_empty() {
                row(
                    format!("{} by PyTorch {} with s3fs", speed(&rounds.torch), venv::NEWEST),
                    rounds.ratios(&rounds.torch, |taken| taken.seconds),
                );
            }
            let cpu = |taken: &[Taken]| median(taken.iter().map(|taken| taken.cpu_seconds));
            self.rows.push(Row {
                what: format!("{what}: processor time"),
                ours: format!("{:.2} s", cpu(&rounds.ours)),
                beside: format!("{:.2} s by `object_store` alone", cpu(&rounds.alone)),
                ratio: rounds.ratios(&rounds.alone, |taken| taken.cpu_seconds),
            });
            let memory = rounds.ours.iter().map(|taken| taken.memory >> 20).max().unwrap_or(0);
            let torch = rounds.torch.iter().map(|taken| taken.memory >> 20).max();
            let torch = torch.map(|mib| format!(", PyTorch {mib} MiB")).unwrap_or_default();
            self.rows.push(Row {
                what: format!("{what}: peak memory over the state"),
                ours: format!("{memory} MiB"),
                beside: format!("budget {BUDGET_MIB} MiB{torch}"),
                ratio: "—".into(),
            });
            for (who, taken) in [
                (Who::Ours, &rounds.ours),
                (Who::Alone, &rounds.alone),
                (Who::Torch, &rounds.torch),
            ] {
                let taken = taken.iter();
                self.measured.push(json!({
                    "job": job,
                    "place": place,
                    "who": who.name(),
                    "seconds": taken.clone().map(|one| one.seconds).collect::<Vec<_>>(),
                    "cpu_seconds": taken.clone().map(|one| one.cpu_seconds).collect::<Vec<_>>(),
                    "memory": taken.map(|one| one.memory).collect::<Vec<_>>(),
                }));
            }
        }
        Ok(())
    }
}

/// Where a store is.
struct Environment {
    endpoint: String,
    bucket: String,
}

impl Environment {
    fn new(endpoint: &str, bucket: &str) -> Self {
        Self { endpoint: endpoint.to_owned(), bucket: bucket.to_owned() }
    }
}

impl Rounds {
    fn new() -> Self {
        Self { ours: Vec::new(), alone: Vec::new(), torch: Vec::new() }
    }

    fn of(&mut self, who: Who) -> &mut Vec<Taken> {
        match who {
            Who::Ours => &mut self.ours,
            Who::Alone => &mut self.alone,
            Who::Torch => &mut self.torch,
        }
    }

    /// How many times as long the others take as ours: the median, and that of each round.
    fn ratios(&self, others: &[Taken], of: fn(&Taken) -> f64) -> String {
        let ratios = self.ours.iter().zip(others).map(|(ours, other)| of(other) / of(ours));
        let ratios = ratios.collect::<Vec<_>>();
        let each = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>();
        format!("**{:.2}** ({})", median(ratios.iter().copied()), each.join(", "))
    }
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers = numbers.collect::<Vec<_>>();
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => numbers[len / 2],
        len => f64::midpoint(numbers[len / 2 - 1], numbers[len / 2]),
    }
}

fn build() -> Result<PathBuf> {
    let arguments = ["build", "--quiet", "--profile", "dist", "-p", "dcp-cli"];
    process::run(workspace::cargo().args(arguments).args(["--example", "bench_object"]))?;
    Ok(workspace::target()?.join("dist").join("examples").join("bench_object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_two() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
    }
}
