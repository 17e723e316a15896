//! `dcp average`.

use clap::{Args, ValueEnum};
use dcp::DType;
use dcp::jobs;
use dcp::jobs::Need;
use dcp::jobs::text::{count, list};
use dcp::jobs::view::{AverageOptions, NonFloat};

use crate::failure::Failure;
use crate::options::{CorruptOptimizer, Destination, KeyOptions};
use crate::output::progress::Bar;
use crate::output::summary::write_summary;
use crate::session::Session;

/// Write the average of several checkpoints.
///
/// All must have the same keys and shapes, whatever their formats and however they are cut.
/// Every float is multiplied by the weight of its checkpoint, summed, and divided by the sum of
/// the weights; NaN anywhere makes NaN. What has no average (integers, truth values, quantized
/// tensors, objects) must be the same in all of them, unless --non-float says where to take it
/// from.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp average runs/step_800 runs/step_900 runs/step_1000 --out soup --to dcp
  dcp average a b --weights 0.7,0.3 --dtype bf16 --out average.safetensors
  dcp average runs/step_* --include 'model.*' --out model.safetensors --dry-run

Rounding:
  Sums are float32, and float64 for tensors that any checkpoint has in 64 bits; --accumulate
  float64 makes all of them so. The result is rounded once, to --dtype or to the dtype that the
  first checkpoint has. Weights need not add up to 1: only their proportions count.

Keys:
  Keys are chosen and renamed in every checkpoint before they are compared.")]
pub(crate) struct Average {
    /// The checkpoints: directories or files of any format.
    #[arg(required = true, num_args = 1.., value_name = "CHECKPOINT")]
    sources: Vec<String>,

    /// What to write: a file or a directory, as the format has it.
    #[arg(short, long, value_name = "TARGET")]
    out: String,

    /// A weight for each checkpoint, in order; all equal by default.
    #[arg(long, value_name = "W,W,…", value_delimiter = ',', allow_hyphen_values = true)]
    weights: Option<Vec<f64>>,

    /// The dtype to sum in.
    #[arg(long, value_name = "DTYPE")]
    accumulate: Option<Accumulate>,

    /// The checkpoint that keys without an average come from.
    #[arg(long, value_name = "WHICH", default_value = "error")]
    non_float: Other,

    #[command(flatten)]
    destination: Destination,

    #[command(flatten)]
    choosing: KeyOptions,

    #[command(flatten)]
    corrupt_optimizer: CorruptOptimizer,
}

/// A dtype for sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Accumulate {
    /// 32 bits.
    #[value(alias = "f32", alias = "fp32")]
    Float32,
    /// 64 bits.
    #[value(alias = "f64", alias = "fp64")]
    Float64,
}

/// The treatment of values without an average.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Other {
    /// It must be the same in all checkpoints.
    Error,
    /// From the first checkpoint.
    First,
    /// From the last one.
    Last,
}

impl Average {
    fn options(&self) -> AverageOptions {
        let mut options = AverageOptions::default().non_float(match self.non_float {
            Other::Error => NonFloat::Equal,
            Other::First => NonFloat::First,
            Other::Last => NonFloat::Last,
        });
        if let Some(weights) = &self.weights {
            options = options.weights(weights.clone());
        }
        if let Some(dtype) = self.accumulate {
            options = options.accumulate(match dtype {
                Accumulate::Float32 => DType::Float32,
                Accumulate::Float64 => DType::Float64,
            });
        }
        options
    }
}

pub(crate) fn average(args: &Average, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let destination = args.destination.at(&args.out, &session.rollback);
    // A format that is not known is an error before anything is read.
    destination.format()?;
    let keys = args.choosing.keys()?;
    let averaged = session.run(true, async {
        let bar = Bar::new(out, "averaging");
        let needed = keys.needed(destination.format()?);
        let all = session.open_all(&args.sources, Need::Whole, needed).await?;
        let average = jobs::combine::average(&all, destination)
            .keys(keys)
            .options(args.options())
            .with(args.corrupt_optimizer.options())
            .job(session.shared(args.destination.writing.options(bar.options())));
        Ok(average.run().await?)
    })?;
    let report = &averaged.written.report;
    write_summary(report, &args.out, args.destination.writing.json, out)?;
    if !report.overflowed.is_empty() {
        let numbers: u64 = report.overflowed.values().sum();
        let names: Vec<_> = report.overflowed.keys().cloned().collect();
        let numbers = count(usize::try_from(numbers).unwrap_or(usize::MAX), "mean");
        out.note(&format!(
            "{numbers} of finite numbers exceeded the dtype of the sum (--accumulate float64 may \
             help): {}",
            list(&names)
        ));
    }
    if averaged.taken > 0 {
        let from = match args.non_float {
            Other::Error => "same in all",
            Other::First => "taken from the first",
            Other::Last => "taken from the last",
        };
        out.note(&format!(
            "averaged {}; {} without an average: {from}",
            count(averaged.averaged, "tensor"),
            count(averaged.taken, "other key"),
        ));
    }
    Ok(())
}
