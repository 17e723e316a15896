//! `dcp report`.

use clap::Args;
use dcp::jobs::report::{ReportLimits, render_html};
use dcp::jobs::{Need, TargetOptions};

use crate::failure::Failure;
use crate::output::json_text;
use crate::output::progress::Bar;
use crate::output::style::{printable, size};
use crate::session::Session;

/// Write an HTML page about a checkpoint.
///
/// The file opens in any browser, also from a disk: a summary, the bytes by rank,
/// file and layer, the tree of all keys with a search, and for every tensor how it is cut and
/// where its chunks lie. The page loads nothing and shows names and values of the checkpoint as
/// text only, so it can be passed on.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp report runs/step_1000 -o report.html
  dcp report runs/step_1000 -o report.html --stats     with histograms; reads every byte
  dcp report model.safetensors -o report.html --overwrite
  dcp report runs/step_1000 --json | jq '.rank_imbalance'

Very long lists (over 100,000 keys or 200,000 chunks) are cut, which the page says; sums are of
everything.")]
pub(crate) struct Report {
    /// The checkpoint.
    pub(crate) uri: String,

    /// The file to write.
    #[arg(short, long, value_name = "FILE", required_unless_present = "json")]
    pub(crate) output: Option<String>,

    /// Replace the output file if there is one.
    #[arg(long, requires = "output")]
    pub(crate) overwrite: bool,

    /// Read all tensors, and show their range, mean, histogram, and what is NaN or infinite.
    #[arg(long)]
    pub(crate) stats: bool,

    /// Write what the page shows as JSON instead, to the output file if one is named.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn report(args: &Report, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    session.run(true, async {
        // Statistics of a part would pass for those of all.
        let need = if args.stats { Need::Whole } else { Need::Readable };
        let opened = session.open(&args.uri, need).await?;
        let file = match &args.output {
            Some(path) => {
                let options = TargetOptions::default()
                    .with_overwrite(args.overwrite)
                    .with_rollback(&session.rollback);
                Some((path, opened.target_file(path, &options).await?))
            }
            None => None,
        };
        let bar = Bar::new(out, "reading");
        let limits = ReportLimits::default();
        let report = opened.report(args.stats, &limits, &bar.options()).await?;
        drop(bar);
        let Some((path, file)) = file else { return out.json(&report) };
        let target = file.target();
        let text = if args.json { json_text(&report)? } else { render_html(&report).into_bytes() };
        let len = text.len() as u64;
        target.put_report(text).await?;
        file.keep();
        if !out.quiet {
            out.write(&format!("{}: {}\n", printable(path), size(len)))?;
        }
        Ok(())
    })
}
