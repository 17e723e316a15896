//! The order of the checkpoints of a run: by the number of the step, or by the time of the write.

use std::cmp::Ordering;

use serde::Serialize;

use super::RunStep;

/// Which checkpoint of a run is later than another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StepOrder {
    /// The one of the higher step.
    #[default]
    Step,
    /// The one that was written later. In a run that was started again from an earlier step, the
    /// highest step is not the newest.
    Time,
}

impl StepOrder {
    /// Compares two checkpoints by step, time in any unit, and name.
    pub(super) fn compare<S: Ord, T: Ord, N: Ord>(
        self,
        one: (S, T, N),
        other: (S, T, N),
    ) -> Ordering {
        let ((a, at, a_name), (b, bt, b_name)) = (one, other);
        let (steps, times) = (a.cmp(&b), at.cmp(&bt));
        let first = match self {
            Self::Step => steps.then(times),
            Self::Time => times.then(steps),
        };
        first.then_with(|| a_name.cmp(&b_name))
    }

    /// Sorts checkpoints, the newest last.
    pub(super) fn sort(self, steps: &mut [RunStep]) {
        steps.sort_by(|a, b| {
            self.compare((a.step, a.modified, &a.name), (b.step, b.modified, &b.name))
        });
    }
}

/// The first two complete checkpoints of which the higher step was written earlier, the higher one
/// first.
pub(super) fn disagreement<'a>(
    complete: impl IntoIterator<Item = &'a RunStep>,
) -> Option<(&'a RunStep, &'a RunStep)> {
    let mut steps: Vec<_> = complete.into_iter().filter(|one| one.modified.is_some()).collect();
    steps.sort_by_key(|one| (one.step, one.modified));
    let mut newest: Option<&RunStep> = None;
    for step in steps {
        match newest {
            Some(other) if other.modified > step.modified && other.step < step.step => {
                return Some((step, other));
            }
            Some(other) if other.modified >= step.modified => {}
            _ => newest = Some(step),
        }
    }
    None
}

/// The disagreement in words.
pub(super) fn describe((higher, newer): (&RunStep, &RunStep)) -> String {
    format!("the highest step is not the newest: {:?} is older than {:?}", higher.name, newer.name)
}
