//! Developer automation: `cargo xtask <command>`.
//!
//! The rules of the tree (who may depend on whom, sizes, documents that must agree with the
//! code) are ordinary tests of this crate, so that `cargo test` alone catches a breach.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod api;
mod book;
mod browser;
mod deploy;
mod features;
mod formats;
#[cfg(test)]
mod frameworks;
mod fuzz;
mod mpi;
mod readme;
mod shells;
mod torture;

#[cfg(test)]
mod ci_steps;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod contracts;
#[cfg(test)]
mod layers;
#[cfg(test)]
mod lock_files;
#[cfg(test)]
mod phrases;
#[cfg(test)]
mod public_names;
#[cfg(test)]
mod publish_order;
#[cfg(test)]
mod reliability;
#[cfg(test)]
mod setters;
#[cfg(test)]
mod terms;
#[cfg(test)]
mod tidy;

use std::process::ExitCode;

use xtask_host::emulators;

const USAGE: &str = "\
cargo xtask <command>

  interop [--torch VERSION] [--keep]  both directions against real PyTorch, on live data
  interop --olmo [--keep]             the same against real OLMo-core
  interop --object [--keep]           the same through S3, on an emulator
  interop --candle|--burn [--keep]    a model and AdamW of candle or burn, to PyTorch and back
  interop --python [--torch VERSION]  the tests of the Python package, and its types
  interop --megatron [--keep]         the same against real Megatron-Core, and its models against
                                      transformers; --megatron-version VERSION for another one
  bench [--gib N] [--disk DIR]        a table of speeds, ours beside PyTorch's
  bench convert [...]                 the same for converting, with peak memory
  bench object [--gib N]              requests, bytes and speeds at object stores
  bench cuda [--gib N] [--disk DIR]   copies from and to a CUDA device, where there is one
  bench jobs [--gib N] [--folder DIR] commands that 1, 2 and 4 processes share
  bench python [--gib N] [ROW]        the Python package beside PyTorch
  bench plan                          seconds and memory of planning and of the index
  bench --check [--update]            compares instructions and bytes with xtask/bench/counts.json
  bench --check --ratios [--update]   compares speeds, as parts of limits of the same run, with
                                      xtask/bench/ratios.json; --disk DIR, --tmpfs DIR
  emulators up | down | env           S3, Azure, GCS and HTTP on this machine, for tests
  emulators run -- COMMAND            the same for one command
  browser [--keep]                    pages of `dcp report` in headless Chromium
  shells                              completions in fish and zsh, manual pages in groff
  mpi                                 the crate for MPI, on ranks of Open MPI
  deploy                              the job files of deploy/, on a Slurm of one node where it is
  features [PACKAGE]                  each package alone, its features, and the plug-ins; or one package
  torture [--seeds N] [--json]        disturbs saves and commands at every operation: crashes,
                                      kills, full disks, errors, stalls; prints the counts
  readme                              runs the first command of README.md
  book                                renders docs/ and the pages that it links to with mdBook
  api [--update]                      compares the public names of published crates with api/
  fuzz [TARGET [SECONDS]]             runs one fuzz target with cargo-fuzz, or lists them
  fuzz --all [--seconds N]            builds and runs every fuzz target, with no nightly

Environment: DCP_INTEROP_CACHE is where virtual environments with PyTorch are kept
(default: $XDG_CACHE_HOME/dcp-interop, else ~/.cache/dcp-interop).";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match *args {
        ["interop", ref rest @ ..] => xtask_interop::main(rest),
        ["bench", ref rest @ ..] => xtask_bench::main(rest),
        ["api", ref rest @ ..] => api::main(rest),
        ["emulators", ref rest @ ..] => emulators::main(rest),
        ["deploy"] => deploy::main(),
        ["features"] => features::main(None),
        ["features", package] => features::main(Some(package)),
        ["mpi"] => mpi::main(),
        ["browser", ref rest @ ..] => browser::main(rest),
        ["shells"] => shells::main(),
        ["readme"] => readme::main(),
        ["book"] => book::main(),
        ["torture", ref rest @ ..] => torture::main(rest),
        ["fuzz", ref rest @ ..] => fuzz::main(rest),
        [] | ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("unknown command: {}\n\n{USAGE}", args.join(" "));
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
