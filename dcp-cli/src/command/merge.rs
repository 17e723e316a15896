//! `dcp merge`.

use clap::Args;
use dcp::convert::view::{Duplicates, Merged};
use dcp::convert::{ConvertError, StatePart};

use crate::destination::{Destination, For};
use crate::failure::Failure;
use crate::key_options::{KeyOptions, taken_of, unmatched_in};
use crate::open::{self, Need};
use crate::optimizer::CorruptOptimizer;
use crate::output::Output;
use crate::progress::Bar;
use crate::summary::tell;

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

    /// Take a key that several checkpoints have once, if it holds the same in all of them.
    #[arg(long)]
    identical: bool,

    #[command(flatten)]
    destination: Destination,

    #[command(flatten)]
    choosing: KeyOptions,

    #[command(flatten)]
    corrupt_optimizer: CorruptOptimizer,
}

pub(crate) fn merge(args: &Merge, out: &Output) -> Result<(), Failure> {
    // A format that does not go with the target's name is noticed before anything is read.
    args.destination.format(&args.out)?;
    let selection = args.choosing.selection(StatePart::Everything)?;
    let duplicates = if args.identical { Duplicates::Identical } else { Duplicates::Refuse };
    let report = open::run(true, async {
        let bar = Bar::new(out, "merging");
        let options = args.destination.writing.options(bar.options());
        let mut all = Vec::with_capacity(args.sources.len());
        let mut how = For::default();
        for uri in &args.sources {
            let opened = open::checkpoint(uri, Need::Whole, out).await?;
            args.destination.keep_apart(&opened, &args.out).await?;
            if how.layout.is_none() {
                how.layout = Some(args.destination.torch_dist.layout(&opened).await?);
            }
            all.push(opened);
        }
        let sources: Vec<_> = all.iter().map(|opened| opened.source.clone()).collect();
        let merged = Merged::apply(&sources, duplicates, &options).await;
        let merged = merged.map_err(|error| match error {
            ConvertError::Disagreement { .. } if duplicates == Duplicates::Refuse => {
                Failure::from(error)
                    .hint("--identical takes keys once that hold the same in all checkpoints")
            }
            error => error.into(),
        })?;
        let taken = taken_of(&selection, &merged).await?;
        args.corrupt_optimizer.refuse(&all, |fqn| taken.contains(fqn), &options).await?;
        let unmatched = unmatched_in(&selection, [&merged]).await?;
        let merged = selection.apply(&merged, &options).await?;
        let mut report = args.destination.write(&merged, &args.out, how, &options).await?;
        report.unmatched.splice(..0, unmatched);
        Ok::<_, Failure>(report)
    })?;
    tell(&report, &args.out, args.destination.writing.json, out)
}
