//! `dcp reshard`.

use clap::Args;

use crate::apart::{Shape, keep_apart};
use crate::choosing::{Choosing, OptimizerKeys};
use crate::created::NewFolders;
use crate::destination::Writing;
use crate::failure::Failure;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use crate::target;
use crate::tell::tell;
use dcp::convert::StatePart;

/// Rewrite a checkpoint as if another number of ranks had saved it.
///
/// Tensors are cut along their first axis, as FSDP2 does; objects are kept byte for byte. PyTorch
/// loads any checkpoint into any number of ranks, but one that is cut as it will be loaded is
/// read in fewer and larger pieces.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp reshard runs/step_1000 resharded --ranks 8
  dcp reshard runs/step_1000 merged --ranks 1
  dcp reshard runs/step_1000 resharded --ranks 8 --no-optimizer --dry-run
  dcp reshard run/step1000 nested --ranks 8 --optimizer-layout nested")]
pub(crate) struct Reshard {
    /// The checkpoint: a directory or a file of any format.
    pub(crate) source: String,

    /// The directory to write.
    pub(crate) target: String,

    /// How many ranks to write for; each gets a file.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) ranks: u32,

    #[command(flatten)]
    pub(crate) writing: Writing,

    #[command(flatten)]
    pub(crate) choosing: Choosing,

    #[command(flatten)]
    optimizer: OptimizerKeys,
}

pub(crate) fn reshard(args: &Reshard, out: &Output) -> Result<(), Failure> {
    let selection = args.choosing.selection(StatePart::Everything)?;
    let report = open::run(true, async {
        let opened = open::checkpoint(&args.source, Need::Whole, out).await?;
        keep_apart(&opened, &args.target, Shape::Folder).await?;
        let folders = NewFolders::before(&args.target);
        let writer =
            target::directory(&args.target, args.writing.overwrite, args.writing.dry_run).await?;
        let bar = Bar::new(out, "writing");
        let options = args.writing.options(bar.options());
        let source = args.optimizer.apply(opened.source, &options).await?;
        let source = selection.apply(&source, &options).await?;
        let report = dcp::convert::reshard(&source, &writer, args.ranks, &options).await?;
        if !options.dry_run {
            folders.keep();
        }
        Ok(report)
    })?;
    tell(&report, &args.target, args.writing.json, out)
}
