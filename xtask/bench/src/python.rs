//! Speeds of the Python package beside PyTorch's own functions and plain system calls.
//!
//! Every measurement is a process of its own (`xtask/bench/python/bench_package.py`). Those of one row
//! alternate, and the median of nine counts: of a save, the best is luck on a disk that others use too.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::machine::machine;
use xtask_host::process::{Scratch, output, run};
use xtask_host::{Result, venv, workspace};

const ROUNDS: usize = 9;

/// Prints the table, or only the rows whose names begin with one of the arguments.
pub(crate) fn main(args: &[&str]) -> Result {
    let (mut gib, mut rounds) = ("2".to_owned(), ROUNDS);
    let mut disk = workspace::target()?;
    let mut parts = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--gib" => gib = (*args.next().ok_or("--gib needs a number")?).to_owned(),
            "--rounds" => rounds = args.next().ok_or("--rounds needs a number")?.parse()?,
            "--disk" => disk = PathBuf::from(args.next().ok_or("--disk needs a folder")?),
            part => parts.push(part.to_owned()),
        }
    }
    let python = venv::python(venv::NEWEST)?;
    let scratch = Scratch::new(Path::new("/dev/shm"), "dcp-bench-python", false)?;
    let on_disk = Scratch::new(&disk, "dcp-bench-python", false)?;
    let site = install(&python, on_disk.path())?;
    let table = Table { python, site, gib, rounds, parts };
    println!("\n{}\n", machine());
    println!("| what | distcp | beside |\n|---|---:|---:|");
    table.saves("tmpfs", scratch.path())?;
    table.saves("disk", on_disk.path())?;
    table.loads("tmpfs", scratch.path())?;
    table.hugging_face(scratch.path())?;
    table.background(scratch.path())?;
    table.starts()
}

/// Builds the wheel as it is published, and installs it into a folder.
fn install(python: &Path, folder: &Path) -> Result<PathBuf> {
    venv::add(python, "wheel-tools", &["maturin==1.10.2"])?;
    let (wheels, site) = (folder.join("wheels"), folder.join("site"));
    let mut build = Command::new(python);
    build.args(["-m", "maturin", "build", "--quiet", "--release", "--locked", "--manifest-path"]);
    build.arg(workspace::root().join("dcp-python/Cargo.toml"));
    run(build.arg("--target-dir").arg(workspace::target()?).arg("--out").arg(&wheels))?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&site);
    for wheel in std::fs::read_dir(&wheels)? {
        let wheel = wheel?;
        println!("wheel: {:.1} MB", wheel.metadata()?.len() as f64 / 1e6);
        pip.arg(wheel.path());
    }
    run(&mut pip)?;
    Ok(site)
}

struct Table {
    python: PathBuf,
    site: PathBuf,
    gib: String,
    rounds: usize,
    parts: Vec<String>,
}

impl Table {
    fn has_row(&self, what: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|part| what.starts_with(part.as_str()))
    }

    /// One measurement.
    fn measure(&self, args: &[&str]) -> Result<f64> {
        let mut command = Command::new(&self.python);
        command.env("PYTHONPATH", &self.site);
        command.arg(workspace::root().join("xtask/bench/python/bench_package.py")).args(args);
        let text = output(&mut command)?;
        let line = text.lines().last().unwrap_or_default();
        let value: Value = serde_json::from_str(line)?;
        Ok(value["value"].as_f64().unwrap_or(f64::NAN))
    }

    /// The median of each contender; their measurements alternate. `before` is called for each.
    fn medians(
        &self,
        contenders: &[&str],
        before: impl Fn(&str) -> Result,
        args: impl Fn(&str) -> Vec<String>,
    ) -> Result<Vec<f64>> {
        let mut all = vec![Vec::new(); contenders.len()];
        for _ in 0..self.rounds {
            for (who, found) in contenders.iter().zip(&mut all) {
                before(who)?;
                let args = args(who);
                found.push(self.measure(&args.iter().map(String::as_str).collect::<Vec<_>>())?);
            }
        }
        Ok(all
            .into_iter()
            .map(|mut found| {
                found.sort_by(f64::total_cmp);
                found.get(found.len() / 2).copied().unwrap_or(f64::NAN)
            })
            .collect())
    }

    /// A row of speeds; the first contender is ours.
    fn speeds(&self, what: &str, contenders: &[&str], seconds: &[f64]) {
        let gb = self.gib.parse().unwrap_or(0.0) * 1.073_741_824;
        let text = |seconds: &f64| format!("{:.2} GB/s", gb / seconds);
        let beside = contenders.iter().zip(seconds).skip(1);
        let beside: Vec<_> =
            beside.map(|(who, seconds)| format!("{who} {}", text(seconds))).collect();
        let ours = seconds.first().map_or_else(String::new, text);
        println!("| {what} | {ours} | {} |", beside.join(", "));
    }

    fn saves(&self, place: &str, folder: &Path) -> Result {
        let what = format!("save of {} GiB to {place}", self.gib);
        if !self.has_row(&what) {
            return Ok(());
        }
        let contenders = ["distcp", "writer", "torch1", "torch2", "torch4", "plain"];
        let path = folder.join("saved");
        let remove = |_: &str| {
            // There is nothing before the first one.
            let _ = std::fs::remove_dir_all(&path);
            Ok(())
        };
        let args = |who: &str| self.args("save", who, &path);
        self.speeds(&what, &contenders, &self.medians(&contenders, remove, args)?);
        remove("")
    }

    fn loads(&self, place: &str, folder: &Path) -> Result {
        let what = format!("load of {} GiB from {place}", self.gib);
        if !self.has_row(&what) {
            return Ok(());
        }
        let path = folder.join("stored");
        let text = path.display().to_string();
        self.measure(&["make", &text, &self.gib])?;
        let contenders = ["distcp", "reader", "torch", "plain"];
        let args = |who: &str| self.args("load", who, &path);
        self.speeds(&what, &contenders, &self.medians(&contenders, |_| Ok(()), args)?);
        Ok(std::fs::remove_dir_all(&path)?)
    }

    fn hugging_face(&self, folder: &Path) -> Result {
        let what = format!("hf folder of {} GiB in 8 files into FSDP2 on 2 ranks", self.gib);
        if !self.has_row(&what) {
            return Ok(());
        }
        let path = folder.join("model");
        let text = path.display().to_string();
        self.measure(&["make-hf", &text, &self.gib, "8"])?;
        let contenders = ["distcp", "torch", "safetensors"];
        let args = |who: &str| vec!["hf".to_owned(), who.to_owned(), text.clone()];
        self.speeds(&what, &contenders, &self.medians(&contenders, |_| Ok(()), args)?);
        Ok(std::fs::remove_dir_all(&path)?)
    }

    fn background(&self, folder: &Path) -> Result {
        let path = folder.join("background");
        let fresh = |_: &str| {
            let _ = std::fs::remove_dir_all(&path);
            Ok(std::fs::create_dir_all(&path)?)
        };
        let what = format!("stop of the caller in async_save of {} GiB", self.gib);
        if self.has_row(&what) {
            let contenders = ["distcp", "thread"];
            let found = self.medians(&contenders, fresh, |who| self.args("stall", who, &path))?;
            let text = |seconds: &f64| format!("{:.3} s", seconds);
            let [ours, thread] = found.as_slice() else { return Ok(()) };
            println!("| {what} | {} | thread {} |", text(ours), text(thread));
        }
        let what = "speed of Python beside an async_save";
        if self.has_row(what) {
            let contenders = ["distcp", "thread"];
            let found = self.medians(&contenders, fresh, |who| self.args("beside", who, &path))?;
            let [ours, thread] = found.as_slice() else { return Ok(()) };
            println!("| {what}, of that without | {ours:.2} | thread {thread:.2} |");
        }
        let _ = std::fs::remove_dir_all(&path);
        Ok(())
    }

    fn starts(&self) -> Result {
        let what = "start of an interpreter with import distcp";
        if !self.has_row(what) {
            return Ok(());
        }
        let contenders = ["distcp", "python", "torch"];
        let args = |who: &str| vec!["start".to_owned(), who.to_owned()];
        let found = self.medians(&contenders, |_| Ok(()), args)?;
        let [ours, python, torch] = found.as_slice() else { return Ok(()) };
        let ms = |seconds: &f64| format!("{:.0} ms", seconds * 1e3);
        println!("| {what} | {} | python {}, torch {} |", ms(ours), ms(python), ms(torch));
        Ok(())
    }

    fn args(&self, name: &str, who: &str, path: &Path) -> Vec<String> {
        vec![name.to_owned(), who.to_owned(), path.display().to_string(), self.gib.clone()]
    }
}
