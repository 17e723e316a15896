//! Which checkpoints of a run are kept: policies, and the decision.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::order::StepOrder;

/// The facts of a complete checkpoint for a retention policy.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepFacts {
    /// The training step.
    pub step: u64,
    /// The time of its last file, if the storage has it.
    pub saved: Option<SystemTime>,
    /// The metrics that were recorded for it.
    pub metrics: BTreeMap<String, f64>,
    /// Whether it is pinned.
    pub pinned: bool,
    /// Whether all is there that its format needs. One of which this is unknown is not complete.
    pub complete: bool,
    /// Whether the tracker file of the run names it.
    pub tracked: bool,
    /// Other files and links of the run that name it or lead to it, each as a clause.
    pub named_by: Vec<String>,
}

impl StepFacts {
    /// The complete checkpoint of a step, without metrics.
    #[must_use]
    pub fn new(step: u64) -> Self {
        Self { step, complete: true, ..Self::default() }
    }

    /// Sets [`saved`](Self::saved).
    #[must_use]
    pub fn with_saved(mut self, saved: SystemTime) -> Self {
        self.saved = Some(saved);
        self
    }

    /// Adds a metric.
    #[must_use]
    pub fn with_metric(mut self, name: impl Into<String>, value: f64) -> Self {
        self.metrics.insert(name.into(), value);
        self
    }

    /// Sets [`pinned`](Self::pinned).
    #[must_use]
    pub fn with_pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// Sets [`complete`](Self::complete).
    #[must_use]
    pub fn with_complete(mut self, complete: bool) -> Self {
        self.complete = complete;
        self
    }

    /// Sets [`tracked`](Self::tracked).
    #[must_use]
    pub fn with_tracked(mut self, tracked: bool) -> Self {
        self.tracked = tracked;
        self
    }

    /// Adds a clause to [`named_by`](Self::named_by).
    #[must_use]
    pub fn with_named_by(mut self, clause: impl Into<String>) -> Self {
        self.named_by.push(clause.into());
        self
    }
}

/// A rule that says which checkpoints of a run are kept.
///
/// A policy is a pure function: it reads no clock and no storage. [`AnyOf`] and
/// [`AllOf`] compose policies.
///
/// ```
/// use std::collections::BTreeSet;
/// use std::time::SystemTime;
///
/// use dcp_jobs::run::{AnyOf, KeepLast, Retention, StepFacts, decide};
///
/// /// Keeps every power of two.
/// #[derive(Debug)]
/// struct PowersOfTwo;
///
/// impl Retention for PowersOfTwo {
///     fn keep(&self, complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
///         complete.iter().map(|one| one.step.is_power_of_two()).collect()
///     }
///
///     fn description(&self) -> String {
///         "powers of two".to_owned()
///     }
///
///     fn metrics(&self) -> BTreeSet<String> {
///         BTreeSet::new()
///     }
/// }
///
/// let steps: Vec<_> = (1..=6).map(StepFacts::new).collect();
/// let policy = AnyOf::new().or(KeepLast(2)).or(PowersOfTwo);
/// let decisions = decide(&steps, &policy, SystemTime::UNIX_EPOCH);
/// let kept: Vec<_> = decisions.iter().map(|decision| !decision.delete).collect();
/// assert_eq!(kept, [true, true, false, true, true, true]);
/// ```
pub trait Retention: fmt::Debug + Send + Sync {
    /// For each complete checkpoint, the newest last, whether it is kept. One that the answer does not
    /// reach is kept, and so should one be of which a fact is unknown that decides.
    fn keep(&self, complete: &[StepFacts], now: SystemTime) -> Vec<bool>;

    /// The checkpoints that it keeps, as a noun: `the last 3`.
    fn description(&self) -> String;

    /// The metrics that it compares. A [`Prune`](super::Prune) fails where no checkpoint has one of
    /// them.
    fn metrics(&self) -> BTreeSet<String>;
}

impl<R: Retention + ?Sized> Retention for Arc<R> {
    fn keep(&self, complete: &[StepFacts], now: SystemTime) -> Vec<bool> {
        (**self).keep(complete, now)
    }

    fn description(&self) -> String {
        (**self).description()
    }

    fn metrics(&self) -> BTreeSet<String> {
        (**self).metrics()
    }
}

/// Keeps the last checkpoints, so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepLast(pub usize);

impl Retention for KeepLast {
    fn keep(&self, complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
        let first = complete.len().saturating_sub(self.0);
        (0..complete.len()).map(|at| at >= first).collect()
    }

    fn description(&self) -> String {
        format!("the last {}", self.0)
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}

/// Keeps the checkpoints whose step is a multiple of so many steps; of 0 steps, none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepEvery(pub u64);

impl Retention for KeepEvery {
    fn keep(&self, complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
        complete.iter().map(|one| self.0 != 0 && one.step.is_multiple_of(self.0)).collect()
    }

    fn description(&self) -> String {
        format!("multiples of {} steps", self.0)
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}

/// Keeps the checkpoints with the best values of a metric. Of equal values, the newer checkpoint is the
/// better one. Those of which the metric is unknown or no number are kept, besides that many.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeepBest {
    /// The number of checkpoints.
    pub count: usize,
    /// The name of the metric.
    pub metric: String,
    /// Whether the lowest values are the best, as of a loss.
    pub lowest: bool,
}

impl KeepBest {
    /// The `count` checkpoints with the highest values of `metric`.
    #[must_use]
    pub fn highest(count: usize, metric: impl Into<String>) -> Self {
        Self { count, metric: metric.into(), lowest: false }
    }

    /// The `count` checkpoints with the lowest values of `metric`.
    #[must_use]
    pub fn lowest(count: usize, metric: impl Into<String>) -> Self {
        Self { lowest: true, ..Self::highest(count, metric) }
    }

    /// Whether the name of a metric is that of a loss, of which the lowest values are the best. The
    /// command guesses no order for such a name.
    ///
    /// ```
    /// use dcp_jobs::run::KeepBest;
    /// let losses = ["eval_loss", "valLoss", "val/perplexity", "cross-entropy", "bits_per_byte", "wer2"];
    /// assert!(losses.iter().all(|metric| KeepBest::is_loss(metric)));
    /// assert!(!KeepBest::is_loss("accuracy") && !KeepBest::is_loss("f1"));
    /// ```
    #[must_use]
    pub fn is_loss(metric: &str) -> bool {
        const NAMES: [&str; 19] = [
            "ppl",
            "ppx",
            "nll",
            "bpb",
            "bpc",
            "error",
            "err",
            "errors",
            "wer",
            "cer",
            "mse",
            "mae",
            "rmse",
            "mape",
            "ce",
            "bce",
            "kl",
            "fid",
            "likelihood",
        ];
        // Without what joins words: `valLoss`, `cross_entropy`, `bits_per_byte`. A name that is none of a loss
        // costs its user an option, and a loss that is not recognized the best checkpoint.
        const PARTS: [&str; 5] = ["loss", "perplexity", "entropy", "bitsper", "divergence"];
        let joined: String = metric.chars().filter(|c| c.is_ascii_alphabetic()).collect();
        let joined = joined.to_ascii_lowercase();
        let mut words = metric.split(|c: char| !c.is_ascii_alphabetic());
        PARTS.iter().any(|part| joined.contains(part))
            || words.any(|word| NAMES.iter().any(|name| word.eq_ignore_ascii_case(name)))
    }
}

impl Retention for KeepBest {
    fn keep(&self, complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
        let value = |one: &StepFacts| {
            one.metrics.get(&self.metric).copied().filter(|value| !value.is_nan())
        };
        let (mut ranked, mut unknown) = (Vec::new(), BTreeSet::new());
        for (at, one) in complete.iter().enumerate() {
            match value(one) {
                Some(value) => ranked.push((at, value)),
                None => drop(unknown.insert(at)),
            }
        }
        // Adding 0.0 makes the two zeros equal.
        let sign = if self.lowest { 1.0 } else { -1.0 };
        ranked.sort_by(|(a, x), (b, y)| {
            let order = (sign * x + 0.0).total_cmp(&(sign * y + 0.0));
            order.then(b.cmp(a))
        });
        let best: BTreeSet<_> = ranked.iter().take(self.count).map(|(at, _)| *at).collect();
        (0..complete.len()).map(|at| best.contains(&at) || unknown.contains(&at)).collect()
    }

    fn description(&self) -> String {
        let order = if self.lowest { "lowest" } else { "highest" };
        format!("the {} with the {order} {:?}", self.count, self.metric)
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::from([self.metric.clone()])
    }
}

/// Keeps the checkpoints that were written less than this time ago, and those of unknown age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepYoungerThan(pub Duration);

impl Retention for KeepYoungerThan {
    fn keep(&self, complete: &[StepFacts], now: SystemTime) -> Vec<bool> {
        // One of the future is young.
        let is_old = |saved: SystemTime| now.duration_since(saved).is_ok_and(|age| age >= self.0);
        complete.iter().map(|one| !one.saved.is_some_and(is_old)).collect()
    }

    fn description(&self) -> String {
        format!("those younger than {}", duration_text(self.0))
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}

/// Keeps the checkpoints of these steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeepSteps(pub BTreeSet<u64>);

impl Retention for KeepSteps {
    fn keep(&self, complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
        complete.iter().map(|one| self.0.contains(&one.step)).collect()
    }

    fn description(&self) -> String {
        let steps: Vec<_> = self.0.iter().take(8).map(ToString::to_string).collect();
        let more = if self.0.len() > steps.len() { ", …" } else { "" };
        format!("steps {}{more}", steps.join(", "))
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}

/// Keeps what at least one of several policies keeps; without any, nothing.
#[derive(Clone, Debug, Default)]
pub struct AnyOf(Vec<Arc<dyn Retention>>);

impl AnyOf {
    /// No policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, or what `policy` keeps.
    #[must_use]
    pub fn or(mut self, policy: impl Retention + 'static) -> Self {
        self.0.push(Arc::new(policy));
        self
    }

    /// Whether there is no policy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Retention for AnyOf {
    fn keep(&self, complete: &[StepFacts], now: SystemTime) -> Vec<bool> {
        let all: Vec<_> = self.0.iter().map(|policy| policy.keep(complete, now)).collect();
        (0..complete.len()).map(|at| all.iter().any(|kept| keeps(kept, at))).collect()
    }

    fn description(&self) -> String {
        joined(&self.0, ", ", "nothing")
    }

    fn metrics(&self) -> BTreeSet<String> {
        self.0.iter().flat_map(|policy| policy.metrics()).collect()
    }
}

/// Keeps what all of several policies keep; without any, everything.
#[derive(Clone, Debug, Default)]
pub struct AllOf(Vec<Arc<dyn Retention>>);

impl AllOf {
    /// No policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, of what `policy` keeps.
    #[must_use]
    pub fn and(mut self, policy: impl Retention + 'static) -> Self {
        self.0.push(Arc::new(policy));
        self
    }
}

impl Retention for AllOf {
    fn keep(&self, complete: &[StepFacts], now: SystemTime) -> Vec<bool> {
        let all: Vec<_> = self.0.iter().map(|policy| policy.keep(complete, now)).collect();
        (0..complete.len()).map(|at| all.iter().all(|kept| keeps(kept, at))).collect()
    }

    fn description(&self) -> String {
        joined(&self.0, " that are also ", "everything")
    }

    fn metrics(&self) -> BTreeSet<String> {
        self.0.iter().flat_map(|policy| policy.metrics()).collect()
    }
}

/// A policy that answers too little deletes nothing by that.
fn keeps(answer: &[bool], at: usize) -> bool {
    answer.get(at).copied().unwrap_or(true)
}

fn joined(policies: &[Arc<dyn Retention>], by: &str, none: &str) -> String {
    match policies {
        [] => none.to_owned(),
        _ => policies.iter().map(|one| one.description()).collect::<Vec<_>>().join(by),
    }
}

/// Whether a checkpoint is kept, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Decision {
    /// Whether it is deleted.
    pub delete: bool,
    /// Why.
    pub reason: String,
}

impl Decision {
    pub(super) fn keep(reason: impl Into<String>) -> Self {
        Self { delete: false, reason: reason.into() }
    }

    pub(super) fn delete(reason: impl Into<String>) -> Self {
        Self { delete: true, reason: reason.into() }
    }
}

/// Decides about each checkpoint of a run, in the order of `steps`, which is any.
///
/// Whatever the policy says, it keeps the newest complete checkpoint, which is that of the highest step,
/// pinned ones, those that a file or link of the run names, and those that are not complete: a save may
/// still write them.
#[must_use]
pub fn decide(steps: &[StepFacts], policy: &dyn Retention, now: SystemTime) -> Vec<Decision> {
    decide_by(StepOrder::Step, steps, policy, now)
}

/// Decides in a chosen order.
pub(super) fn decide_by(
    by: StepOrder,
    steps: &[StepFacts],
    policy: &dyn Retention,
    now: SystemTime,
) -> Vec<Decision> {
    let mut order: Vec<_> = steps.iter().enumerate().filter(|(_, one)| one.complete).collect();
    order.sort_by(|(a, one), (b, other)| {
        by.compare((one.step, one.saved, a), (other.step, other.saved, b))
    });
    let complete: Vec<_> = order.iter().map(|(_, one)| (*one).clone()).collect();
    // Two folders of one step, or of one time, are both the newest.
    let is_newest = |one: &StepFacts| {
        complete.last().is_some_and(|newest| match by {
            StepOrder::Step => newest.step == one.step,
            StepOrder::Time => newest.saved == one.saved,
        })
    };
    let answer = policy.keep(&complete, now);
    let places: BTreeMap<_, _> =
        order.iter().enumerate().map(|(place, (at, _))| (*at, place)).collect();
    let metrics = policy.metrics();
    let decision = |(at, one): (usize, &StepFacts)| match places.get(&at) {
        None => Decision::keep("not complete"),
        Some(_) if one.pinned => Decision::keep("pinned"),
        Some(_) if is_newest(one) => Decision::keep("the newest complete one"),
        Some(_) if one.tracked => Decision::keep("the tracker of the run names it"),
        Some(_) if !one.named_by.is_empty() => Decision::keep(one.named_by.join(", ")),
        Some(place) if keeps(&answer, *place) => {
            let unknown =
                |name: &&String| one.metrics.get(*name).is_none_or(|value| value.is_nan());
            match metrics.iter().find(unknown) {
                Some(name) => Decision::keep(format!(
                    "kept by the policy: {}; its {name:?} is unknown",
                    policy.description()
                )),
                None => Decision::keep(format!("kept by the policy: {}", policy.description())),
            }
        }
        Some(_) => Decision::delete(format!("none of: {}", policy.description())),
    };
    steps.iter().enumerate().map(decision).collect()
}

/// A duration in its largest whole unit: `36 h`.
pub(super) fn duration_text(duration: Duration) -> String {
    const UNITS: [(u64, &str); 3] = [(86_400, "d"), (3600, "h"), (60, "min")];
    let seconds = duration.as_secs();
    let unit = UNITS.iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    let (unit, name) = unit.copied().unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
#[path = "retention_tests.rs"]
mod tests;
