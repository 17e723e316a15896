//! `dcp verify`.

use clap::Args;
use dcp::jobs::Need;

use crate::failure::{Exit, Failure};
use crate::output::progress::Bar;
use crate::output::render::problems;
use crate::session::Session;
use crate::terms::in_messages;

/// Check that a checkpoint is whole.
///
/// Looks at the structure: every file there and long enough, every chunk inside its tensor, no
/// two overlapping, no element missing. With --deep, reads all of it: the CRC of every record,
/// every blob's own dtype and shape against the index, every object decoded. All problems are
/// listed, each with its key, file and offset; the exit code is 1 if there is one.
///
/// The ranks of mpirun, srun, torchrun or Kubernetes divide a deep check by bytes; rank 0 prints the
/// report.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp verify runs/step_1000
  dcp verify runs/step_1000 --deep
  mpirun -n 8 dcp verify runs/step_1000 --deep
  dcp verify runs/step_1000 --json | jq '.problems[]'")]
pub(crate) struct Verify {
    /// The checkpoint.
    pub(crate) uri: String,

    /// Read every byte and compare it with its checksum.
    #[arg(long)]
    pub(crate) deep: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn verify(args: &Verify, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let (place, mut report) = session.run(args.deep, async {
        // The report has what there is to note.
        let opener = session.silent_opener().need(Need::Readable);
        let opened = opener.open(&args.uri).await?;
        let bar = Bar::new(out, "verifying");
        let report =
            opened.verify().deep(args.deep).job(session.shared(bar.options())).run().await?;
        drop(bar);
        if !args.json && report.notes.is_empty() {
            session.note_ambiguity(&args.uri).await?;
        }
        Ok((opened.place().to_owned(), report))
    })?;
    if !session.is_coordinator() {
        return Ok(());
    }
    let messages = report.problems.iter_mut().map(|problem| &mut problem.message);
    in_messages(messages.chain(&mut report.notes));
    if args.json {
        out.json(&report)?;
    } else {
        out.write(&problems::render(&place, &report, out))?;
    }
    if report.ok { Ok(()) } else { Err(Failure::reported(Exit::Bad)) }
}
