//! `dcp reshard`.

use crate::args::{self, Writing};
use crate::created::NewFolders;
use crate::failure::Failure;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use crate::style::{count, size};

pub(crate) fn reshard(args: &args::Reshard, out: &Output) -> Result<(), Failure> {
    open::refuse_same(&args.source, &args.target)?;
    write_checkpoint(&args.source, &args.target, args.ranks, args.writing, out)
}

/// Writes a checkpoint in PyTorch's format as `ranks` ranks would.
pub(crate) fn write_checkpoint(
    source: &str,
    target: &str,
    ranks: u32,
    writing: Writing,
    out: &Output,
) -> Result<(), Failure> {
    let report = open::run(true, async {
        let source = open::source(source, Need::Whole).await?;
        let folders = NewFolders::before(target);
        let writer = open::target_directory(target, writing.overwrite).await?;
        let bar = Bar::new(out, "writing");
        let report = dcp::convert::reshard(&source, &writer, ranks, &bar.options()).await?;
        folders.keep();
        Ok(report)
    })?;
    if writing.json {
        return out.json(&report);
    }
    if out.quiet {
        return Ok(());
    }
    let bytes = report.files.iter().map(|(_, len)| len).sum();
    out.write(&format!(
        "{target}: {} in {}, {}; {}, {}\n",
        count(report.tensors, "tensor"),
        count(report.chunks, "chunk"),
        count(report.objects, "object"),
        count(report.files.len(), "file"),
        size(bytes)
    ))
}
