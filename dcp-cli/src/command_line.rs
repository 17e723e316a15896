//! The entry point of the command, with the plug-ins of a build.

use std::ffi::OsString;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, FromArgMatches};
use dcp::StorageRegistry;
use dcp::collectives::Launch;
use dcp::core::format::{CheckpointFormat, StreamTransform};
use dcp::core::text::Quoted;
use dcp::jobs::framework::Framework;
use dcp::trace::TraceRecorder;

use crate::cli::{Cli, Command};
use crate::failure::{Exit, Failure};
use crate::options::{Global, with_targets};
use crate::output::error_report;
use crate::output::style::Style;
use crate::plugins::Plugins;
use crate::ranks::Ranks;
use crate::session::Session;
use crate::{command, interrupt, output, threads};

/// The `dcp` command, with the storages, formats and frameworks of plug-ins in addition to its own.
///
/// ```
/// use std::process::ExitCode;
/// use std::sync::Arc;
///
/// use dcp_cli::CommandLine;
/// # use dcp_conformance::MemoryStorage;
///
/// // `main` of a program ends with `run()`, which takes the arguments of the process.
/// let code = CommandLine::new()
///     .storages(|storages| storages.register("tape", |_| Ok(Arc::new(MemoryStorage::new()))))
///     .run_with(["dcp", "ls", "tape://7/runs"]);
/// assert_eq!(code, ExitCode::SUCCESS);
/// ```
#[must_use = "it does nothing until it runs"]
#[derive(Debug, Default)]
pub struct CommandLine {
    plugins: Plugins,
}

impl CommandLine {
    /// The command as `dcp` is published: the storages and formats of this project.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers URL schemes, their settings and locators. A scheme that is there already is
    /// replaced. Every option that applies to URLs, such as `--cache-dir` and `--trace`, applies to
    /// those of plug-ins.
    pub fn storages<F>(mut self, register: F) -> Self
    where
        F: Fn(&mut StorageRegistry) + Send + Sync + 'static,
    {
        self.plugins.storages.push(Box::new(register));
        self
    }

    /// Registers a format: every command recognizes its checkpoints, and `--to` takes its
    /// [name](dcp::core::format::FormatInfo::name) if it is a
    /// [target](CheckpointFormat::target). A format of the same name is replaced.
    pub fn format(mut self, format: Arc<dyn CheckpointFormat>) -> Self {
        self.plugins.add_format(format);
        self
    }

    /// Registers a transform of stored items, such as encryption: every command reads what was written through it.
    pub fn transform(mut self, transform: Arc<dyn StreamTransform>) -> Self {
        self.plugins.add_transform(transform);
        self
    }

    /// Adds a training framework, which jobs call for its checkpoints; `--to` takes the name of its
    /// [target](Framework::target). A framework of the same name is replaced. Its format is registered by
    /// [`format`](Self::format).
    pub fn framework(mut self, framework: Arc<dyn Framework>) -> Self {
        self.plugins.add_framework(framework);
        self
    }

    /// Runs the command with the arguments of the process. The exit code is that of `dcp --help`.
    ///
    /// The first SIGINT, SIGTERM or SIGHUP stops a command that writes and removes what it has
    /// written; the second one ends the process.
    #[must_use]
    pub fn run(self) -> ExitCode {
        self.run_with(std::env::args_os())
    }

    /// Runs the command with these arguments, of which the first is the name of the program.
    #[must_use]
    pub fn run_with<A>(self, args: impl IntoIterator<Item = A>) -> ExitCode
    where
        A: Into<OsString>,
    {
        // Cargo gives a plug-in the same reqwest, which has no provider of cryptography in this
        // build; a client of the plug-in would panic. A program that has chosen one keeps it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        let parsed = program(&self.plugins).try_get_matches_from(&args).and_then(|matches| {
            let json = matches.subcommand().is_some_and(|(_, of_command)| {
                matches!(of_command.try_get_one::<bool>("json"), Ok(Some(true)))
            });
            let name = matches.subcommand_name().unwrap_or_default().to_owned();
            Ok((Cli::from_arg_matches(&matches)?, json, name))
        });
        let (mut cli, json, name) = match parsed {
            Ok(parsed) => parsed,
            Err(error) if error.use_stderr() && asks_for_json(&args) => {
                return error_report::print_json(&Failure::of_arguments(&error));
            }
            Err(error) => {
                // A closed terminal changes nothing.
                let _ = error.print();
                return if error.use_stderr() {
                    ExitCode::from(Exit::Usage as u8)
                } else {
                    ExitCode::SUCCESS
                };
            }
        };
        cli.global.add_storage_options_before_command(&args);
        let errors = Style::for_stream(cli.global.color, &std::io::stderr());
        match threads::caught(|| run(cli, &name, &self.plugins)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
            Err(failure) if json => error_report::print_json(&failure),
            Err(failure) => error_report::print(&failure, errors),
        }
    }
}

/// The arguments and their help.
pub(crate) fn program(plugins: &Plugins) -> clap::Command {
    with_targets(Cli::command(), &plugins.targets())
}

/// Whether `--json` is among arguments that could not be understood.
fn asks_for_json(args: &[OsString]) -> bool {
    args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json")
}

/// Runs a parsed command.
pub(crate) fn run(cli: Cli, name: &str, plugins: &Plugins) -> Result<(), Failure> {
    log(cli.global.verbose, cli.global.quiet);
    interrupt::survive_file_size_limit();
    let writes = cli.command.writes();
    let ranks = Ranks::join(cli.command.sharing(), &cli.global)?;
    let same = ranks.as_ref().map_or(Ok(()), |ranks| ranks.same_command(name));
    let done = same.and_then(|()| match ranks.as_ref().is_none_or(Ranks::works) {
        true => run_here(cli, name, plugins, ranks.as_ref()),
        false => Ok(()),
    });
    match ranks {
        Some(ranks) => ranks.agree(done, writes),
        None => done,
    }
}

/// Runs what this process does of a command.
fn run_here(cli: Cli, name: &str, plugins: &Plugins, ranks: Option<&Ranks>) -> Result<(), Failure> {
    let Some(file) = cli.global.trace.clone() else {
        return command(cli.command, plugins, &Session::new(cli.global, None, plugins, ranks)?);
    };
    let (rank, world_size) = traced_by(ranks, &cli.global);
    let given = file;
    let file = if rank == 0 { given.clone() } else { of_rank(&given, rank) };
    let out = output::Output::new(cli.global.color, cli.global.quiet);
    let recorder = TraceRecorder::to(BufWriter::new(command::create_trace(&file)?));
    let span = recorder.span(rank, &format!("dcp {name}"));
    let session = Session::new(cli.global, Some(&recorder), plugins, ranks);
    let done = session.and_then(|session| command(cli.command, plugins, &session));
    drop(span);
    // A command that failed has a trace, too.
    let recorded = recorder.finish().map_err(|error| command::trace_not_written(&file, &error));
    if rank == 0 && world_size > 1 && recorded.is_ok() {
        let last = of_rank(&given, world_size - 1);
        let [first, last] = [&file, &last].map(|file| Quoted(&file.to_string_lossy()).to_string());
        out.note(&format!(
            "each of {world_size} ranks has a trace of its own: {first} is that of rank 0, {last} that of \
             the last; `dcp trace` takes all of them"
        ));
    }
    done.and(recorded)
}

/// The rank of this process among those that write a trace of this command, and their number.
fn traced_by(ranks: Option<&Ranks>, global: &Global) -> (u32, u32) {
    match ranks {
        Some(ranks) => ranks.of_jobs().map_or((0, 1), |group| (group.rank(), group.world_size())),
        None if global.single => (0, 1),
        // Each rank runs the command for itself.
        None => match Launch::detect() {
            Ok(Some(launch)) => (launch.rank, launch.world_size),
            _ => (0, 1),
        },
    }
}

/// The trace of a rank other than 0: `trace.json` becomes `trace.rank3.json`.
fn of_rank(file: &Path, rank: u32) -> PathBuf {
    let extension = file.extension().map(|name| name.to_string_lossy().into_owned());
    file.with_extension(match extension {
        Some(extension) => format!("rank{rank}.{extension}"),
        None => format!("rank{rank}"),
    })
}

fn command(command: Command, plugins: &Plugins, session: &Session) -> Result<(), Failure> {
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
        Command::Man(args) => command::man(&args, program(plugins), session),
        Command::Help(args) => command::help(&args, program(plugins), out),
        Command::Completions(args) => command::completions(&args, program(plugins), out),
    }
}

/// Events of the libraries, on stderr: `-v` and `-vv`, or what `DCP_LOG` requests.
fn log(verbose: u8, quiet: bool) {
    /// What is said without a flag: that a store does not answer, and the command waits for it.
    const WAITS: &str = "dcp_storage_object::retry=warn";
    let requested = std::env::var("DCP_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = match (verbose, requested) {
        (0, None) if quiet => return,
        (0, None) => {
            let notes = tracing_subscriber::fmt().with_env_filter(WAITS).with_ansi(false);
            let notes = notes.without_time().with_level(false).with_target(false);
            let _ = notes.with_writer(|| output::NoteLog).try_init();
            return;
        }
        (0, Some(filter)) => filter,
        (1, _) => "info".to_owned(),
        (_, _) => "debug".to_owned(),
    };
    // A program that has a subscriber keeps it.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(|| output::Log)
        .try_init();
}
