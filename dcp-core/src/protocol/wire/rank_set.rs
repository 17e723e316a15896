//! Sets of ranks as messages: every eighth rank takes five bytes.

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::names::rank::Rank;

const STEPS: u64 = 0;
const FLAGS: u64 = 1;

/// A set of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RankSet {
    Steps(Vec<Steps>),
    Flags(Vec<bool>),
}

/// `count` ranks from `first`, each `step` after the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Steps {
    first: u64,
    count: u64,
    step: u64,
}

impl RankSet {
    /// A set of ranks, which are in ascending order.
    pub(super) fn of(ranks: &[Rank]) -> Self {
        let mut all = Vec::new();
        let mut rest = ranks;
        while let [first, after @ ..] = rest {
            let step = after.first().map_or(1, |next| next.saturating_sub(*first).max(1));
            let same = rest.windows(2).take_while(|pair| pair[1].saturating_sub(pair[0]) == step);
            let count = same.count() + 1;
            all.push(Steps { first: (*first).into(), count: count as u64, step: step.into() });
            rest = rest.get(count..).unwrap_or_default();
        }
        let steps = Self::Steps(all);
        let Some(last) = ranks.last() else { return steps };
        let len = |set: &Self| {
            let mut out = MessageWriter(Vec::new());
            set.write_to(&mut out);
            out.0.len()
        };
        // Flags of so many ranks take more bytes than the steps.
        if u64::from(*last) / 8 > len(&steps) as u64 {
            return steps;
        }
        let mut flags = vec![false; *last as usize + 1];
        ranks.iter().for_each(|rank| flags[*rank as usize] = true);
        let flags = Self::Flags(flags);
        if len(&flags) < len(&steps) { flags } else { steps }
    }

    pub(super) fn contains(&self, rank: Rank) -> bool {
        match self {
            Self::Flags(flags) => flags.get(rank as usize).copied().unwrap_or(false),
            Self::Steps(all) => all.iter().any(|steps| {
                let after = u64::from(rank).checked_sub(steps.first);
                after.is_some_and(|after| {
                    after.is_multiple_of(steps.step) && after / steps.step < steps.count
                })
            }),
        }
    }

    pub(super) fn write_to(&self, out: &mut MessageWriter) {
        match self {
            Self::Steps(all) => {
                out.number(STEPS);
                out.number(all.len() as u64);
                let mut next = 0;
                for Steps { first, count, step } in all {
                    out.numbers(&[first - next, *count, *step]);
                    next = *first;
                }
            }
            Self::Flags(flags) => {
                out.number(FLAGS);
                out.number(flags.len() as u64);
                out.flags(flags);
            }
        }
    }

    pub(super) fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        match input.number()? {
            STEPS => {
                let mut all = Vec::new();
                let mut next = 0_u64;
                for _ in 0..input.count()? {
                    let after = input.number()?;
                    let first =
                        next.checked_add(after).ok_or_else(|| bad("a rank out of range"))?;
                    let (count, step) = (input.number()?, input.number()?);
                    if step == 0 {
                        return Err(bad("ranks without a step"));
                    }
                    all.push(Steps { first, count, step });
                    next = first;
                }
                Ok(Self::Steps(all))
            }
            FLAGS => {
                let len = usize::try_from(input.number()?).ok();
                let len = len.filter(|len| len.div_ceil(8) <= input.remaining());
                let len = len.ok_or_else(|| bad("more flags than bytes"))?;
                Ok(Self::Flags(input.flags(len)?))
            }
            other => Err(bad(format!("unknown kind of set {other}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn sent(ranks: &[Rank]) -> (RankSet, usize) {
        let mut out = MessageWriter(Vec::new());
        RankSet::of(ranks).write_to(&mut out);
        let mut input = MessageReader(&out.0);
        let set = RankSet::read_from(&mut input).unwrap();
        input.finish().unwrap();
        (set, out.0.len())
    }

    proptest! {
        #[test]
        fn sets_arrive_as_they_were_sent(ranks in prop::collection::btree_set(0_u32..300, 0..200)) {
            let list: Vec<Rank> = ranks.iter().copied().collect();
            let (set, len) = sent(&list);
            prop_assert!((0..310).all(|rank| set.contains(rank) == ranks.contains(&rank)));
            prop_assert!(len <= 42, "{}", len);
        }

        #[test]
        fn hostile_sets_are_refused_or_harmless(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
            if let Ok(set) = RankSet::read_from(&mut MessageReader(&bytes)) {
                let held: BTreeSet<Rank> = (0..100).filter(|rank| set.contains(*rank)).collect();
                prop_assert!(held.len() <= 100);
            }
        }
    }

    #[test]
    fn regular_sets_take_few_bytes() {
        let every = |step: usize| (0..16384).step_by(step).collect::<Vec<Rank>>();
        assert!(sent(&every(1)).1 <= 8);
        assert!(sent(&every(8)).1 <= 8);
        assert_eq!(sent(&[]).1, 2);
        assert!(sent(&[0]).1 <= 5);
        assert!(sent(&[Rank::MAX]).1 <= 10);
    }
}
