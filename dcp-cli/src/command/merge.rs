//! `dcp merge`.

use clap::Args;
use dcp::jobs;
use dcp::jobs::Need;
use dcp::jobs::view::Duplicates;

use crate::failure::Failure;
use crate::options::{CorruptOptimizer, Destination, KeyOptions};
use crate::output::progress::Bar;
use crate::output::summary::write_summary;
use crate::session::Session;

/// Write several checkpoints with different keys as one.
///
/// The checkpoints may have any formats. The new one has everything of the first, then what the
/// second has, and so on. Keys that more than one of them has are refused, all of them at once.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp merge model_dir optimizer_dir --out whole --to dcp
  dcp merge part1.safetensors part2.safetensors --out model.safetensors
  dcp merge base.safetensors heads.safetensors --identical --out all.safetensors --dry-run

Keys:
  Keys are chosen and renamed after the checkpoints were put together.")]
pub(crate) struct Merge {
    /// The checkpoints: directories or files of any format.
    #[arg(required = true, num_args = 1.., value_name = "CHECKPOINT")]
    sources: Vec<String>,

    /// What to write: a file or a directory, as the format has it.
    #[arg(short, long, value_name = "TARGET")]
    out: String,

    /// Allow keys that several checkpoints have, if their values are equal in all of them.
    #[arg(long)]
    identical: bool,

    #[command(flatten)]
    destination: Destination,

    #[command(flatten)]
    choosing: KeyOptions,

    #[command(flatten)]
    corrupt_optimizer: CorruptOptimizer,
}

pub(crate) fn merge(args: &Merge, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let destination = args.destination.at(&args.out, &session.rollback);
    // A format that is not known is an error before anything is read.
    destination.format()?;
    let keys = args.choosing.keys()?;
    let duplicates = if args.identical { Duplicates::Identical } else { Duplicates::Refuse };
    let written = session.run(true, async {
        let bar = Bar::new(out, "merging");
        // Keys are chosen in the whole, in which those of all must differ.
        let all = session.open_all(&args.sources, Need::Whole, None).await?;
        let merge = jobs::combine::merge(&all, destination)
            .keys(keys)
            .duplicates(duplicates)
            .with(args.corrupt_optimizer.options())
            .job(session.shared(args.destination.writing.options(bar.options())));
        Ok(merge.run().await?)
    })?;
    write_summary(&written.report, &args.out, args.destination.writing.json, out)
}
