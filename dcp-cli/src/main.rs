//! The `dcp` command.

mod cli;
mod command;
#[cfg(test)]
mod every_operation;
mod failure;
mod interrupt;
mod options;
mod output;
mod session;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::cli::{Cli, Command};
use crate::failure::Failure;
use crate::output::error_report;
use crate::output::style::Style;
use crate::session::Session;

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
            return error_report::print_json(&Failure::of_arguments(&error));
        }
        Err(error) => error.exit(),
    };
    let errors = Style::for_stream(cli.global.color, &std::io::stderr());
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) if json => error_report::print_json(&failure),
        Err(failure) => error_report::print(&failure, errors),
    }
}

/// Whether `--json` is among arguments that could not be understood.
fn asks_for_json() -> bool {
    std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

fn run(cli: Cli) -> Result<(), Failure> {
    trace(cli.global.verbose);
    let session = Session::new(cli.global)?;
    let out = &session.out;
    match cli.command {
        Command::Ls(args) => command::ls(&args, &session),
        Command::Inspect(args) => command::inspect(&args, &session),
        Command::Verify(args) => command::verify(&args, &session),
        Command::Get(args) => command::get(&args, &session),
        Command::Stats(args) => command::stats(&args, &session),
        Command::Diff(args) => command::diff(&args, &session),
        Command::Convert(args) => command::convert(&args, &session),
        Command::Copy(args) => command::copy(&args, &session),
        Command::Reshard(args) => command::reshard(&args, &session),
        Command::Average(args) => command::average(&args, &session),
        Command::Merge(args) => command::merge(&args, &session),
        Command::Prune(args) => command::prune(&args, &session),
        Command::Unshard(args) => command::unshard(&args, &session),
        Command::RewriteMetadata(args) => command::rewrite_metadata(&args, &session),
        Command::Report(args) => command::report(&args, &session),
        Command::Arch(args) => command::arch(&args, out),
        Command::Man(args) => command::man(&args, Cli::command(), &session),
        Command::Completions(args) => command::completions(&args, Cli::command(), out),
    }
}

/// Events of the libraries, on stderr: `-v` and `-vv`, or what `DCP_LOG` requests.
fn trace(verbose: u8) {
    let requested = std::env::var("DCP_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = match (verbose, requested) {
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
