//! `dcp verify`.

use crate::args;
use crate::failure::{Exit, Failure};
use crate::megatron;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use crate::render::problems;

pub(crate) fn verify(args: &args::Verify, out: &Output) -> Result<(), Failure> {
    let (place, report) = open::run(args.deep, async {
        // What there is to say of it, the report says.
        let opened = open::checkpoint(&args.uri, Need::Readable, &out.silent()).await?;
        let bar = Bar::new(out, "verifying");
        let mut report = match &opened.megatron {
            Some(checkpoint) => megatron::verify(checkpoint, args.deep, &bar.options()).await?,
            None => dcp::convert::verify(&opened.source, args.deep, &bar.options()).await?,
        };
        drop(bar);
        megatron::add_surroundings(&opened, &mut report);
        if !args.json && report.notes.is_empty() {
            open::say_which(&args.uri, out).await?;
        }
        Ok((opened.place, report))
    })?;
    if args.json {
        out.json(&report)?;
    } else {
        out.write(&problems::render(&place, &report, out))?;
    }
    if report.ok { Ok(()) } else { Err(Failure::reported(Exit::Bad)) }
}
