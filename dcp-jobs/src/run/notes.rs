//! The notes of trainers on the best checkpoint, and which of their notes decides.
//!
//! A trainer saves its state with each checkpoint, and in it the path of the best one so far: each state is
//! a note. The newest note decides which checkpoint is the best. A note that cannot be read, or
//! whose path leads to no whole checkpoint of the run, may name any checkpoint: until a newer one
//! that can be read decides over it, a policy deletes nothing complete. The opposite, to ignore what cannot
//! be read, would delete the best weights of a run because of one file.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::SystemTime;

use dcp_core::text::Quoted;

use super::StepNaming;
use super::look::Seen;
use super::order::StepOrder;

/// The components of a path, from its end, among which the folder of a checkpoint is.
const DEPTH_MAX: usize = 3;

/// The best checkpoints by one file of a trainer.
#[derive(Clone, Debug)]
pub(super) struct Note {
    /// The file, in the folder of the run.
    pub(super) file: String,
    /// The folder of the step that it was saved with; none in the folder of the run or in another one.
    pub(super) of_step: Option<String>,
    /// The training step at which it was written.
    pub(super) step: Option<u64>,
    /// The time of its last write.
    pub(super) written: Option<SystemTime>,
    /// The checkpoint that it names.
    pub(super) best: Best,
}

/// The best checkpoint by a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Best {
    /// The paths of the best checkpoints; none where the trainer has none.
    Paths(Vec<String>),
    /// That is unknown, with the reason: a clause about the file.
    Unclear(String),
}

impl Note {
    /// Whether it was saved with the step in the folder of this name.
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.of_step.as_deref() == Some(name)
    }

    /// Whether this note is newer than `other` in the chosen order, and in both where none is chosen.
    fn is_newer(&self, other: &Self, by: Option<StepOrder>) -> bool {
        if self.of_step.is_some() && self.of_step == other.of_step {
            return false;
        }
        let steps = self.step.zip(other.step).map(|(one, other)| one.cmp(&other));
        let times = self.written.zip(other.written).map(|(one, other)| one.cmp(&other));
        let then = |first: Option<Ordering>, second: Option<Ordering>| match first {
            Some(Ordering::Equal) => second.is_some_and(Ordering::is_ge),
            Some(order) => order.is_gt(),
            None => second.is_some_and(Ordering::is_gt),
        };
        match by {
            Some(StepOrder::Step) => then(steps, times),
            Some(StepOrder::Time) => then(times, steps),
            None => then(steps, times) && times.is_none_or(Ordering::is_ge),
        }
    }
}

/// The notes of a run, and what they can name.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) all: Vec<Note>,
    /// Checkpoints in the folder of the run, and whether they are complete; folders and files.
    pub(super) others: BTreeMap<String, Option<bool>>,
}

impl Notes {
    /// The notes that may name any checkpoint, as no newer one decides over them, each with a clause.
    pub(super) fn unclear(&self, steps: &[Seen], by: Option<StepOrder>) -> Vec<(&Note, String)> {
        let read: Vec<_> = self.all.iter().map(|note| self.problem(note, steps)).collect();
        let is_clear = |(_, problem): &(&Note, &Option<String>)| problem.is_none();
        let clear = || self.all.iter().zip(&read).filter(is_clear).map(|(note, _)| note);
        let mut found: Vec<_> = self
            .all
            .iter()
            .zip(&read)
            .filter_map(|(note, problem)| Some((note, problem.as_ref()?)))
            .filter(|(note, _)| !clear().any(|other| other.is_newer(note, by)))
            .map(|(note, problem)| (note, format!("{} {problem}", Quoted(&note.file))))
            .collect();
        found.sort_by(|(_, a), (_, b)| a.cmp(b));
        found.dedup_by(|(_, a), (_, b)| a == b);
        found
    }

    /// Returns why a note may name any checkpoint.
    fn problem(&self, note: &Note, steps: &[Seen]) -> Option<String> {
        match &note.best {
            Best::Unclear(problem) => Some(problem.clone()),
            Best::Paths(paths) => {
                let lost = paths.iter().find(|path| !self.leads_to_whole(path, steps))?;
                let path = Quoted(lost);
                Some(format!("names {path} as the best, which is no whole checkpoint of the run"))
            }
        }
    }

    /// Whether a path ends at a checkpoint of the run that is not known to be incomplete, or below
    /// it. The run may have been moved since: only the end of the path counts.
    fn leads_to_whole(&self, path: &str, steps: &[Seen]) -> bool {
        let parts = path.split(['/', '\\']).map(str::trim);
        let parts = parts.filter(|part| !part.is_empty()).rev();
        for (depth, part) in parts.take(DEPTH_MAX).enumerate() {
            if let Some(seen) = steps.iter().find(|seen| seen.step.name == part) {
                return seen.step.complete != Some(false);
            }
            if let (0, Some(complete)) = (depth, self.others.get(part)) {
                return *complete != Some(false);
            }
            if StepNaming::step_of(part).is_some() {
                return false;
            }
        }
        false
    }

    /// The newest notes of steps that can be read, by step and by time: also where the two disagree,
    /// the best one is among those that they name.
    pub(super) fn newest(&self) -> Vec<(&Note, &[String])> {
        let clear = || {
            self.all.iter().filter_map(|note| match &note.best {
                Best::Paths(paths) => Some((note, &**paths)),
                Best::Unclear(_) => None,
            })
        };
        let newest = |by: StepOrder| {
            clear().max_by(|(a, _), (b, _)| {
                by.compare((a.step, a.written, &a.file), (b.step, b.written, &b.file))
            })
        };
        [StepOrder::Step, StepOrder::Time].into_iter().filter_map(newest).collect()
    }
}
