//! `dcp convert`.

use clap::Args;

use crate::choosing::{Choosing, OptimizerKeys};
use crate::destination::{Destination, parse_dtype};
use crate::failure::Failure;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use crate::tell::tell;
use dcp::convert::view::{DequantizeOptions, Dequantized};
use dcp::convert::{JobOptions, Source};
use dcp::core::DType;

/// Write a checkpoint in another format.
///
/// Any checkpoint that dcp reads becomes any that it writes. Data is streamed: memory does not
/// grow with the checkpoint or its tensors. Stored chunks that are read as a whole are compared
/// with their checksums, chunks of which only a slice is read are not. The target appears when it
/// is complete.
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
  dcp convert DeepSeek-V3 plain --to hf --dequantize bf16
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

    /// Make block-scaled weights plain numbers of this dtype: fp8 with weight_scale_inv, MXFP4.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    pub(crate) dequantize: Option<DType>,

    /// Rows and columns of fp8 weights that share a scale, such as 128x128; by default what
    /// config.json says.
    #[arg(long, value_name = "ROWSxCOLUMNS", value_parser = parse_block, requires = "dequantize")]
    pub(crate) block_size: Option<[u64; 2]>,

    #[command(flatten)]
    pub(crate) choosing: Choosing,

    #[command(flatten)]
    optimizer: OptimizerKeys,
}

fn parse_block(text: &str) -> Result<[u64; 2], String> {
    let numbers = text.split_once('x').and_then(|(rows, columns)| {
        Some([rows.trim().parse().ok()?, columns.trim().parse().ok()?])
    });
    numbers.ok_or_else(|| format!("{text:?} is no size such as 128x128"))
}

impl Convert {
    /// The checkpoint with its block-scaled weights as plain numbers, if that was asked for.
    async fn dequantized(&self, source: Source, options: &JobOptions) -> Result<Source, Failure> {
        let Some(dtype) = self.dequantize else { return Ok(source) };
        let mut how = DequantizeOptions::new(dtype);
        how.block = self.block_size;
        Ok(Dequantized::apply(&source, how, options).await?)
    }
}

pub(crate) fn convert(args: &Convert, out: &Output) -> Result<(), Failure> {
    let usual = args.destination.usual_part(&args.target)?;
    let selection = args.choosing.selection(usual)?;
    let report = open::run(true, async {
        let opened = open::checkpoint(&args.source, Need::Whole, out).await?;
        args.destination.keep_apart(&opened, &args.target).await?;
        let bar = Bar::new(out, "converting");
        let options = args.destination.writing.options(bar.options());
        let source = args.dequantized(opened.source, &options).await?;
        let source = args.optimizer.apply(source, &options).await?;
        let (source, not_taken) = args.choosing.apply(&selection, &source, &options, out).await?;
        let mut report = args.destination.write(&source, &args.target, None, &options).await?;
        report.not_taken = not_taken;
        Ok(report)
    })?;
    tell(&report, &args.target, args.destination.writing.json, out)
}
