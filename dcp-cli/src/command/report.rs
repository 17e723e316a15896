//! `dcp report`.

use clap::Args;
use dcp::convert::Selection;
use dcp::convert::report::{ReportLimits, render_html};

use crate::failure::Failure;
use crate::new_folders::NewFolders;
use crate::open::{self, Need};
use crate::optimizer::note_shifted;
use crate::output::{Output, json_text};
use crate::overlap_guard::{Shape, keep_apart};
use crate::progress::Bar;
use crate::style::{printable, size};
use crate::target;

/// Make a page to look around in a checkpoint.
///
/// Writes one HTML file that any browser opens, from a disk too: a summary, the bytes by rank,
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

pub(crate) fn report(args: &Report, out: &Output) -> Result<(), Failure> {
    open::run(true, async {
        // Statistics of a part would pass for those of all.
        let need = if args.stats { Need::Whole } else { Need::Readable };
        let opened = open::checkpoint(&args.uri, need, out).await?;
        let source = &opened.source;
        let folders = args.output.as_deref().map(NewFolders::before);
        let target = match &args.output {
            Some(path) => {
                keep_apart(&opened, path, Shape::File).await?;
                Some((path, target::file(path, args.overwrite, false).await?))
            }
            None => None,
        };
        let bar = Bar::new(out, "reading");
        let limits = ReportLimits::default();
        let mut report =
            dcp::convert::report::report(source, &args.uri, &bar.options(), &limits).await?;
        if args.stats {
            let options = bar.options();
            let stats = dcp::convert::stats(source, &Selection::all(), &options).await?;
            report.add_stats(&stats, &limits);
            note_shifted(&opened, |_| true, &options, out).await;
        }
        drop(bar);
        let Some((path, target)) = target else { return out.json(&report) };
        let text = if args.json { json_text(&report)? } else { render_html(&report).into_bytes() };
        let len = text.len() as u64;
        target.put_report(text).await?;
        folders.into_iter().for_each(NewFolders::keep);
        if !out.quiet {
            out.write(&format!("{}: {}\n", printable(path), size(len)))?;
        }
        Ok(())
    })
}
