//! The calls of ranks, in a form that ranks can compare.

use std::fmt;

use bytes::Bytes;
use dcp_core::{CollectiveError, Rank};
use serde::{Deserialize, Serialize};

/// The operation of a rank: one of [`Collective`](dcp_core::Collective), forming a
/// group, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub(crate) enum Op {
    Idle = 0,
    Gather = 1,
    Scatter = 2,
    Broadcast = 3,
    AllGather = 4,
    Barrier = 5,
    Rendezvous = 6,
}

impl Op {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Idle => "a pause between operations",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
            Self::Rendezvous => "rendezvous",
        }
    }

    /// The operation with this number.
    pub(crate) fn from_wire(code: u8) -> Option<Self> {
        use Op::{AllGather, Barrier, Broadcast, Gather, Idle, Rendezvous, Scatter};
        [Idle, Gather, Scatter, Broadcast, AllGather, Barrier, Rendezvous]
            .into_iter()
            .find(|op| *op as u8 == code)
    }
}

/// One call: the operation and its root (0 where there is none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) root: Rank,
}

impl Call {
    pub(crate) const fn new(op: Op, root: Rank) -> Self {
        Self { op, root }
    }

    /// Checks the root, and the messages of `rank` of `world_size`, before another rank is involved.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub(crate) fn check(
        self,
        rank: Rank,
        world_size: u32,
        passed: Passed<'_>,
    ) -> Result<(), String> {
        if self.root >= world_size {
            return Err(format!(
                "its root is rank {}, the group has {world_size} ranks",
                self.root
            ));
        }
        match (passed, rank == self.root) {
            (Passed::Mine, _) | (Passed::Maybe(true), true) | (Passed::Maybe(false), false) => {
                Ok(())
            }
            (Passed::All(Some(all)), true) if all.len() as u64 == u64::from(world_size) => Ok(()),
            (Passed::All(None), false) => Ok(()),
            (Passed::All(Some(all)), true) => Err(format!(
                "it is the root and passes {} messages for {world_size} ranks",
                all.len()
            )),
            (Passed::Maybe(_) | Passed::All(_), true) => {
                Err("it is the root and passes no message".to_owned())
            }
            (Passed::Maybe(_) | Passed::All(_), false) => {
                Err(format!("it passes a message, but rank {} is the root", self.root))
            }
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Op::Gather | Op::Scatter | Op::Broadcast => {
                write!(f, "{} with root {}", self.op.name(), self.root)
            }
            _ => f.write_str(self.op.name()),
        }
    }
}

/// The messages that a caller passes to a call, as far as they can be wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Passed<'a> {
    /// A message, or nothing, for any root.
    Mine,
    /// Whether there is a message; only the root has one.
    Maybe(bool),
    /// One message for each rank; only the root has them.
    All(Option<&'a [Bytes]>),
}

/// Returns the position of `rank` in `ranks`, a subgroup of a group of `world_size`.
///
/// # Errors
///
/// [`CollectiveError::Rendezvous`] when `ranks` is empty, names a rank twice or one that does not
/// exist, or leaves out `rank`.
pub(crate) fn position_in(
    ranks: &[Rank],
    rank: Rank,
    world_size: u32,
) -> Result<Rank, CollectiveError> {
    let wrong = |message| Err(CollectiveError::Rendezvous { message });
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair.first() == pair.last()) {
        return wrong(format!("the subgroup names rank {} twice", pair.first().unwrap_or(&0)));
    }
    if let Some(last) = sorted.last().filter(|last| **last >= world_size) {
        return wrong(format!("the subgroup names rank {last}, the group has {world_size} ranks"));
    }
    match (0..).zip(ranks).find(|(_, member)| **member == rank) {
        Some((position, _)) => Ok(position),
        None => wrong(format!("rank {rank} is not in the subgroup {ranks:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_root_passes_messages_and_one_for_each_rank() {
        let scatter = Call::new(Op::Scatter, 1);
        let three = vec![Bytes::new(); 3];
        assert!(scatter.check(1, 3, Passed::All(Some(&three))).is_ok());
        assert!(scatter.check(0, 3, Passed::All(None)).is_ok());
        assert!(scatter.check(1, 3, Passed::All(Some(&three[1..]))).is_err());
        assert!(scatter.check(1, 3, Passed::All(None)).is_err());
        assert!(scatter.check(0, 3, Passed::All(Some(&three))).is_err());
        let broadcast = Call::new(Op::Broadcast, 2);
        assert!(broadcast.check(2, 3, Passed::Maybe(true)).is_ok());
        assert!(broadcast.check(2, 3, Passed::Maybe(false)).is_err());
        assert!(broadcast.check(0, 3, Passed::Maybe(true)).is_err());
        assert!(Call::new(Op::Gather, 3).check(0, 3, Passed::Mine).is_err());
    }

    #[test]
    fn a_subgroup_is_a_set_of_ranks_with_this_one_in_it() {
        assert_eq!(position_in(&[4, 0, 2], 2, 5), Ok(2));
        for bad in [&[][..], &[0, 0], &[0, 5], &[1, 2]] {
            assert!(position_in(bad, 0, 5).is_err(), "{bad:?}");
        }
    }
}
