//! The optimizer state of Megatron-Core's checkpoints in jobs that write.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_jobs::framework::{Concern, FrameworkOptions, Taken};
use dcp_jobs::text::{count, list};
use dcp_jobs::{Checkpoint, Error, ErrorKind, JobOptions, Notes, Source};

use crate::open::checkpoint::MegatronCheckpoint;
use crate::optimizer::{
    CheckDepth, OptimizerReport, PerParameter, check_optimizer, is_optimizer_key, per_parameter,
    per_parameter_of_legacy, restart_optimizer,
};

/// Problems that are noted one by one.
const PROBLEMS_MAX: usize = 5;

/// A form of the optimizer's state of Megatron-Core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptimizerForm {
    /// As it is stored.
    Stored,
    /// A tensor for each parameter and state, as `fully_reshardable` has it. Flat buffers are
    /// divided by comparing their values with the model's.
    PerParameter,
}

/// The treatment of Megatron-Core's optimizer state. State that Megatron-Core 0.15 to 0.19
/// shifted is refused by default.
///
/// ```
/// use dcp_megatron::framework::{OptimizerForm, OptimizerOptions};
/// let repaired = OptimizerOptions::new().form(OptimizerForm::PerParameter).repair(true);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OptimizerOptions {
    /// The form; as stored by default.
    pub(crate) form: Option<OptimizerForm>,
    /// Whether shifted state is written as it is.
    pub(crate) allow_corrupt: bool,
    /// Whether the optimizer is reset: master parameters from the weights, moments and steps
    /// zero.
    pub(crate) repair: bool,
}

impl FrameworkOptions for OptimizerOptions {
    fn taken_by(&self) -> &'static str {
        super::NAME
    }

    fn concern(&self) -> Concern {
        Concern::Optimizer
    }

    fn subject(&self) -> &'static str {
        "optimizer"
    }

    fn given(&self) -> Option<&'static str> {
        let given = [
            (self.form.is_some(), "`OptimizerOptions::form`"),
            (self.allow_corrupt, "`OptimizerOptions::allow_corrupt`"),
            (self.repair, "`OptimizerOptions::repair`"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }
}

impl OptimizerOptions {
    /// As it is stored, unless it is damaged.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the form.
    #[must_use]
    pub fn form(mut self, form: impl Into<Option<OptimizerForm>>) -> Self {
        self.form = form.into();
        self
    }

    /// The same, with shifted state written as it is or refused.
    #[must_use]
    pub fn allow_corrupt(mut self, allow: bool) -> Self {
        self.allow_corrupt = allow;
        self
    }

    /// The same, with the optimizer reset or kept.
    #[must_use]
    pub fn repair(mut self, repair: bool) -> Self {
        self.repair = repair;
        self
    }

    /// `source`, that of the checkpoint, with the optimizer's state as chosen. Shifted state among the keys
    /// `taken` is refused, unless an option selects a treatment.
    pub(super) async fn apply(
        self,
        mut source: Source,
        opened: &Checkpoint,
        taken: &HashSet<Arc<str>>,
        job: &JobOptions,
        notes: &mut Notes,
    ) -> Result<Source, Error> {
        let Some(checkpoint) = opened.downcast::<MegatronCheckpoint>() else {
            return match self.given() {
                None => Ok(source),
                Some(option) => Err(not_for(option, opened.uri())),
            };
        };
        let mut common = checkpoint.common().clone();
        let files = checkpoint.optimizer_files();
        if files.is_empty() && !taken.iter().any(|fqn| is_optimizer_key(fqn)) {
            return Ok(source);
        }
        if !self.repair
            && !self.allow_corrupt
            && let Some(problem) = shifted(opened.uri(), checkpoint, job).await?
        {
            return Err(Error::new(ErrorKind::Damaged, problem).with_hint(
                "`OptimizerOptions::repair` takes the master parameters from the weights and \
                 resets the moments; `StatePart::WithoutOptimizer` leaves the state out; \
                 `OptimizerOptions::allow_corrupt` writes it as it is; the model is sound",
            ));
        }
        if self.form == Some(OptimizerForm::PerParameter) {
            let shown = match files {
                [] => per_parameter(&source, &common, job).await?,
                files => per_parameter_of_legacy(&source, &common, files, job).await?,
            };
            note_division(&shown, notes);
            if !shown.report.is_complete() && files.is_empty() {
                notes.say("the buffers are kept, too, so that nothing is lost");
            }
            (source, common) = (shown.source, shown.common);
        }
        if self.repair {
            // By parameter first, where that was chosen: flat buffers do not name them.
            let restarted = restart_optimizer(&source, &common, job).await.map_err(|error| {
                Error::from(error).with_hint(
                    "`OptimizerForm::PerParameter`, given as well, divides the buffers by parameter \
                     first; `StatePart::WithoutOptimizer` leaves the state out",
                )
            })?;
            notes.say(format!(
                "the optimizer is reset: {} are the weights, moments and steps are zero",
                count(restarted.params, "master parameter")
            ));
            if !restarted.kept.is_empty() {
                let tensors = count(restarted.kept.len(), "tensor");
                notes.say(format!("{tensors} of it stay as they are: {}", list(&restarted.kept)));
            }
            source = restarted.source;
        }
        Ok(source)
    }
}

/// Notes how the state was divided by parameter.
fn note_division(shown: &PerParameter, notes: &mut Notes) {
    notes.say(format!("optimizer by parameter, from {}", shown.report));
    if let Some(layout) = &shown.report.layout {
        for problem in layout.problems().iter().take(PROBLEMS_MAX) {
            notes.say(problem.to_string());
        }
        if !layout.without_state.is_empty() {
            let tensors = count(layout.without_state.len(), "tensor");
            let names = list(&layout.without_state);
            notes.say(format!("the optimizer has no state of {tensors} of the model: {names}"));
        }
    }
    for difference in shown.report.differing.iter().take(PROBLEMS_MAX) {
        notes.say(difference.to_string());
    }
    let more = shown.report.differing.len().saturating_sub(PROBLEMS_MAX);
    if more > 0 {
        notes.say(format!("and so have {}", count(more, "other group")));
    }
}

fn not_for(option: &str, uri: &str) -> Error {
    let message = format!("{option} is for checkpoints of Megatron-Core, and {uri:?} is none");
    Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out")
}

/// Fails when shifted state would become a part of something that is made of several checkpoints.
/// `taken` says which keys do, by their names in these.
pub(super) async fn refuse_corrupt(
    options: OptimizerOptions,
    sources: &[&Checkpoint],
    taken: Taken<'_>,
    job: &JobOptions,
) -> Result<(), Error> {
    let mut all = sources.iter().map(|one| (*one, one.downcast::<MegatronCheckpoint>()));
    if options.form.is_some() || options.repair {
        let option = options.given().unwrap_or_default();
        let message = format!("{option} is for one checkpoint, and this is made of several");
        let hint = "write each of them with it first, by `Checkpoint::convert`";
        return Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint));
    }
    if let Some(option) = options.given() {
        let none = all.all(|(_, checkpoint)| checkpoint.is_none());
        return match sources.first() {
            Some(first) if none => Err(not_for(option, first.uri())),
            _ => Ok(()),
        };
    }
    for (opened, checkpoint) in all {
        let Some(checkpoint) = checkpoint else { continue };
        if let Some(problem) = problem(opened.uri(), checkpoint, taken, job).await? {
            return Err(Error::new(ErrorKind::Damaged, problem).with_hint(
                "`OptimizerOptions::repair` makes a sound one of it; \
                 `StatePart::WithoutOptimizer` leaves the state out; \
                 `OptimizerOptions::allow_corrupt` writes it as it is; the model is sound",
            ));
        }
    }
    Ok(())
}

/// Finds the problem of the optimizer's state, if any of it is among the keys `taken`: in words, when it is
/// not that of the model.
pub(super) async fn problem(
    uri: &str,
    checkpoint: &MegatronCheckpoint,
    taken: Taken<'_>,
    job: &JobOptions,
) -> Result<Option<String>, Error> {
    let metadata = checkpoint.source().metadata().await?;
    match metadata.iter().any(|(fqn, _)| is_optimizer_key(fqn) && taken(fqn)) {
        true => shifted(uri, checkpoint, job).await,
        false => Ok(None),
    }
}

/// Finds the problem of the optimizer's state, when it is not that of the model because it was
/// shifted.
async fn shifted(
    uri: &str,
    checkpoint: &MegatronCheckpoint,
    job: &JobOptions,
) -> Result<Option<String>, Error> {
    let (source, common) = (checkpoint.source(), checkpoint.common());
    let report: OptimizerReport = check_optimizer(source, common, CheckDepth::Sampled, job).await?;
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
