//! `dcp convert`.

use clap::Args;

use crate::choosing::Choosing;
use crate::destination::{Destination, tell};
use crate::failure::Failure;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use dcp::convert::StatePart;

/// Write a checkpoint in another format.
///
/// Any checkpoint that dcp reads becomes any that it writes. Data is streamed: memory does not
/// grow with the checkpoint or its tensors. What is read is compared with its checksums on the
/// way, and the target appears when it is complete.
///
/// `safetensors` is one file with every tensor, unsharded, under its name; objects, which the
/// format cannot hold, are left out and listed. `hf` is a directory of such files with an index,
/// as transformers opens it; of a training state it gets the model. `torch-save` is one file
/// with everything, nested as it was saved. `dcp` is a directory in PyTorch's format.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp convert runs/step_1000 model.safetensors
  dcp convert runs/step_1000 my-model --to hf --dtype bf16 --config original-model
  dcp convert runs/step_1000 everything.pt
  dcp convert model.safetensors as_dcp --to dcp
  dcp convert runs/step_1000 model.safetensors --model-only --dry-run
  dcp convert runs/step_1000 ema.safetensors --include 'ema.*' --rename 's/^ema\\.//'

Keys:
  A GLOB is a whole name in which * stands for any text and ? for one character, or the beginning
  of names up to a dot. Keys are chosen by the names they have; then --map and --rename apply.
  Two keys that would get one name are an error, and nothing is written.")]
pub(crate) struct Convert {
    /// The checkpoint: a directory or a file of any format.
    pub(crate) source: String,

    /// What to write: a file or a directory, as the format has it.
    pub(crate) target: String,

    #[command(flatten)]
    pub(crate) destination: Destination,

    #[command(flatten)]
    pub(crate) choosing: Choosing,
}

pub(crate) fn convert(args: &Convert, out: &Output) -> Result<(), Failure> {
    open::refuse_same(&args.source, &args.target)?;
    let usual = args.destination.usual_part(&args.target)?;
    let selection = args.choosing.selection(usual)?;
    let report = open::run(true, async {
        let source = open::source(&args.source, Need::Whole).await?;
        let bar = Bar::new(out, "converting");
        let options = args.destination.writing.options(bar.options());
        let all = source.metadata().await?.len();
        let source = selection.apply(&source, &options).await?;
        let taken = source.metadata().await?.len();
        if selection.part == StatePart::Model && taken < all && !args.choosing.model_only {
            out.note(&format!("taking the model, {taken} of {all} keys; --everything takes all"));
        }
        args.destination.write(&source, &args.target, &options).await
    })?;
    tell(&report, &args.target, args.destination.writing.json, out)
}
