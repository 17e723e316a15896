//! `dcp verify`.

use dcp::checkpoint::Need;

use crate::cli as args;
use crate::failure::{Exit, Failure};
use crate::output::progress::Bar;
use crate::output::render::problems;
use crate::session::Session;

pub(crate) fn verify(args: &args::Verify, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let (place, report) = session.run(args.deep, async {
        // The report has what there is to note.
        let opener = session.silent_opener().need(Need::Readable);
        let opened = opener.open(&args.uri).await?;
        let bar = Bar::new(out, "verifying");
        let report = opened.verify().deep(args.deep).job(bar.options()).run().await?;
        drop(bar);
        if !args.json && report.notes.is_empty() {
            session.note_ambiguity(&args.uri).await?;
        }
        Ok((opened.place().to_owned(), report))
    })?;
    if args.json {
        out.json(&report)?;
    } else {
        out.write(&problems::render(&place, &report, out))?;
    }
    if report.ok { Ok(()) } else { Err(Failure::reported(Exit::Bad)) }
}
