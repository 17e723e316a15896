//! `dcp trace`.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use clap::Args;
use dcp::core::text::Quoted;
use dcp::trace::{Trace as Recorded, TraceError, TraceSummary, create_trace};

use crate::failure::{Exit, Failure};
use crate::output::render::trace;
use crate::session::Session;

/// Draw where the time of saves and loads went: phases, slowest ranks, files and requests.
///
/// A trainer records a trace with `Checkpointer::trace`, one file per process, and every command of
/// dcp does with --trace FILE. The files have the Trace Event Format: https://ui.perfetto.dev and
/// chrome://tracing open them, too.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp trace traces                                the ranks whose files are in this folder
  dcp trace trace-0.json trace-1.json --slowest 3
  dcp trace traces --merge all.json               one file of all ranks, for Perfetto
  dcp convert runs/step_1000 hf --to hf --trace convert.json && dcp trace convert.json

JSON:
  {\"ranks\": [N, …], \"operations\": [OPERATION, …], \"files\": [FILE, …], \"requests\": [REQUEST, …],
   \"is_cut\": BOOL}
  OPERATION is {\"name\", \"number\", \"began\", \"duration\", \"bytes\", \"slowest_rank\", \"imbalance\",
                \"ranks\": [{\"rank\", \"began\", \"duration\", \"bytes\", \"work\", \"error\",
                \"phases\": [{\"name\", \"began\", \"duration\"}, …]}, …]}; work is the time of a rank's
                own writes or reads.
  FILE is {\"file\", \"rank\", \"written\", \"bytes\", \"duration\"}, the slowest first.
  REQUEST is {\"name\", \"count\", \"failed\", \"bytes\", \"total\", \"median\", \"p99\", \"longest\"}.
  Times are in microseconds, begins since 1970.")]
pub(crate) struct Trace {
    /// Trace files, whose names end with .json, or folders of them.
    #[arg(required = true, value_name = "URI")]
    traces: Vec<String>,

    /// How many ranks, files and saves are shown, the slowest of each.
    #[arg(long, value_name = "N", default_value_t = 8)]
    slowest: usize,

    /// Write one file with the events of all.
    #[arg(long, value_name = "FILE")]
    merge: Option<PathBuf>,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn trace(args: &Trace, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let recorded = session.run(false, async {
        let mut all = Recorded::default();
        for url in &args.traces {
            all.merge(Recorded::open(session.storages(), url).await.map_err(failure)?);
        }
        Ok(all)
    })?;
    if let Some(file) = &args.merge {
        recorded.write(BufWriter::new(create(file)?))?;
    }
    let summary = TraceSummary::of(&recorded);
    if args.json {
        return out.json(&summary);
    }
    out.write(&trace::render(&summary, args.slowest, out))?;
    if summary.is_cut {
        out.note("a file of the trace ends within an event: its process died or still runs");
    }
    Ok(())
}

/// Creates the file of a trace; see [`create_trace`].
pub(crate) fn create(file: &Path) -> Result<File, Failure> {
    create_trace(file).map_err(|error| not_written(file, &error))
}

/// The failure of a trace that cannot be written.
pub(crate) fn not_written(file: &Path, error: &std::io::Error) -> Failure {
    let exists = error.kind() == std::io::ErrorKind::AlreadyExists;
    let exit = if exists { Exit::Usage } else { Exit::Io };
    let shown = file.display().to_string();
    Failure::new(exit, format!("cannot write the trace {}", Quoted(&shown)))
        .because(vec![error.to_string()])
}

fn failure(error: TraceError) -> Failure {
    match error {
        TraceError::Storage(error) => Failure::from(error).instead_of(Exit::Bad, Exit::Io),
        other => Failure::new(Exit::Bad, other.to_string())
            .hint("record a trace with `Checkpointer::trace` or `dcp COMMAND --trace FILE`"),
    }
}
