//! `dcp convert`.

use clap::Args;

use crate::arch::{self, Arch, Towards};
use crate::destination::{Destination, For, Format, parse_dtype};
use crate::failure::Failure;
use crate::hf_config;
use crate::incomplete_save;
use crate::key_options::{KeyOptions, OptimizerKeys, unmatched_in};
use crate::open::{self, Need};
use crate::optimizer::MegatronOptimizer;
use crate::output::Output;
use crate::progress::Bar;
use crate::summary::tell;
use crate::torch_dist::TorchDist;
use dcp::convert::view::{DequantizeOptions, Dequantized};
use dcp::convert::{JobOptions, Source, WriteReport};
use dcp::core::DType;
use dcp::mapping::MappingReport;
use serde::Serialize;

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
  dcp convert DeepSeek-V3 plain --to hf --dequantize bf16
  dcp convert runs/step_1000 model.safetensors --model-only --dry-run
  dcp convert runs/step_1000 ema.safetensors --include 'ema.*' --rename 's/^ema\\.//'
  dcp convert run/iter_0001000 my-model --to hf
  dcp convert my-model run/release --to torch-dist --arch auto --tp 4 --pp 2
  dcp convert run/iter_0001000 repaired --to torch-dist --repair-optimizer

Keys:
  A GLOB is a whole name in which * stands for any text and ? for one character, or the beginning
  of names up to a dot. Keys are chosen by the names they have; then --map and --rename apply.
  With a mapping (--arch), the names are those that it gives.
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
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    pub(crate) dequantize: Option<DType>,

    /// Rows and columns of fp8 weights that share a scale, such as 128x128; by default what
    /// config.json says.
    #[arg(long, value_name = "ROWSxCOLUMNS", value_parser = parse_block, requires = "dequantize")]
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
    let (report, mapping) = open::run(true, async {
        let opened = open::checkpoint(&args.source, Need::Whole, out).await?;
        args.destination.keep_apart(&opened, &args.target).await?;
        let (to, config) = (args.destination.format(&args.target)?, args.destination.config());
        if matches!(to, Format::TorchDist | Format::Dcp | Format::TorchSave) {
            incomplete_save::refuse(&opened)?;
        }
        let bar = Bar::new(out, "converting");
        let options = args.destination.writing.options(bar.options());
        let source = args.megatron_optimizer.apply(&opened, &selection, &options, out).await?;
        let source = args.dequantized(source, &options).await?;
        let source = args.optimizer.apply(source, &options).await?;
        let layout = args.destination.torch_dist.layout(&opened).await?;
        let dtype = args.destination.dtype();
        let towards = Towards { format: to, tp: layout.tp, config, dtype };
        let named = args.arch.apply(source, &opened, towards, &options, out).await?;
        let source = named.source;
        let common = match to {
            Format::TorchDist => TorchDist::common(&source, &selection).await?,
            _ => None,
        };
        let mut beside: Vec<_> = named.config.into_iter().collect();
        if to == Format::Hf && config.is_none() {
            let copied = hf_config::files_beside(&opened).await?;
            if !copied.is_empty() {
                let names: Vec<_> = copied.iter().map(|(key, _)| key.as_str()).collect();
                out.note(&format!("copying {} from {:?}", names.join(", "), opened.place));
            }
            hf_config::complete(&mut beside, copied);
        }
        let how = For { beside, layout: Some(layout), common };
        let unmatched = unmatched_in(&selection, [&source]).await?;
        let (source, not_taken) = args.choosing.apply(&selection, &source, &options, out).await?;
        let mut report = args.destination.write(&source, &args.target, how, &options).await?;
        report.not_taken = not_taken;
        report.unmatched.splice(..0, unmatched);
        Ok((report, named.report))
    })?;
    if args.destination.writing.json {
        return out.json(&Converted { report: &report, mapping: mapping.as_ref() });
    }
    tell(&report, &args.target, false, out)?;
    if let Some(mapping) = &mapping {
        arch::tell(mapping, out);
    }
    Ok(())
}

/// The output of `--json`.
#[derive(Serialize)]
struct Converted<'a> {
    #[serde(flatten)]
    report: &'a WriteReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    mapping: Option<&'a MappingReport>,
}
