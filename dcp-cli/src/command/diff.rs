//! `dcp diff`.

use clap::Args;
use dcp::jobs::Need;
use dcp::jobs::Selection;
use dcp::jobs::diff::DiffOptions;
use dcp::jobs::element::Tolerance;
use dcp::jobs::keys::{Rename, StatePart};
use dcp::planner::KeyFilter;

use crate::failure::{Exit, Failure};
use crate::options::{parse_bytes, parse_rename};
use crate::output::progress::Bar;
use crate::output::render::diff;
use crate::output::render::diff::DiffView;
use crate::output::summary::unmatched_notes;
use crate::session::Session;
use crate::terms::in_messages;

/// Compare two checkpoints: keys, shapes, dtypes and values.
///
/// The two may have different formats and be cut for different numbers of ranks. Keys that are
/// only in one are listed, and so are different shapes and dtypes; then every element is
/// compared, both checkpoints being streamed at once. Objects are compared part by part. The
/// gravest differences come first.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp diff runs/step_1000 runs/step_2000
  dcp diff runs/step_1000 model.safetensors --model-only
  dcp diff old new --rtol 1e-5 --atol 1e-8
  dcp diff fp32 bf16 --rtol 0.01 --ignore-dtype
  dcp diff wrapped plain --strip-a module.          compares module.x with x
  dcp diff a b --rename-b 's/^transformer\\.h\\.(\\d+)/model.layers.\\1/'
  dcp diff a b --keys-only                           reads no tensor
  dcp diff a b -q || echo different                  in a script
  srun -n 8 dcp diff a b                             each rank compares a part

Values:
  Without --rtol and --atol, elements of one dtype are equal when all their bits are: 0.0 differs
  from -0.0, and a NaN equals the same NaN. With either, a and b are equal when
  |a - b| <= atol + rtol * |b|, as in numpy.allclose; infinities equal themselves and NaNs any
  NaN. Values of different dtypes are compared as numbers, 64-bit integers exactly; the parts of
  complex numbers and the values of packed bytes one by one.

Names:
  --strip and --rename say under which names the keys of one side are compared; --include and
  --exclude choose among those names. --model-only takes the model of both sides, without the
  name of the dict that it is in.

Exit codes:
  0  no difference
  1  there are differences
  2  wrong usage
  3  a checkpoint could not be read, or is damaged; the error says which chunk")]
pub(crate) struct Diff {
    /// One checkpoint.
    pub(crate) a: String,

    /// The other one.
    pub(crate) b: String,

    /// Allow values to differ by this share of the magnitude in B.
    #[arg(long, value_name = "R", value_parser = parse_tolerance)]
    pub(crate) rtol: Option<f64>,

    /// Allow values to differ by this much.
    #[arg(long, value_name = "A", value_parser = parse_tolerance)]
    pub(crate) atol: Option<f64>,

    /// Different dtypes are no difference when the values are equal.
    #[arg(long)]
    pub(crate) ignore_dtype: bool,

    /// Compare keys, shapes and dtypes, but no values.
    #[arg(long, conflicts_with_all = ["rtol", "atol"])]
    pub(crate) keys_only: bool,

    /// Compare only keys that match or are below this name; may be given again for more.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,

    /// Leave out keys that match or are below this name; may be given again.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,

    /// Compare only the models.
    #[arg(long)]
    pub(crate) model_only: bool,

    /// Leave out the optimizers.
    #[arg(long, conflicts_with = "model_only")]
    pub(crate) no_optimizer: bool,

    /// Compare keys of A that begin with this without it.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) strip_a: Option<String>,

    /// Compare keys of B that begin with this without it.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) strip_b: Option<String>,

    /// Rename keys of A as sed does: s/PATTERN/REPLACEMENT/; may be given again.
    #[arg(long, value_name = "SUBSTITUTION", value_parser = parse_rename)]
    pub(crate) rename_a: Vec<Rename>,

    /// Rename keys of B as sed does; may be given again.
    #[arg(long, value_name = "SUBSTITUTION", value_parser = parse_rename)]
    pub(crate) rename_b: Vec<Rename>,

    /// Show at most so many differences; 0 shows all.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(crate) limit: usize,

    /// Bytes of tensors to hold in memory at once, such as 64MiB or 2GB.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    pub(crate) max_memory: u64,

    /// Print one JSON object with all differences.
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number),
        _ => Err("a tolerance is a number that is not negative, such as 1e-5".to_owned()),
    }
}

impl Diff {
    fn options(&self) -> Result<DiffOptions, Failure> {
        let mut options = DiffOptions::default();
        options.a = self.side(self.strip_a.as_deref(), &self.rename_a)?;
        options.b = self.side(self.strip_b.as_deref(), &self.rename_b)?;
        if !self.include.is_empty() {
            options.include = KeyFilter::any_of(&self.include);
        }
        if !self.exclude.is_empty() {
            options.exclude = Some(KeyFilter::any_of(&self.exclude));
        }
        if self.rtol.is_some() || self.atol.is_some() {
            let (rtol, atol) = (self.rtol.unwrap_or(0.0), self.atol.unwrap_or(0.0));
            options.tolerance = Some(Tolerance { rtol, atol });
        }
        options.keys_only = self.keys_only;
        options.ignore_dtype = self.ignore_dtype;
        Ok(options)
    }

    /// Whether an option leaves keys out.
    fn chooses_keys(&self) -> bool {
        let patterns = self.include.len() + self.exclude.len();
        patterns > 0 || self.model_only || self.no_optimizer
    }

    fn side(&self, strip: Option<&str>, renames: &[Rename]) -> Result<Selection, Failure> {
        let mut selection = Selection::all().with_part(match () {
            () if self.model_only => StatePart::Model,
            () if self.no_optimizer => StatePart::WithoutOptimizer,
            () => StatePart::Everything,
        });
        if let Some(prefix) = strip {
            selection = selection.with_rename(Rename::without_prefix(prefix)?);
        }
        Ok(renames.iter().cloned().fold(selection, Selection::with_rename))
    }
}

pub(crate) fn diff(args: &Diff, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let options = args.options()?;
    let mut report = session
        .run(!args.keys_only, async {
            let needed = |side| args.chooses_keys().then(|| options.needed(side));
            let a = session.open_for(&args.a, Need::Whole, needed(&options.a)).await?;
            let b = session.open_for(&args.b, Need::Whole, needed(&options.b)).await?;
            let bar = Bar::new(out, "comparing");
            let job = session.shared(bar.options().with_max_memory(args.max_memory));
            let diff = a.diff(&b).options(options).job(job);
            Ok(diff.run().await?)
        })
        // A checkpoint that cannot be read is neither equal nor different.
        .map_err(|failure| failure.instead_of(Exit::Bad, Exit::Io))?;
    if !session.is_coordinator() {
        return Ok(());
    }
    in_messages(&mut report.notes);
    if args.json {
        out.json(&report)?;
    } else if !out.quiet {
        let view =
            DiffView { a: &args.a, b: &args.b, limit: args.limit, keys_only: args.keys_only };
        out.write(&diff::render(view, &report, out))?;
        unmatched_notes(&report.unmatched, out);
    }
    if report.equal { Ok(()) } else { Err(Failure::reported(Exit::Bad)) }
}
