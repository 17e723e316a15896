//! The optimizer state of Megatron-Core's checkpoints in a conversion.

use dcp_convert::{JobOptions, Selection, Source};
use dcp_megatron::MegatronCheckpoint;
use dcp_megatron::optimizer::{
    CheckDepth, OptimizerReport, PerParameter, check_optimizer, is_optimizer_key, per_parameter,
    per_parameter_of_legacy, restart_optimizer,
};

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind};
use crate::keys::taken_of;
use crate::notes::Notes;
use crate::text::{count, list};

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
/// use dcp_checkpoint::{OptimizerForm, OptimizerOptions};
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

    /// The first of the options that is not the default.
    pub(crate) fn given(self) -> Option<&'static str> {
        let given = [
            (self.form.is_some(), "--optimizer"),
            (self.allow_corrupt, "--allow-corrupt-optimizer"),
            (self.repair, "--repair-optimizer"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// The checkpoint with the optimizer's state as chosen. Shifted state that `selection` would
    /// take is refused, unless an option selects a treatment.
    pub(crate) async fn apply(
        self,
        opened: &Checkpoint,
        selection: &Selection,
        job: &JobOptions,
        notes: &mut Notes,
    ) -> Result<Source, Error> {
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
        if !self.repair
            && !self.allow_corrupt
            && let Some(problem) = shifted(&opened.uri, checkpoint, job).await?
        {
            return Err(Error::new(ErrorKind::Damaged, problem).with_hint(
                "--repair-optimizer takes the master parameters from the weights and resets the \
                 moments; --no-optimizer leaves the state out; --allow-corrupt-optimizer writes it \
                 as it is; the model is sound",
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
                    "--optimizer per-parameter, given as well, divides the buffers by parameter \
                     first; --no-optimizer leaves the state out",
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
pub(crate) async fn refuse_corrupt(
    allow: bool,
    sources: &[&Checkpoint],
    taken: impl Fn(&str) -> bool,
    job: &JobOptions,
) -> Result<(), Error> {
    if allow {
        let none = sources.iter().all(|opened| opened.megatron.is_none());
        return match sources.first() {
            Some(first) if none => Err(not_for("--allow-corrupt-optimizer", &first.uri)),
            _ => Ok(()),
        };
    }
    for opened in sources {
        if let Some(problem) = opened.optimizer_problem(&taken, job).await? {
            return Err(Error::new(ErrorKind::Damaged, problem).with_hint(
                "`dcp convert --to torch-dist --repair-optimizer` makes a sound one of it; \
                 --no-optimizer leaves the state out; --allow-corrupt-optimizer writes it as it \
                 is; the model is sound",
            ));
        }
    }
    Ok(())
}

impl Checkpoint {
    /// Finds the problem of the optimizer's state of a checkpoint of Megatron-Core, if any of it is
    /// among the keys `taken`: in words, when it is not that of the model.
    ///
    /// # Errors
    ///
    /// When the state cannot be read.
    pub async fn optimizer_problem(
        &self,
        taken: impl Fn(&str) -> bool,
        job: &JobOptions,
    ) -> Result<Option<String>, Error> {
        let Some(checkpoint) = &self.megatron else { return Ok(None) };
        let metadata = self.source.metadata().await?;
        match metadata.iter().any(|(fqn, _)| is_optimizer_key(fqn) && taken(fqn)) {
            true => shifted(&self.uri, checkpoint, job).await,
            false => Ok(None),
        }
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
