//! The `dcp` command.

mod absent_storage;
mod arch;
mod args;
mod command;
mod destination;
#[cfg(test)]
mod every_operation;
mod failure;
mod folder;
mod hf_config;
mod incomplete_save;
mod interrupt;
mod iteration;
mod key_options;
mod megatron;
mod new_folders;
mod open;
mod optimizer;
mod output;
mod overlap_guard;
mod progress;
mod render;
mod rollback;
mod sidecar_config;
mod small_file;
mod style;
mod summary;
mod target;
mod torch_dist;
mod torch_folder;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::args::{Cli, Command};
use crate::failure::Failure;
use crate::output::Output;
use crate::style::Style;

fn main() -> ExitCode {
    let parsed = Cli::command().try_get_matches().and_then(|matches| {
        let json = matches.subcommand().is_some_and(|(_, of_command)| {
            matches!(of_command.try_get_one::<bool>("json"), Ok(Some(true)))
        });
        Ok((Cli::from_arg_matches(&matches)?, json))
    });
    let (cli, json) = match parsed {
        Ok(parsed) => parsed,
        Err(error) if error.use_stderr() && asks_for_json() => {
            return Failure::of_arguments(&error).report_json();
        }
        Err(error) => error.exit(),
    };
    let errors = Style::for_stream(cli.global.color, &std::io::stderr());
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) if json => failure.report_json(),
        Err(failure) => failure.report(errors),
    }
}

/// Whether `--json` is among arguments that could not be understood.
fn asks_for_json() -> bool {
    std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

fn run(cli: Cli) -> Result<(), Failure> {
    trace(cli.global.verbose);
    if cli.global.follow_links {
        open::follow_links();
    }
    if let Some(rank) = cli.global.rank {
        open::read_rank(rank);
    }
    if let Some(variant) = &cli.global.variant {
        open::read_variant(variant);
    }
    let out = Output::new(cli.global);
    match cli.command {
        Command::Ls(args) => command::ls(&args, &out),
        Command::Inspect(args) => command::inspect(&args, &out),
        Command::Verify(args) => command::verify(&args, &out),
        Command::Get(args) => command::get(&args, &out),
        Command::Stats(args) => command::stats(&args, &out),
        Command::Diff(args) => command::diff(&args, &out),
        Command::Convert(args) => command::convert(&args, &out),
        Command::Reshard(args) => command::reshard(&args, &out),
        Command::Average(args) => command::average(&args, &out),
        Command::Merge(args) => command::merge(&args, &out),
        Command::Unshard(args) => command::unshard(&args, &out),
        Command::RewriteMetadata(args) => command::rewrite_metadata(&args, &out),
        Command::Report(args) => command::report(&args, &out),
        Command::Arch(args) => command::arch(&args, &out),
        Command::Man(args) => command::man(&args, &out),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "dcp", &mut script);
            out.write_own(&String::from_utf8_lossy(&script))
        }
    }
}

/// Events of the libraries, on stderr: `-v` and `-vv`, or what `DCP_LOG` asks for.
fn trace(verbose: u8) {
    let asked = std::env::var("DCP_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = match (verbose, asked) {
        (0, None) => return,
        (0, Some(filter)) => filter,
        (1, _) => "info".to_owned(),
        (_, _) => "debug".to_owned(),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(|| output::Log)
        .init();
}
