//! `dcp copy`.

use clap::Args;
use dcp::jobs::JobOptions;
use dcp::jobs::copy::{Comparing, CopyReport};
use dcp::jobs::text::count;
use serde_json::json;

use crate::failure::Failure;
use crate::options::parse_bytes;
use crate::output::Output;
use crate::output::progress::Bar;
use crate::output::style::{shown, size};
use crate::session::Session;

/// Copy a checkpoint or a run, file by file, from any storage to any other.
///
/// The bytes and names stay as they are, whatever the format. The files that make a checkpoint
/// visible, such as .metadata, are copied last, so an interrupted copy is no checkpoint; the same
/// command continues it. Each file is read back and compared with what was read from the source.
///
/// The target is a new or empty folder, or what an earlier copy of the same checkpoint left. Of a
/// run that has grown since, the new checkpoints are added, and its tracker is replaced; those that the
/// source has no more stay.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp copy runs/step_1000 s3://models/llama/step_1000
  dcp copy s3://models/llama /scratch/llama --jobs 32
  dcp copy gs://a/run az://b/run --lengths

JSON:
  {\"copied_files\", \"copied_bytes\", \"kept_files\", \"kept_bytes\", \"dry_run\"}; kept files
  were at the target already.")]
pub(crate) struct Copy {
    /// The folder to copy: a checkpoint, a run, or any other.
    source: String,

    /// The folder to write.
    target: String,

    /// Compare lengths only: do not read the copy back, and keep a file of the same length that is at
    /// the target. Indexes are compared by their bytes.
    #[arg(long)]
    lengths: bool,

    /// Print what would be copied, and write nothing.
    #[arg(long)]
    dry_run: bool,

    /// Print a JSON report.
    #[arg(long)]
    json: bool,

    /// Bytes to hold in memory at once, such as 64MiB.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    max_memory: u64,

    /// Files in flight.
    #[arg(short, long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,
}

pub(crate) fn copy(args: &Copy, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let compare = if args.lengths { Comparing::Lengths } else { Comparing::Bytes };
    let report = session.run(true, async {
        let bar = Bar::new(out, "copying");
        let options: JobOptions = bar
            .options()
            .with_max_memory(args.max_memory)
            .with_parallelism(usize::from(args.jobs))
            .with_dry_run(args.dry_run);
        let opener = session.opener();
        let options = session.shared(options);
        Ok(opener.copy(&args.source, &args.target).compare(compare).job(options).run().await?)
    })?;
    summary(args, report, out)
}

fn summary(args: &Copy, report: CopyReport, out: &Output) -> Result<(), Failure> {
    let CopyReport { copied_files, copied_bytes, kept_files, kept_bytes, .. } = report;
    if args.json {
        return out.json(&json!({
            "copied_files": copied_files,
            "copied_bytes": copied_bytes,
            "kept_files": kept_files,
            "kept_bytes": kept_bytes,
            "dry_run": args.dry_run,
        }));
    }
    if out.quiet {
        return Ok(());
    }
    let would = if args.dry_run { "would be copied: " } else { "" };
    let files = count(copied_files, "file");
    let kept = match kept_files {
        0 => String::new(),
        _ => format!("; {} ({}) there already", count(kept_files, "file"), size(kept_bytes)),
    };
    out.write(&format!("{}: {would}{files}, {}{kept}\n", shown(&args.target), size(copied_bytes)))
}
