//! What converting a checkpoint costs, beside PyTorch's converter and beside copying the bytes.
//!
//! Every measurement is a command from its start to its end, followed by `sync` of what it wrote
//! where that is on a disk. The commands of a table take turns, and the fastest of each counts; what
//! one wrote is removed before the next begins. The checkpoint is one that PyTorch saved.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::machine::{Machine, machine};
use crate::rows::free_mib;
use xtask_host::process::{Scratch, output};
use xtask_host::{Result, workspace};

const ROUNDS: usize = 5;
/// Of tensors of 32 MiB, the checkpoints whose peak memory is compared.
const SIZES_MIB: [u64; 3] = [512, 2048, 8192];

/// Prints the tables, each row as soon as it is measured.
pub(crate) fn main(setup: &Machine) -> Result {
    let bench = Bench { setup };
    let places = [("tmpfs", &setup.tmpfs), ("disk", &setup.disk)];
    println!("\n{}\n", machine());
    println!("| convert 2 GiB saved by PyTorch | `dcp convert` | `dcp_to_torch_save` | `cp` |");
    println!("|---|---:|---:|---:|");
    for (place, folder) in places {
        bench.speeds(place, Scratch::new(folder, "dcp-bench", false)?.path())?;
    }
    println!("\n| Llama of 2 GiB, TP2 PP2 | `dcp convert` | peak memory | `cp` |");
    println!("|---|---:|---:|---:|");
    for (place, folder) in places {
        bench.megatron(place, Scratch::new(folder, "dcp-bench", false)?.path())?;
    }
    println!("\n| list 200 000 chunks of 1 000 tensors | `dcp inspect` | Python with torch |");
    println!("|---|---:|---:|");
    bench.many_chunks(Scratch::new(&setup.disk, "dcp-bench", false)?.path())?;
    // The largest checkpoint and what is made of it are too much for most memories.
    println!("\n| peak memory | → safetensors | → torch-save | `dcp_to_torch_save` |");
    println!("|---|---:|---:|---:|");
    bench.peaks(Scratch::new(&setup.disk, "dcp-bench", false)?.path())
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
    fn speeds(&self, place: &str, folder: &Path) -> Result {
        let source = self.checkpoint(folder, 2048)?;
        let ours = |(format, name): (&str, &str)| self.ours(&source, &folder.join(name), format);
        let [copy, safetensors, torch_save, theirs] = fastest([
            &|| self.copy(&source, &folder.join("copy")),
            &|| ours(TARGETS[0]),
            &|| ours(TARGETS[1]),
            &|| self.torch(&source, &folder.join("theirs.pt")),
        ])?;
        for ((format, _), ours) in TARGETS.into_iter().zip([safetensors, torch_save]) {
            let (ours, copy) = (ours.seconds, copy.seconds);
            let theirs = match format {
                "torch-save" => {
                    format!("{:.2} s ({:.1} × ours)", theirs.seconds, theirs.seconds / ours)
                }
                _ => "—".to_owned(),
            };
            let ratio = ours / copy;
            println!(
                "| → {format}, {place} | {ours:.2} s ({ratio:.2} × `cp`) | {theirs} | {copy:.2} s |"
            );
        }
        Ok(())
    }

    /// Between Megatron-Core and Hugging Face.
    fn megatron(&self, place: &str, folder: &Path) -> Result {
        let (hf, megatron) = (folder.join("hf"), folder.join("megatron"));
        output(self.script("save-llama").arg(&hf).arg("2048"))?;
        let layout = ["--to", "torch-dist", "--arch", "llama", "--tp", "2", "--pp", "2"];
        output(&mut self.convert(&hf, &megatron, &layout))?;
        let ways: [(_, _, _, &[&str]); 2] = [
            ("→ torch_dist", &hf, "torch-dist", &layout),
            ("→ hf", &megatron, "back", &["--to", "hf"]),
        ];
        for (what, source, name, args) in ways {
            let target = folder.join(name);
            let [copy, ours] = fastest([&|| self.copy(source, &folder.join("copy")), &|| {
                self.measured(&target, &self.convert(source, &target, args))
            }])?;
            let (seconds, ratio) = (ours.seconds, ours.seconds / copy.seconds);
            println!(
                "| {what}, {place} | {seconds:.2} s ({ratio:.2} × `cp`) | {:.0} MiB | {:.2} s |",
                ours.peak_mib, copy.seconds
            );
        }
        Ok(())
    }

    fn peaks(&self, folder: &Path) -> Result {
        for mib in SIZES_MIB {
            let name = format!("{} GiB", mib as f64 / 1024.0);
            // The checkpoint and one copy of it.
            let (needed, free) = (2 * mib + 512, free_mib(folder)?);
            if free < needed {
                println!("| {name} | SKIPPED: needs {needed} MiB of disk, {free} are free | | |");
                continue;
            }
            let source = self.checkpoint(folder, mib)?;
            let mut columns = Vec::new();
            for (format, name) in TARGETS {
                let cost = self.ours(&source, &folder.join(name), format)?;
                columns.push(format!("{:.0} MiB", cost.peak_mib));
            }
            columns.push(match mib {
                // PyTorch holds all of it in memory.
                8192.. => "not run".to_owned(),
                _ => {
                    let cost = self.torch(&source, &folder.join("theirs.pt"))?;
                    format!("{:.0} MiB", cost.peak_mib)
                }
            });
            println!("| {name} | {} |", columns.join(" | "));
            remove(&source);
        }
        Ok(())
    }

    /// From the start of the process to its end, which is when it prints.
    fn many_chunks(&self, folder: &Path) -> Result {
        let (saved, cut) = (folder.join("rows"), folder.join("cut"));
        output(self.script("save-rows").arg(&saved))?;
        let mut reshard = Command::new(&self.setup.command);
        output(reshard.args(["-q", "reshard", "-n", "200"]).args([&saved, &cut]))?;
        let nothing = folder.join("nothing");
        let mut inspect = Command::new(&self.setup.command);
        inspect.arg("inspect").arg(&cut);
        let mut python = self.script("inspect");
        python.arg(&cut);
        let costs =
            fastest([&|| self.measured(&nothing, &inspect), &|| self.measured(&nothing, &python)])?;
        let [ours, theirs] =
            costs.map(|cost| format!("{:.2} s, {:.0} MiB", cost.seconds, cost.peak_mib));
        println!("| from a metadata file of 37 MB | {ours} | {theirs} |");
        Ok(())
    }

    /// A checkpoint of so many MiB, saved by PyTorch.
    fn checkpoint(&self, folder: &Path, mib: u64) -> Result<PathBuf> {
        let path = folder.join(format!("saved-{mib}"));
        let mut python = self.script("save-random");
        output(python.arg(&path).arg(mib.to_string()))?;
        Ok(path)
    }

    fn convert(&self, source: &Path, target: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.setup.command);
        command.args(["-q", "convert"]).args([source, target]).args(args);
        command
    }

    fn ours(&self, source: &Path, target: &Path, format: &str) -> Result<Cost> {
        self.measured(target, &self.convert(source, target, &["--to", format]))
    }

    fn torch(&self, source: &Path, target: &Path) -> Result<Cost> {
        let mut command = Command::new("sh");
        command.arg("-c").arg("\"$@\" && sync \"$0\"").arg(target);
        let script = self.script("to-torch-save");
        command.arg(script.get_program()).args(script.get_args()).args([source, target]);
        self.measured(target, &command)
    }

    fn copy(&self, source: &Path, target: &Path) -> Result<Cost> {
        let mut command = Command::new("sh");
        command.arg("-c").arg("cp -r \"$1\" \"$0\" && sync \"$0\"/*").args([target, source]);
        self.measured(target, &command)
    }

    /// What a command takes that writes `target`, which is removed afterwards.
    fn measured(&self, target: &Path, command: &Command) -> Result<Cost> {
        let mut python = self.python("measure.py");
        python.arg(command.get_program()).args(command.get_args());
        let report = output(&mut python)?;
        remove(target);
        let report: Value = serde_json::from_str(&report)?;
        let number = |field| report.get(field).and_then(Value::as_f64).ok_or("no measurement");
        Ok(Cost { seconds: number("seconds")?, peak_mib: number("peak")? / f64::from(1 << 20) })
    }

    fn script(&self, what: &str) -> Command {
        let mut python = self.python("bench.py");
        python.arg(what);
        python
    }

    fn python(&self, script: &str) -> Command {
        let mut python = Command::new(&self.setup.python);
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.arg(workspace::root().join("xtask/bench/python").join(script));
        python
    }
}

type Measurement<'a> = &'a dyn Fn() -> Result<Cost>;

/// The cheapest run of each. All take turns, so that what else the machine does meets all.
fn fastest<const N: usize>(measurements: [Measurement<'_>; N]) -> Result<[Cost; N]> {
    let mut fastest = [Cost { seconds: f64::INFINITY, peak_mib: f64::NAN }; N];
    for _ in 0..ROUNDS {
        for (fastest, measure) in fastest.iter_mut().zip(measurements) {
            let cost = measure()?;
            if cost.seconds < fastest.seconds {
                *fastest = cost;
            }
        }
    }
    Ok(fastest)
}

fn remove(path: &Path) {
    // Some commands write nothing.
    let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir_all(path));
}
