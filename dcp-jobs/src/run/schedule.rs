//! The schedule of a trainer's saves.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

/// The schedule of a trainer's saves: every so many steps, every so much time, at chosen steps.
///
/// ```
/// use std::time::{Duration, SystemTime};
///
/// use dcp_jobs::run::SaveSchedule;
///
/// let schedule = SaveSchedule::new().every_steps(1000).at_steps([1, 10]);
/// assert!(schedule.is_due_at(10) && schedule.is_due_at(3000) && !schedule.is_due_at(11));
///
/// let hourly = schedule.every(Duration::from_secs(3600));
/// let start = SystemTime::UNIX_EPOCH;
/// assert!(!hourly.is_due_by_time(start, start + Duration::from_secs(3599)));
/// assert!(hourly.is_due_by_time(start, start + Duration::from_secs(3600)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveSchedule {
    steps: Option<u64>,
    time: Option<Duration>,
    at: BTreeSet<u64>,
}

impl SaveSchedule {
    /// Never.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// At every multiple of so many steps, but not at step 0. Of 0 steps, never.
    #[must_use]
    pub fn every_steps(mut self, steps: u64) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Saves when so much time has passed since the last save.
    #[must_use]
    pub fn every(mut self, time: Duration) -> Self {
        self.time = Some(time);
        self
    }

    /// At these steps, too.
    #[must_use]
    pub fn at_steps(mut self, steps: impl IntoIterator<Item = u64>) -> Self {
        self.at.extend(steps);
        self
    }

    /// Whether it has a time, which ranks must agree on.
    #[must_use]
    pub fn has_time(&self) -> bool {
        self.time.is_some()
    }

    /// Whether the step alone requests a save.
    #[must_use]
    pub fn is_due_at(&self, step: u64) -> bool {
        let every = self.steps.filter(|steps| *steps > 0);
        let multiple = every.is_some_and(|steps| step > 0 && step.is_multiple_of(steps));
        multiple || self.at.contains(&step)
    }

    /// Whether the time since the `last` save requests one. A clock that was set back does, too: the
    /// time since the last save is unknown then.
    #[must_use]
    pub fn is_due_by_time(&self, last: SystemTime, now: SystemTime) -> bool {
        self.time.is_some_and(|time| now.duration_since(last).map_or(true, |since| since >= time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_times_that_are_nothing_are_never_due() {
        let never = SaveSchedule::new().every_steps(0);
        assert!((0..100).all(|step| !never.is_due_at(step)));
        let now = SystemTime::UNIX_EPOCH;
        assert!(!never.is_due_by_time(now, now + Duration::from_secs(1 << 30)));
        assert!(!SaveSchedule::new().every_steps(5).is_due_at(0));
        assert!(SaveSchedule::new().at_steps([0]).is_due_at(0));
    }

    #[test]
    fn a_clock_that_is_set_back_saves() {
        let hourly = SaveSchedule::new().every(Duration::from_secs(3600));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(10_000);
        assert!(!hourly.is_due_by_time(now, now));
        assert!(hourly.is_due_by_time(now, now - Duration::from_secs(1)));
    }
}
