//! `dcp stats`.

use clap::{Args, ValueEnum};
use dcp::core::format::WantedKeys;
use dcp::jobs::Need;
use dcp::jobs::Selection;
use dcp::jobs::stats::{Anomaly, StatsReport, TensorStats};
use dcp::planner::KeyFilter;

use crate::failure::{Exit, Failure};
use crate::options::parse_bytes;
use crate::output::progress::Bar;
use crate::output::render::stats;
use crate::output::summary::unmatched_notes;
use crate::session::Session;
use crate::terms::in_messages;

/// Show statistics of a checkpoint, and find the NaN that killed the run.
///
/// Reads every byte once and prints for each tensor its range, mean, standard deviation, share of
/// zeros and a histogram of magnitudes. Every tensor with a NaN or an infinity is listed with the
/// index of the first, and the files and ranks that hold them. Losses and other floats in objects
/// are looked at, too. Stored bytes are compared with their checksums: damage is an error, never
/// a statistic.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp stats runs/step_1000
  dcp stats runs/step_1000 --nan                    only what holds a NaN or an infinity
  dcp stats runs/step_1000 model.embed.weight       one tensor, with a large histogram
  dcp stats runs/step_1000 --filter 'model.*' --sort max
  dcp stats runs/step_1000 --fail-on nan,inf -q     in a script: exit code 1 if there is one
  dcp stats runs/step_1000 --json | jq '.tensors | map_values(.std)'
  mpirun -n 8 dcp stats runs/step_1000              each rank reads a part

Numbers:
  Minimum, maximum, mean and standard deviation (of the population) are those of the finite
  numbers. A complex number counts as its two parts, a packed byte as all its values; quantized
  tensors are taken as they are stored. `subnormal` numbers are below the normal range of the
  dtype; `overflow` ones are in the topmost power of two before infinity.

Histograms:
  One bin for every power of two of the magnitude. In the table all tensors share one scale, from
  small on the left to large on the right, so that they can be compared.")]
pub(crate) struct Stats {
    /// The checkpoint.
    pub(crate) uri: String,

    /// Only this tensor, with a large histogram.
    #[arg(conflicts_with_all = ["filter", "sort", "nan"])]
    pub(crate) fqn: Option<String>,

    /// Only names that match: `*` matches any text, `?` one character, and a part that
    /// ends before a dot for all below it. May be given more than once.
    #[arg(long, value_name = "GLOB")]
    pub(crate) filter: Vec<String>,

    /// Only what holds a NaN or an infinity.
    #[arg(long)]
    pub(crate) nan: bool,

    /// The order of the tensors.
    #[arg(long, value_name = "BY", default_value = "checkpoint")]
    pub(crate) sort: Sort,

    /// End with exit code 1 if there is any of these.
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub(crate) fail_on: Vec<FailOn>,

    /// Bytes of tensors to hold in memory at once, such as 64MiB or 2GB.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    pub(crate) max_memory: u64,

    /// Print one JSON object, histograms included.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How to sort tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// As the checkpoint has them.
    Checkpoint,
    /// By name.
    Name,
    /// The most NaNs and infinities first.
    Bad,
    /// The largest magnitude first.
    Max,
    /// The largest standard deviation first.
    Std,
    /// The largest share of zeros first.
    Zero,
    /// The most bytes first.
    Size,
}

/// What makes the command fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FailOn {
    /// A NaN.
    Nan,
    /// An infinity.
    Inf,
    /// A number in the topmost power of two before infinity.
    Overflow,
    /// A tensor of nothing but zeros.
    Zeros,
}

impl From<FailOn> for Anomaly {
    fn from(what: FailOn) -> Self {
        match what {
            FailOn::Nan => Self::Nan,
            FailOn::Inf => Self::Infinity,
            FailOn::Overflow => Self::NearOverflow,
            FailOn::Zeros => Self::AllZeros,
        }
    }
}

pub(crate) fn stats(args: &Stats, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let mut report = session.run(true, async {
        let selection = match &*args.filter {
            [] => Selection::all(),
            filter => Selection::all().with_include(KeyFilter::any_of(filter)),
        };
        let keys = match &args.fqn {
            Some(fqn) => Some(WantedKeys::one(fqn)),
            None => (!selection.is_everything()).then(|| selection.needed()),
        };
        let opened = session.open_for(&args.uri, Need::Whole, keys).await?;
        let bar = Bar::new(out, "counting");
        let options = session.shared(bar.options().with_max_memory(args.max_memory));
        let stats = opened.stats().selection(selection).key(args.fqn.clone()).job(options);
        let mut report = stats.run().await?;
        for one in &mut report.unmatched {
            one.option = "filter".to_owned();
        }
        Ok(report)
    })?;
    if !session.is_coordinator() {
        return Ok(());
    }
    let failed = args.fail_on.iter().any(|what| report.has((*what).into()));
    arrange(args, &mut report);
    in_messages(&mut report.notes);
    if args.json {
        out.json(&report)?;
    } else if !out.quiet {
        let text = match args.fqn.as_deref().and_then(|fqn| report.tensors.get_key_value(fqn)) {
            Some((fqn, tensor)) => stats::one(fqn, tensor, out),
            None => stats::table(&args.uri, &report, args.nan, out),
        };
        out.write(&text)?;
        unmatched_notes(&report.unmatched, out);
    }
    if failed { Err(Failure::reported(Exit::Bad)) } else { Ok(()) }
}

/// Leaves out and sorts what is shown.
fn arrange(args: &Stats, report: &mut StatsReport) {
    let tensors = &mut report.tensors;
    if args.nan {
        tensors.retain(|_, tensor| tensor.numbers.non_finite() > 0);
    }
    let by: fn(&TensorStats) -> f64 = match args.sort {
        Sort::Checkpoint => return,
        Sort::Name => return tensors.sort_keys(),
        Sort::Bad => |tensor| tensor.numbers.non_finite() as f64,
        Sort::Max => |tensor| tensor.numbers.abs_max.map_or(-1.0, |max| max.as_f64()),
        Sort::Std => |tensor| tensor.numbers.std.unwrap_or(-1.0),
        Sort::Zero => |tensor| tensor.numbers.zero_share(),
        Sort::Size => |tensor| tensor.bytes as f64,
    };
    tensors.sort_by(|_, a, _, b| by(b).total_cmp(&by(a)));
}
