//! What converting a checkpoint costs, beside PyTorch's converter and beside copying the bytes.
//!
//! Every measurement is a command from its start to its end, followed by `sync` of what it wrote
//! where that is on a disk; the fastest of three counts. The checkpoint is one that PyTorch
//! saved.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::machine::{Machine, machine};
use crate::process::{Scratch, output};
use crate::{Result, workspace};

const ROUNDS: usize = 3;
/// Of tensors of 32 MiB, the checkpoints whose peak memory is compared.
const SIZES_MIB: [u64; 3] = [512, 2048, 8192];

/// Prints the tables.
pub(crate) fn main(setup: &Machine) -> Result {
    let bench = Bench { setup };
    let (mut speeds, mut mapped) = (Vec::new(), Vec::new());
    for (place, folder) in [("tmpfs", &setup.tmpfs), ("disk", &setup.disk)] {
        let scratch = Scratch::new(folder, "dcp-bench", false)?;
        speeds.extend(bench.speeds(place, scratch.path())?);
        let scratch = Scratch::new(folder, "dcp-bench", false)?;
        mapped.extend(bench.megatron(place, scratch.path())?);
    }
    // The largest checkpoint and what is made of it are too much for most memories.
    let scratch = Scratch::new(&setup.disk, "dcp-bench", false)?;
    let peaks = bench.peaks(scratch.path())?;
    let listed = bench.many_chunks(scratch.path())?;

    println!("\n{}\n", machine());
    println!("| convert 2 GiB saved by PyTorch | `dcp convert` | `dcp_to_torch_save` | `cp` |");
    println!("|---|---:|---:|---:|");
    for row in speeds {
        println!("{row}");
    }
    println!("\n| Llama of 2 GiB, TP2 PP2 | `dcp convert` | peak memory | `cp` |");
    println!("|---|---:|---:|---:|");
    for row in mapped {
        println!("{row}");
    }
    println!("\n| peak memory | 0.5 GiB | 2 GiB | 8 GiB |");
    println!("|---|---:|---:|---:|");
    for row in peaks {
        println!("{row}");
    }
    println!("\n| list 200 000 chunks of 1 000 tensors | `dcp inspect` | Python with torch |");
    println!("|---|---:|---:|");
    println!("{listed}");
    Ok(())
}

struct Bench<'a> {
    setup: &'a Machine,
}

/// What a command took.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    peak_mib: f64,
}

const TARGETS: [(&str, &str); 2] = [("safetensors", "out.safetensors"), ("torch-save", "out.pt")];

impl Bench<'_> {
    fn speeds(&self, place: &str, folder: &Path) -> Result<Vec<String>> {
        let source = self.checkpoint(folder, 2048)?;
        let copy = self.fastest(&|| self.copy(&source, &folder.join("copy")))?;
        let theirs = self.fastest(&|| self.torch(&source, &folder.join("theirs.pt")))?;
        let mut rows = Vec::new();
        for (format, name) in TARGETS {
            let target = folder.join(name);
            let ours = self.fastest(&|| self.ours(&source, &target, format))?;
            let theirs = match format {
                "torch-save" => {
                    format!("{:.2} s ({:.1} × ours)", theirs.seconds, theirs.seconds / ours.seconds)
                }
                _ => "—".to_owned(),
            };
            rows.push(format!(
                "| → {format}, {place} | {:.2} s ({:.2} × `cp`) | {theirs} | {:.2} s |",
                ours.seconds,
                ours.seconds / copy.seconds,
                copy.seconds
            ));
        }
        Ok(rows)
    }

    /// Between Megatron-Core and Hugging Face.
    fn megatron(&self, place: &str, folder: &Path) -> Result<Vec<String>> {
        let hf = folder.join("hf");
        output(self.script("save-llama").arg(&hf).arg("2048"))?;
        let megatron = folder.join("megatron");
        let ways = [("→ torch_dist", &hf, &megatron), ("→ hf", &megatron, &folder.join("back"))];
        let mut rows = Vec::new();
        for (what, source, target) in ways {
            let copy = self.fastest(&|| self.copy(source, &folder.join("copy")))?;
            remove(&folder.join("copy"));
            let ours = self.fastest(&|| {
                remove(target);
                let mut command = self.measured();
                command.arg(&self.setup.command).args(["-q", "convert"]).args([source, target]);
                if *target == megatron {
                    command.args([
                        "--to",
                        "torch-dist",
                        "--arch",
                        "llama",
                        "--tp",
                        "2",
                        "--pp",
                        "2",
                    ]);
                } else {
                    command.args(["--to", "hf"]);
                }
                cost(&mut command)
            })?;
            rows.push(format!(
                "| {what}, {place} | {:.2} s ({:.2} × `cp`) | {:.0} MiB | {:.2} s |",
                ours.seconds,
                ours.seconds / copy.seconds,
                ours.peak_mib,
                copy.seconds
            ));
        }
        Ok(rows)
    }

    fn peaks(&self, folder: &Path) -> Result<Vec<String>> {
        let mut rows: Vec<String> = TARGETS.iter().map(|(f, _)| format!("| → {f} |")).collect();
        let mut theirs = "| `dcp_to_torch_save` |".to_owned();
        for mib in SIZES_MIB {
            let source = self.checkpoint(folder, mib)?;
            for (row, (format, name)) in rows.iter_mut().zip(TARGETS) {
                let target = folder.join(name);
                let cost = self.ours(&source, &target, format)?;
                row.push_str(&format!(" {:.0} MiB |", cost.peak_mib));
                remove(&target);
            }
            if mib < 8192 {
                let target = folder.join("theirs.pt");
                let cost = self.torch(&source, &target)?;
                theirs.push_str(&format!(" {:.0} MiB |", cost.peak_mib));
                remove(&target);
            } else {
                theirs.push_str(" not run |");
            }
            remove(&source);
        }
        rows.push(theirs);
        Ok(rows)
    }

    /// From the start of the process to its end, which is when it prints.
    fn many_chunks(&self, folder: &Path) -> Result<String> {
        let (saved, cut) = (folder.join("rows"), folder.join("cut"));
        output(self.script("save-rows").arg(&saved))?;
        let mut reshard = Command::new(&self.setup.command);
        output(reshard.args(["-q", "reshard", "-n", "200"]).args([&saved, &cut]))?;
        let ours = self.fastest(&|| {
            let mut command = self.measured();
            cost(command.arg(&self.setup.command).arg("inspect").arg(&cut))
        })?;
        let theirs = self.fastest(&|| {
            let mut command = self.measured();
            command.arg(&self.setup.python);
            command.arg(workspace::root().join("xtask/python/bench.py")).arg("inspect");
            cost(command.arg(&cut))
        })?;
        let shown = |cost: Cost| format!("{:.2} s, {:.0} MiB", cost.seconds, cost.peak_mib);
        Ok(format!("| from a metadata file of 37 MB | {} | {} |", shown(ours), shown(theirs)))
    }

    /// The cheapest of a few runs.
    fn fastest(&self, measure: &dyn Fn() -> Result<Cost>) -> Result<Cost> {
        let mut best = measure()?;
        for _ in 1..ROUNDS {
            let cost = measure()?;
            if cost.seconds < best.seconds {
                best = cost;
            }
        }
        Ok(best)
    }

    /// A checkpoint of so many MiB, saved by PyTorch.
    fn checkpoint(&self, folder: &Path, mib: u64) -> Result<PathBuf> {
        let path = folder.join(format!("saved-{mib}"));
        let mut python = self.script("save-random");
        output(python.arg(&path).arg(mib.to_string()))?;
        Ok(path)
    }

    fn ours(&self, source: &Path, target: &Path, format: &str) -> Result<Cost> {
        remove(target);
        let mut command = self.measured();
        command.arg(&self.setup.command).arg("-q").arg("convert").args([source, target]);
        cost(command.args(["--to", format]))
    }

    fn torch(&self, source: &Path, target: &Path) -> Result<Cost> {
        remove(target);
        let mut command = self.measured();
        command.arg("sh").arg("-c").arg("\"$@\" && sync \"$0\"").arg(target);
        command.arg(&self.setup.python);
        command.arg(workspace::root().join("xtask/python/bench.py")).arg("to-torch-save");
        cost(command.args([source, target]))
    }

    fn copy(&self, source: &Path, target: &Path) -> Result<Cost> {
        remove(target);
        let mut command = self.measured();
        command.arg("sh").arg("-c").arg("cp -r \"$1\" \"$0\" && sync \"$0\"/*");
        cost(command.args([target, source]))
    }

    fn measured(&self) -> Command {
        let mut python = Command::new(&self.setup.python);
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.arg(workspace::root().join("xtask/python/measure.py"));
        python
    }

    fn script(&self, what: &str) -> Command {
        let mut python = Command::new(&self.setup.python);
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.arg(workspace::root().join("xtask/python/bench.py")).arg(what);
        python
    }
}

fn cost(command: &mut Command) -> Result<Cost> {
    let report: Value = serde_json::from_str(&output(command)?)?;
    let number = |field| report.get(field).and_then(Value::as_f64).ok_or("no measurement");
    Ok(Cost { seconds: number("seconds")?, peak_mib: number("peak")? / f64::from(1 << 20) })
}

fn remove(path: &Path) {
    // Most often there is nothing yet.
    let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir_all(path));
}
