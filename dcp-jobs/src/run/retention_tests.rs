//! Property tests of policies and of the decision.

use super::*;

/// A small generator of numbers, so that every failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn is(&mut self) -> bool {
        self.below(2) == 0
    }
}

const NOW: SystemTime = SystemTime::UNIX_EPOCH;

fn at(seconds: u64) -> SystemTime {
    NOW + Duration::from_secs(seconds)
}

fn steps(random: &mut Random) -> Vec<StepFacts> {
    let count = random.below(9);
    let step = |random: &mut Random| {
        let mut one = StepFacts::new(random.below(12))
            .with_complete(random.below(4) != 0)
            .with_pinned(random.below(5) == 0)
            .with_tracked(random.below(6) == 0);
        if random.below(8) == 0 {
            one = one.with_named_by("the link \"best\" leads to it");
        }
        if random.is() {
            one = one.with_saved(at(random.below(100)));
        }
        if random.is() {
            let values = [1.0, -1.0, 0.0, -0.0, f64::NAN, f64::INFINITY, 2.5];
            one = one.with_metric("loss", values[random.below(7) as usize]);
        }
        one
    };
    (0..count).map(|_| step(random)).collect()
}

/// Answers with too few or too many values, none of which keeps anything.
#[derive(Debug)]
struct Careless(usize);

impl Retention for Careless {
    fn keep(&self, _complete: &[StepFacts], _now: SystemTime) -> Vec<bool> {
        vec![false; self.0]
    }

    fn description(&self) -> String {
        "a careless one".to_owned()
    }

    fn metrics(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }
}

fn policy(random: &mut Random, depth: u64) -> Arc<dyn Retention> {
    let some = |random: &mut Random| random.below(5);
    match random.below(if depth == 0 { 6 } else { 8 }) {
        0 => Arc::new(KeepLast(some(random) as usize)),
        1 => Arc::new(KeepEvery(some(random))),
        2 => Arc::new(KeepBest {
            count: some(random) as usize,
            metric: "loss".to_owned(),
            lowest: random.is(),
        }),
        3 => Arc::new(KeepYoungerThan(Duration::from_secs(random.below(100)))),
        4 => Arc::new(KeepSteps((0..some(random)).map(|_| random.below(12)).collect())),
        5 => Arc::new(Careless(some(random) as usize)),
        6 => {
            let any = AnyOf::new().or(policy(random, depth - 1));
            Arc::new(any.or(policy(random, depth - 1)))
        }
        _ => {
            let all = AllOf::new().and(policy(random, depth - 1));
            Arc::new(all.and(policy(random, depth - 1)))
        }
    }
}

#[test]
fn whatever_the_policy_the_newest_pinned_tracked_and_incomplete_stay() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut deleted = 0;
    for _ in 0..20_000 {
        let steps = steps(&mut random);
        let policy = policy(&mut random, 2);
        let now = at(random.below(200));
        let decisions = decide(&steps, &*policy, now);
        assert_eq!(decisions.len(), steps.len());
        let newest = steps.iter().filter(|one| one.complete).map(|one| one.step).max();
        for (one, decision) in steps.iter().zip(&decisions) {
            let named = one.tracked || !one.named_by.is_empty();
            let protected = one.pinned || named || !one.complete || Some(one.step) == newest;
            assert!(!(protected && decision.delete), "{policy:?} {steps:?} {decisions:?}");
            assert!(!decision.reason.is_empty());
            deleted += usize::from(decision.delete);
        }
        let left = steps.iter().zip(&decisions).filter(|(one, to)| one.complete && !to.delete);
        assert_eq!(left.count() > 0, newest.is_some());
        // The order of a listing decides nothing.
        let reversed: Vec<_> = steps.iter().rev().cloned().collect();
        let mut again = decide(&reversed, &*policy, now);
        again.reverse();
        let is_distinct =
            |one: &StepFacts| steps.iter().filter(|s| s.step == one.step).count() == 1;
        if steps.iter().all(is_distinct) {
            assert_eq!(again, decisions, "{policy:?} {steps:?}");
        }
    }
    assert!(deleted > 5_000, "{deleted}");
}

#[test]
fn deciding_again_after_the_deletions_deletes_nothing() {
    let mut random = Random(77);
    for _ in 0..5_000 {
        let steps = steps(&mut random);
        // What an intersection keeps of fewer checkpoints may be less, and what a careless one does.
        let mut any = AnyOf::new();
        for _ in 0..random.below(4) {
            any = match random.below(4) {
                0 => any.or(KeepLast(random.below(4) as usize)),
                1 => any.or(KeepEvery(random.below(4))),
                2 => any.or(KeepBest::lowest(random.below(3) as usize, "loss")),
                _ => any.or(KeepYoungerThan(Duration::from_secs(random.below(100)))),
            };
        }
        let decisions = decide(&steps, &any, at(100));
        let left: Vec<_> = steps
            .iter()
            .zip(&decisions)
            .filter(|(_, to)| !to.delete)
            .map(|(s, _)| s.clone())
            .collect();
        let again = decide(&left, &any, at(100));
        assert!(again.iter().all(|one| !one.delete), "{any:?} {steps:?} {again:?}");
    }
}

fn kept(steps: &[StepFacts], policy: &dyn Retention) -> Vec<u64> {
    let decisions = decide(steps, policy, at(100));
    let left = steps.iter().zip(decisions).filter(|(_, decision)| !decision.delete);
    left.map(|(one, _)| one.step).collect()
}

#[test]
fn each_policy_keeps_what_it_says() {
    let steps: Vec<_> = (1..=10)
        .map(|step| {
            StepFacts::new(step * 10)
                .with_saved(at(step * 10))
                .with_metric("loss", 10.0 - step as f64)
        })
        .collect();
    assert_eq!(kept(&steps, &KeepLast(3)), [80, 90, 100]);
    assert_eq!(kept(&steps, &KeepLast(0)), [100]);
    assert_eq!(kept(&steps, &KeepEvery(40)), [40, 80, 100]);
    assert_eq!(kept(&steps, &KeepEvery(0)), [100]);
    assert_eq!(kept(&steps, &KeepBest::highest(2, "loss")), [10, 20, 100]);
    assert_eq!(kept(&steps, &KeepBest::lowest(2, "loss")), [90, 100]);
    assert_eq!(kept(&steps, &KeepBest::lowest(2, "accuracy")).len(), 10, "it is unknown of all");
    assert_eq!(kept(&steps, &KeepYoungerThan(Duration::from_secs(21))), [80, 90, 100]);
    assert_eq!(kept(&steps, &KeepSteps([20, 30].into())), [20, 30, 100]);
    let any = AnyOf::new().or(KeepLast(2)).or(KeepEvery(50));
    assert_eq!(kept(&steps, &any), [50, 90, 100]);
    let all = AllOf::new().and(KeepLast(5)).and(KeepEvery(20));
    assert_eq!(kept(&steps, &all), [60, 80, 100]);
    assert_eq!(kept(&steps, &AnyOf::new()), [100]);
    assert_eq!(kept(&steps, &AllOf::new()).len(), 10);
}

#[test]
fn equal_and_missing_metrics_are_ranked() {
    let with = |step, value| StepFacts::new(step).with_metric("loss", value);
    let steps = [
        with(1, 0.0),
        with(2, -0.0),
        with(3, f64::NAN),
        StepFacts::new(4),
        with(5, 9.0),
        StepFacts::new(6),
    ];
    assert_eq!(kept(&steps, &KeepBest::lowest(1, "loss")), [2, 3, 4, 6]);
    assert_eq!(kept(&steps, &KeepBest::lowest(2, "loss")), [1, 2, 3, 4, 6]);
    assert_eq!(kept(&steps, &KeepBest::highest(1, "loss")), [3, 4, 5, 6]);
    assert_eq!(kept(&steps, &KeepBest::highest(9, "loss")), [1, 2, 3, 4, 5, 6]);
    let decisions = decide(&steps, &KeepBest::lowest(1, "loss"), NOW);
    assert!(decisions[3].reason.ends_with("its \"loss\" is unknown"), "{decisions:?}");
}

#[test]
fn times_of_the_future_and_unknown_ones_are_young() {
    let steps = [
        StepFacts::new(1).with_saved(at(500)),
        StepFacts::new(2),
        StepFacts::new(3).with_saved(at(0)),
        StepFacts::new(4),
    ];
    assert_eq!(kept(&steps, &KeepYoungerThan(Duration::from_secs(60))), [1, 2, 4]);
}

#[test]
fn reasons_name_the_policy() {
    let steps: Vec<_> = (1..=3).map(StepFacts::new).collect();
    let policy = AnyOf::new().or(KeepLast(1)).or(KeepYoungerThan(Duration::from_secs(7200)));
    assert_eq!(policy.description(), "the last 1, those younger than 2 h");
    let decisions = decide(&steps, &KeepLast(2), NOW);
    let reasons: Vec<_> = decisions.iter().map(|one| &*one.reason).collect();
    assert_eq!(reasons[0], "none of: the last 2");
    assert_eq!(reasons[1], "kept by the policy: the last 2");
    assert_eq!(reasons[2], "the newest complete one");
}

#[test]
fn by_time_the_newest_and_the_last_are_those_written_last() {
    let steps = [
        StepFacts::new(700).with_saved(at(10)),
        StepFacts::new(100).with_saved(at(90)),
        StepFacts::new(200).with_saved(at(80)),
    ];
    let kept = |by, policy: &dyn Retention| -> Vec<u64> {
        let decisions = decide_by(by, &steps, policy, at(100));
        let left = steps.iter().zip(decisions).filter(|(_, decision)| !decision.delete);
        left.map(|(one, _)| one.step).collect()
    };
    assert_eq!(kept(StepOrder::Time, &KeepLast(1)), [100]);
    assert_eq!(kept(StepOrder::Time, &KeepLast(2)), [100, 200]);
    assert_eq!(kept(StepOrder::Step, &KeepLast(1)), [700]);
    assert_eq!(kept(StepOrder::Step, &KeepLast(2)), [700, 200]);
}
