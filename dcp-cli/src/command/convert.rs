//! `dcp convert`.

use clap::Args;
use dcp::core::DType;
use dcp::jobs::Need;
use dcp::jobs::view::DequantizeOptions;
use dcp::mapping::MappingReport;
use dcp::megatron::framework::TORCH_DIST;

use crate::failure::Failure;
use crate::options::{
    Arch, Destination, KeyOptions, MegatronOptimizer, OptimizerKeys, parse_dtype,
};
use crate::output::mapping_notes::mapping_notes;
use crate::output::progress::Bar;
use crate::output::summary::write_summary;
use crate::session::Session;

/// Write a checkpoint in another format.
///
/// Any checkpoint that dcp reads becomes any that it writes. Data is streamed: memory does not
/// grow with the checkpoint or its tensors. Stored chunks that are read as a whole are compared
/// with their checksums, chunks of which only a slice is read are not. The target appears when it
/// is complete.
///
/// `safetensors` is one file with every tensor, unsharded, under its name; objects, which the
/// format cannot hold, are left out and listed. `hf` is a directory of such files with an index, or
/// of one model.safetensors, as transformers opens it; of a training state it gets the model, and of a Hugging Face model
/// its configuration and tokenizer. `torch-save` is one file
/// with everything, nested as it was saved. `dcp` is a directory in PyTorch's format. `torch-dist`
/// is one in Megatron-Core's, cut for the ranks of --tp, --pp and --ep.
///
/// A checkpoint of Megatron-Core becomes a model that transformers opens: --to hf recognizes the
/// family by arguments and shapes, splits and renames the weights, leaves padding out and writes
/// a config.json. A Hugging Face model goes the other way with --to torch-dist.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp convert runs/step_1000 model.safetensors
  dcp convert runs/step_1000 my-model --to hf --dtype bf16 --config original-model
  dcp convert runs/step_1000 everything.pt
  dcp convert model.safetensors as_dcp --to dcp
  dcp convert model.safetensors small --to dcp --compress zstd
  dcp convert DeepSeek-V3 plain --to hf --dequantize bf16
  dcp convert runs/step_1000 model.safetensors --model-only --dry-run
  dcp convert runs/step_1000 ema.safetensors --include 'ema.*' --rename 's/^ema\\.//'
  dcp convert run/iter_0001000 my-model --to hf
  mpirun -n 8 dcp convert run/iter_0001000 my-model --to hf
  dcp convert my-model run/release --to torch-dist --arch auto --tp 4 --pp 2
  dcp convert run/iter_0001000 repaired --to torch-dist --repair-optimizer

Keys:
  A GLOB is a whole name in which * matches any text and ? one character, or the beginning
  of names up to a dot. Keys are chosen by the names they have; then --map and --rename apply.
  With a mapping (--arch), the names are those that it gives.
  The chunks and files of tensors that are left out are not checked.
  Two keys that would get one name are an error, and nothing is written.")]
pub(crate) struct Convert {
    /// The checkpoint: a directory or a file of any format.
    pub(crate) source: String,

    /// What to write: a file or a directory, as the format has it.
    pub(crate) target: String,

    #[command(flatten)]
    pub(crate) destination: Destination,

    /// Make quantized tensors plain numbers of this dtype: fp8 with weight_scale_inv, MXFP4,
    /// torchao's optimizer states, Int8Tensor and Float8Tensor.
    #[arg(hide_short_help = true, long, value_name = "DTYPE", value_parser = parse_dtype, help_heading = "Quantized tensors")]
    pub(crate) dequantize: Option<DType>,

    /// Rows and columns of fp8 weights that share a scale, such as 128x128; by default what
    /// config.json says.
    #[arg(hide_short_help = true, long, value_name = "ROWSxCOLUMNS", value_parser = parse_block, requires = "dequantize", help_heading = "Quantized tensors")]
    pub(crate) block_size: Option<[u64; 2]>,

    #[command(flatten)]
    pub(crate) choosing: KeyOptions,

    #[command(flatten)]
    optimizer: OptimizerKeys,

    #[command(flatten)]
    arch: Arch,

    #[command(flatten)]
    megatron_optimizer: MegatronOptimizer,
}

fn parse_block(text: &str) -> Result<[u64; 2], String> {
    let numbers = text.split_once('x').and_then(|(rows, columns)| {
        Some([rows.trim().parse().ok()?, columns.trim().parse().ok()?])
    });
    let numbers = numbers.filter(|numbers: &[u64; 2]| !numbers.contains(&0));
    numbers.ok_or_else(|| format!("{text:?} is not a size such as 128x128"))
}

impl Convert {
    fn dequantize(&self) -> Option<DequantizeOptions> {
        let mut how = DequantizeOptions::new(self.dequantize?);
        how.block = self.block_size;
        Some(how)
    }
}

pub(crate) fn convert(args: &Convert, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let destination = args.destination.at(&args.target, &session.rollback);
    // A format that is not known is an error before anything is read.
    let format = destination.format()?;
    let (keys, mapping) = (args.choosing.keys()?, args.arch.options()?);
    // What computes tensors of several, or renames them all, needs the others too.
    let needs_others = args.dequantize.is_some()
        || args.optimizer.layout().is_some()
        || args.arch.is_given()
        || format == TORCH_DIST;
    let needed = if needs_others { None } else { keys.needed(format) };
    let written = session.run(true, async {
        let opened = session.open_for(&args.source, Need::Whole, needed).await?;
        let bar = Bar::new(out, "converting");
        let conversion = opened
            .convert(destination)
            .keys(keys)
            .with(mapping)
            .with(args.megatron_optimizer.options())
            .dequantize(args.dequantize())
            .job(session.shared(args.destination.writing.options(bar.options())));
        let conversion = match args.optimizer.layout() {
            Some(layout) => conversion.with(layout),
            None => conversion,
        };
        Ok(conversion.run().await?)
    })?;
    if args.destination.writing.json {
        return out.json(&written);
    }
    write_summary(&written.report, &args.target, false, out)?;
    let report = written.mapping.as_ref().and_then(|report| report.get::<MappingReport>());
    if let Some(report) = report {
        mapping_notes(report, out);
    }
    Ok(())
}
