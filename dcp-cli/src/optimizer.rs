//! What becomes of the optimizer's state in checkpoints of Megatron-Core.

use clap::{Args, ValueEnum};
use dcp::convert::{JobOptions, Selection, Source};
use dcp::megatron::MegatronCheckpoint;
use dcp::megatron::optimizer::{
    CheckDepth, OptimizerReport, PerParameter, check_optimizer, is_optimizer_key, per_parameter,
    per_parameter_of_legacy, restart_optimizer,
};

use crate::failure::{Exit, Failure};
use crate::key_options::taken_of;
use crate::open::Opened;
use crate::output::Output;
use crate::style::count;
use crate::summary::list;

/// Options about the optimizer's state of Megatron-Core.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct MegatronOptimizer {
    /// Show the optimizer's state in another form: a tensor for each parameter and state, which
    /// any layout of ranks can have. Flat buffers are told apart by the values in them.
    #[arg(long, value_name = "FORM")]
    optimizer: Option<Form>,

    #[command(flatten)]
    corrupt: CorruptOptimizer,

    /// Let the optimizer begin anew: master parameters from the weights, moments and steps zero.
    #[arg(long, conflicts_with = "allow_corrupt_optimizer")]
    repair_optimizer: bool,
}

/// Whether damaged state of an optimizer of Megatron-Core is taken along.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Megatron-Core")]
pub(crate) struct CorruptOptimizer {
    /// Take optimizer state that Megatron-Core 0.15 to 0.19 shifted as it is.
    #[arg(long)]
    allow_corrupt_optimizer: bool,
}

/// A form of the optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// As it is stored.
    Stored,
    /// As fully_reshardable has it.
    PerParameter,
}

impl MegatronOptimizer {
    /// The first of the options that was given.
    fn given(self) -> Option<&'static str> {
        let given = [
            (self.optimizer.is_some(), "--optimizer"),
            (self.corrupt.allow_corrupt_optimizer, "--allow-corrupt-optimizer"),
            (self.repair_optimizer, "--repair-optimizer"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// What was opened, with the optimizer's state as it was asked for. Shifted state that
    /// `selection` would take is refused, unless it was said what to do about it.
    pub(crate) async fn apply(
        self,
        opened: &Opened,
        selection: &Selection,
        options: &JobOptions,
        out: &Output,
    ) -> Result<Source, Failure> {
        let Some(checkpoint) = &opened.megatron else {
            return match self.given() {
                None => Ok(opened.source.clone()),
                Some(option) => Err(not_for(option, &opened.uri)),
            };
        };
        let mut source = checkpoint.source().clone();
        let mut common = checkpoint.common().clone();
        let taken = taken_of(selection, &source).await?;
        let files = checkpoint.optimizer_files();
        if files.is_empty() && !taken.iter().any(|fqn| is_optimizer_key(fqn)) {
            return Ok(source);
        }
        if !self.repair_optimizer
            && !self.corrupt.allow_corrupt_optimizer
            && let Some(problem) = shifted(&opened.uri, checkpoint, options).await?
        {
            return Err(Failure::new(Exit::Bad, problem).hint(
                "--repair-optimizer takes the master parameters from the weights and lets the \
                 moments begin anew; --no-optimizer leaves the state out; \
                 --allow-corrupt-optimizer takes it as it is; the model is sound",
            ));
        }
        if self.optimizer == Some(Form::PerParameter) {
            let shown = match files {
                [] => per_parameter(&source, &common, options).await?,
                files => per_parameter_of_legacy(&source, &common, files, options).await?,
            };
            tell(&shown, out);
            if !shown.report.is_complete() && files.is_empty() {
                out.note("the buffers are kept besides, so that nothing is lost");
            }
            (source, common) = (shown.source, shown.common);
        }
        if self.repair_optimizer {
            // By parameter first, where that was asked for: flat buffers do not name them.
            let restarted =
                restart_optimizer(&source, &common, options).await.map_err(|error| {
                    Failure::from(error).hint(
                        "--optimizer per-parameter besides tells the parameters in buffers apart \
                     first; --no-optimizer leaves the state out",
                    )
                })?;
            out.note(&format!(
                "the optimizer begins anew: {} are the weights, moments and steps are zero",
                count(restarted.params, "master parameter")
            ));
            if !restarted.kept.is_empty() {
                let tensors = count(restarted.kept.len(), "tensor");
                out.note(&format!("{tensors} of it stay as they are: {}", list(&restarted.kept)));
            }
            source = restarted.source;
        }
        Ok(source)
    }
}

/// Says how the state was divided by parameter.
fn tell(shown: &PerParameter, out: &Output) {
    out.note(&format!("optimizer by parameter, from {}", shown.report));
    if let Some(layout) = &shown.report.layout {
        for problem in layout.problems().iter().take(PROBLEMS_MAX) {
            out.note(problem);
        }
        if !layout.without_state.is_empty() {
            let tensors = count(layout.without_state.len(), "tensor");
            let names = list(&layout.without_state);
            out.note(&format!("the optimizer has no state of {tensors} of the model: {names}"));
        }
    }
    for difference in shown.report.differing.iter().take(PROBLEMS_MAX) {
        out.note(&difference.to_string());
    }
    let more = shown.report.differing.len().saturating_sub(PROBLEMS_MAX);
    if more > 0 {
        out.note(&format!("and so have {}", count(more, "other group")));
    }
}

/// Places that could not be told and are said.
const PROBLEMS_MAX: usize = 5;

fn not_for(option: &str, uri: &str) -> Failure {
    let message = format!("{option} is for checkpoints of Megatron-Core, and {uri:?} is none");
    Failure::new(Exit::Usage, message).hint("leave it out")
}

impl CorruptOptimizer {
    /// Fails when shifted state would become a part of something that is made of several
    /// checkpoints. `taken` tells the keys, by their names in these, that do.
    pub(crate) async fn refuse(
        self,
        sources: &[Opened],
        taken: impl Fn(&str) -> bool,
        options: &JobOptions,
    ) -> Result<(), Failure> {
        if self.allow_corrupt_optimizer {
            let none = sources.iter().all(|opened| opened.megatron.is_none());
            return match sources.first() {
                Some(first) if none => Err(not_for("--allow-corrupt-optimizer", &first.uri)),
                _ => Ok(()),
            };
        }
        for opened in sources {
            if let Some(problem) = shifted_among(opened, &taken, options).await? {
                return Err(Failure::new(Exit::Bad, problem).hint(
                    "`dcp convert --to torch-dist --repair-optimizer` makes a sound one of it; \
                     --no-optimizer leaves the state out; --allow-corrupt-optimizer takes it as it \
                     is; the model is sound",
                ));
            }
        }
        Ok(())
    }
}

/// Says of a checkpoint that is looked at that the state among `shown` was shifted.
pub(crate) async fn note_shifted(
    opened: &Opened,
    shown: impl Fn(&str) -> bool,
    options: &JobOptions,
    out: &Output,
) {
    // What cannot be read is no evidence of anything, and said by whoever needs it.
    if let Ok(Some(problem)) = shifted_among(opened, shown, options).await {
        out.note(&format!("{problem}; `dcp verify` says what of each"));
    }
}

/// What is wrong with the optimizer's state, if any of it is among the keys `taken`.
async fn shifted_among(
    opened: &Opened,
    taken: impl Fn(&str) -> bool,
    options: &JobOptions,
) -> Result<Option<String>, Failure> {
    let Some(checkpoint) = &opened.megatron else { return Ok(None) };
    let metadata = opened.source.metadata().await?;
    match metadata.iter().any(|(fqn, _)| is_optimizer_key(fqn) && taken(fqn)) {
        true => shifted(&opened.uri, checkpoint, options).await,
        false => Ok(None),
    }
}

/// What is wrong with the optimizer's state, when it is not that of the model because it was
/// shifted.
async fn shifted(
    uri: &str,
    checkpoint: &MegatronCheckpoint,
    options: &JobOptions,
) -> Result<Option<String>, Failure> {
    let (source, common) = (checkpoint.source(), checkpoint.common());
    let report: OptimizerReport =
        check_optimizer(source, common, CheckDepth::Sampled, options).await?;
    if !report.is_suspect() {
        return Ok(None);
    }
    let names: Vec<_> = report.mismatches.iter().map(|m| m.param.clone()).collect();
    Ok(Some(format!(
        "the optimizer of {uri:?} {}: {}; {} of {} are concerned: {}",
        if report.is_corrupt() { "is damaged" } else { "is not that of the model" },
        report.verdict,
        names.len(),
        count(report.compared, "parameter"),
        list(&names)
    )))
}
