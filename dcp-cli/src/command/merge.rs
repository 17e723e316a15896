//! `dcp merge`.

use clap::Args;
use dcp::jobs;
use dcp::jobs::view::Duplicates;
use dcp::jobs::{Checkpoint, Need};
use dcp::peft::AdapterOptions;

use crate::failure::{Exit, Failure};
use crate::options::{CorruptOptimizer, Destination, KeyOptions};
use crate::output::progress::Bar;
use crate::output::summary::write_summary;
use crate::session::Session;

/// Write several checkpoints with different keys as one.
///
/// The checkpoints may have any formats. The new one has everything of the first, then what the
/// second has, and so on. Keys that more than one of them has are refused, all of them at once.
/// With --adapter, weights of the first change by the adapter that the second is.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp merge model_dir optimizer_dir --out whole --to dcp
  dcp merge part1.safetensors part2.safetensors --out model.safetensors
  dcp merge base.safetensors heads.safetensors --identical --out all.safetensors --dry-run
  dcp merge llama llama-lora --adapter --out merged --to hf

Keys:
  Keys are chosen and renamed after the checkpoints were put together.

Adapters:
  With --adapter, the second checkpoint is a LoRA, rsLoRA or DoRA of PEFT, and the new one is the
  first with the adapter merged into it. The weights are those of PEFT's merge_and_unload on a
  base that was loaded in the dtype of its files; --dtype casts afterwards.")]
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

    /// Merge the second checkpoint, an adapter of PEFT, into the first, its base model.
    #[arg(long, conflicts_with = "identical")]
    adapter: bool,

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
        let job = session.shared(args.destination.writing.options(bar.options()));
        // Keys are chosen in the whole, in which those of all must differ.
        let all = session.open_all(&args.sources, Need::Whole, None).await?;
        if args.adapter {
            let [base, adapter] = pair(all)?;
            let merged = base.convert(destination).keys(keys).with(AdapterOptions::new(adapter));
            let merged = merged.with(args.corrupt_optimizer.options());
            return Ok(merged.job(job).run().await?);
        }
        let merge = jobs::combine::merge(&all, destination)
            .keys(keys)
            .duplicates(duplicates)
            .with(args.corrupt_optimizer.options())
            .job(job);
        Ok(merge.run().await?)
    })?;
    write_summary(&written.report, &args.out, args.destination.writing.json, out)
}

/// The base and its adapter.
fn pair(all: Vec<Checkpoint>) -> Result<[Checkpoint; 2], Failure> {
    all.try_into().map_err(|all: Vec<_>| {
        let message = format!("--adapter merges one adapter into one base, not {}", all.len());
        Failure::new(Exit::Usage, message).hint("name the base, then the adapter")
    })
}
