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
use dcp::core::text::Quoted;
use dcp::trace::TraceRecorder;

use crate::cli::{Cli, Command};
use crate::failure::{Exit, Failure};
use crate::output::error_report;
use crate::output::style::Style;
use crate::session::Session;

fn main() -> ExitCode {
    let parsed = Cli::command().try_get_matches().and_then(|matches| {
        let json = matches.subcommand().is_some_and(|(_, of_command)| {
            matches!(of_command.try_get_one::<bool>("json"), Ok(Some(true)))
        });
        let name = matches.subcommand_name().unwrap_or_default().to_owned();
        Ok((Cli::from_arg_matches(&matches)?, json, name))
    });
    let (cli, json, name) = match parsed {
        Ok(parsed) => parsed,
        Err(error) if error.use_stderr() && asks_for_json() => {
            return error_report::print_json(&Failure::of_arguments(&error));
        }
        Err(error) => error.exit(),
    };
    let errors = Style::for_stream(cli.global.color, &std::io::stderr());
    match run(cli, &name) {
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

fn run(cli: Cli, name: &str) -> Result<(), Failure> {
    log(cli.global.verbose);
    let Some(file) = cli.global.trace.clone() else {
        return command(cli.command, &Session::new(cli.global, None)?);
    };
    let not_recorded = |error: std::io::Error| {
        Failure::new(
            Exit::Io,
            format!("cannot write the trace {}", Quoted(&file.display().to_string())),
        )
        .because(vec![error.to_string()])
    };
    let recorder = TraceRecorder::create(&file).map_err(not_recorded)?;
    let span = recorder.span(0, &format!("dcp {name}"));
    let done = command(cli.command, &Session::new(cli.global, Some(&recorder))?);
    drop(span);
    let recorded = recorder.finish().map_err(not_recorded);
    done.and(recorded)
}

fn command(command: Command, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    match command {
        Command::Ls(args) => command::ls(&args, session),
        Command::Inspect(args) => command::inspect(&args, session),
        Command::Verify(args) => command::verify(&args, session),
        Command::Get(args) => command::get(&args, session),
        Command::Stats(args) => command::stats(&args, session),
        Command::Diff(args) => command::diff(&args, session),
        Command::Convert(args) => command::convert(&args, session),
        Command::Copy(args) => command::copy(&args, session),
        Command::Reshard(args) => command::reshard(&args, session),
        Command::Average(args) => command::average(&args, session),
        Command::Merge(args) => command::merge(&args, session),
        Command::Prune(args) => command::prune(&args, session),
        Command::Unshard(args) => command::unshard(&args, session),
        Command::RewriteMetadata(args) => command::rewrite_metadata(&args, session),
        Command::Report(args) => command::report(&args, session),
        Command::Trace(args) => command::trace(&args, session),
        Command::Arch(args) => command::arch(&args, out),
        Command::Man(args) => command::man(&args, Cli::command(), session),
        Command::Completions(args) => command::completions(&args, Cli::command(), out),
    }
}

/// Events of the libraries, on stderr: `-v` and `-vv`, or what `DCP_LOG` requests.
fn log(verbose: u8) {
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
