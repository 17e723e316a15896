//! `dcp reshard`.

use clap::Args;

use crate::destination::Writing;
use crate::failure::{Exit, Failure};
use crate::incomplete_save;
use crate::key_options::{KeyOptions, OptimizerKeys, unmatched_in};
use crate::new_folders::NewFolders;
use crate::open::{self, Need, Opened};
use crate::optimizer::MegatronOptimizer;
use crate::output::Output;
use crate::overlap_guard::{Shape, keep_apart};
use crate::progress::Bar;
use crate::summary::tell;
use crate::target;
use crate::torch_dist::TorchDist;
use dcp::convert::StatePart;

/// Options that are Megatron-Core's, by the names of their fields.
const MEGATRONS: [&str; 11] = [
    "tp",
    "pp",
    "ep",
    "etp",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "vpp",
    "form",
    "integrity",
];

/// Rewrite a checkpoint as if another number of ranks had saved it.
///
/// Tensors are cut along their first axis, as FSDP2 does; objects are kept byte for byte. PyTorch
/// loads any checkpoint into any number of ranks, but one that is cut as it will be loaded is
/// read in fewer and larger pieces.
///
/// With --tp, --pp, --ep and --etp, a checkpoint of Megatron-Core is rewritten as the ranks of that
/// layout would have saved it, whatever its age: weights, optimizer and common state. The arguments
/// in it stay those of the run that saved it: by them Megatron-LM sees that the random states are
/// those of other ranks, and passes over them. So name the new sizes when it goes on, instead of
/// --use-mp-args-from-checkpoint-args.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp reshard runs/step_1000 resharded --ranks 8
  dcp reshard runs/step_1000 merged --ranks 1
  dcp reshard runs/step_1000 resharded --ranks 8 --no-optimizer --dry-run
  dcp reshard run/step1000 nested --ranks 8 --optimizer-layout nested
  dcp reshard run/iter_0001000 resharded --tp 4 --pp 2
  dcp reshard run/iter_0001000 newest --tp 8 --form newest --integrity")]
pub(crate) struct Reshard {
    /// The checkpoint: a directory or a file of any format.
    pub(crate) source: String,

    /// The directory to write.
    pub(crate) target: String,

    /// How many ranks to write for; each gets a file.
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=65_536),
        required_unless_present_any = MEGATRONS,
        conflicts_with_all = MEGATRONS
    )]
    pub(crate) ranks: Option<u32>,

    #[command(flatten)]
    torch_dist: TorchDist,

    #[command(flatten)]
    pub(crate) writing: Writing,

    #[command(flatten)]
    pub(crate) choosing: KeyOptions,

    #[command(flatten)]
    optimizer: OptimizerKeys,

    #[command(flatten)]
    megatron_optimizer: MegatronOptimizer,
}

/// The ranks to write for.
enum Ranks {
    /// Equal ones.
    Flat(u32),
    /// Those of a layout of Megatron-Core.
    Megatron,
}

impl Reshard {
    /// What was asked for, if it goes with the source.
    fn ranks_for(&self, opened: &Opened) -> Result<Ranks, Failure> {
        let is_megatrons = opened.megatron.is_some();
        match self.ranks {
            None if is_megatrons => Ok(Ranks::Megatron),
            None => {
                let message = format!(
                    "{} is for checkpoints of Megatron-Core, and {:?} is none",
                    self.torch_dist.given().unwrap_or("what was asked for"),
                    opened.uri
                );
                Err(Failure::new(Exit::Usage, message)
                    .hint("say --ranks, or `dcp convert --to torch-dist --arch` to make it one"))
            }
            Some(_) if is_megatrons => {
                let message = format!(
                    "{:?} is a checkpoint of Megatron-Core, which equal ranks of PyTorch would \
                     not leave it",
                    opened.uri
                );
                Err(Failure::new(Exit::Usage, message).hint(
                    "say --tp, --pp and --ep for another layout of Megatron-Core; `dcp convert \
                     --to dcp --ranks N` makes it a checkpoint of PyTorch",
                ))
            }
            Some(ranks) => Ok(Ranks::Flat(ranks)),
        }
    }
}

pub(crate) fn reshard(args: &Reshard, out: &Output) -> Result<(), Failure> {
    let selection = args.choosing.selection(StatePart::Everything)?;
    let report = open::run(true, async {
        let opened = open::checkpoint(&args.source, Need::Whole, out).await?;
        keep_apart(&opened, &args.target, Shape::Folder).await?;
        incomplete_save::refuse(&opened)?;
        let ranks = args.ranks_for(&opened)?;
        let folders = NewFolders::before(&args.target);
        let bar = Bar::new(out, "writing");
        let options = args.writing.options(bar.options());
        let source = args.megatron_optimizer.apply(&opened, &selection, &options, out).await?;
        let source = args.optimizer.apply(source, &options).await?;
        let all = source;
        let unmatched = unmatched_in(&selection, [&all]).await?;
        let source = selection.apply(&all, &options).await?;
        let overwrite = args.writing.overwrite;
        let mut report = match ranks {
            Ranks::Flat(ranks) => {
                let writer =
                    target::directory(&args.target, overwrite, args.writing.dry_run).await?;
                dcp::convert::reshard(&source, &writer, ranks, &options).await?
            }
            Ranks::Megatron => {
                let layout = args.torch_dist.layout(&opened).await?;
                let (how, target) = (&args.torch_dist, &args.target);
                let common = TorchDist::common(&all, &selection).await?;
                how.write(&source, target, (layout, common), overwrite, &options).await?
            }
        };
        if !options.dry_run {
            folders.keep();
        }
        report.unmatched = unmatched;
        Ok(report)
    })?;
    tell(&report, &args.target, args.writing.json, out)
}
