//! `dcp reshard`.

use clap::Args;
use dcp::jobs::{Format, Need};

use crate::failure::Failure;
use crate::options::{Compress, KeyOptions, MegatronOptimizer, OptimizerKeys, TorchDist, Writing};
use crate::output::progress::Bar;
use crate::output::summary::write_summary;
use crate::session::Session;

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
#[command(
    mut_arg("tp", |arg| arg.hide_short_help(false)),
    mut_arg("pp", |arg| arg.hide_short_help(false)),
    mut_arg("ep", |arg| arg.hide_short_help(false)),
    after_long_help = "\
Examples:
  dcp reshard runs/step_1000 resharded --ranks 8
  dcp reshard runs/step_1000 merged --ranks 1
  dcp reshard runs/step_1000 archived --ranks 1 --compress zstd:10
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
    compress: Compress,

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

pub(crate) fn reshard(args: &Reshard, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let keys = args.choosing.keys()?;
    let written = session.run(true, async {
        let needed = match args.optimizer.layout() {
            Some(_) => None,
            None => keys.needed(Format::Dcp),
        };
        let opened = session.open_for(&args.source, Need::Whole, needed).await?;
        let bar = Bar::new(out, "writing");
        let reshard = opened
            .reshard(&args.target)
            .ranks(args.ranks)
            .with(args.torch_dist.target())
            .compression(args.compress.method())
            .keys(keys)
            .with(args.megatron_optimizer.options())
            .overwrite(args.writing.overwrite)
            .rollback(&session.rollback)
            .job(session.shared(args.writing.options(bar.options())));
        let reshard = match args.optimizer.layout() {
            Some(layout) => reshard.with(layout),
            None => reshard,
        };
        Ok(reshard.run().await?)
    })?;
    write_summary(&written.report, &args.target, args.writing.json, out)
}
