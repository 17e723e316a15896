//! The kind of a failure, which survives the way to other ranks.

use std::error::Error;

use super::{
    CheckpointError, CollectiveError, FormatError, PlanError, RanksProblem, StorageError,
    TensorError,
};
use crate::error::StorageErrorKind;

/// The kind of a failure, for a program to act on.
///
/// A kind travels with the message of a rank's error, so every rank of a group sees a full disk of
/// one rank as [`Storage(Full)`](StorageErrorKind::Full) ([`RankFailure::kind`](super::RankFailure)).
///
/// | kind | what to do |
/// |---|---|
/// | `Storage(Transient)` | repeat the call |
/// | `RankLost` | form a new group, then repeat the call |
/// | `Storage(Conflict)` | another writer saves to the same place; stop one of them |
/// | `Storage(Full)`, `OutOfMemory` | make room |
/// | `Storage(Changed)` | open the checkpoint again |
/// | `Storage(_)` | see [`StorageErrorKind`] |
/// | `Damaged`, `NotACheckpoint` | load another checkpoint |
/// | `Mismatch` | change the state dict or the load mode |
/// | `InvalidPlan` | change the state dict or the planner |
/// | `Protocol` | start all ranks with the same program and settings |
/// | `MemoryInUse` | wait until the tensor's memory is no longer lent |
/// | `Canceled` | nothing: the caller canceled it |
/// | `Other` | read the message |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A storage operation failed.
    Storage(StorageErrorKind),
    /// Stored bytes do not have the form that they should have.
    Damaged,
    /// There is no checkpoint at this place.
    NotACheckpoint,
    /// The checkpoint and the state dict have different keys, shapes or dtypes.
    Mismatch,
    /// The state dict cannot be planned, or a planner made an invalid plan.
    InvalidPlan,
    /// There is not enough memory.
    OutOfMemory,
    /// The memory of a tensor is lent, so it cannot be read or written.
    MemoryInUse,
    /// A rank died or did not answer in time.
    RankLost,
    /// The group cannot be formed, a rank aborted it, or ranks are out of step.
    Protocol,
    /// The caller canceled the operation.
    Canceled,
    /// The error of a plug-in or of an application.
    Other,
}

/// Kinds and their names on the wire.
const NAMES: &[(FailureKind, &str)] = &[
    (FailureKind::Storage(StorageErrorKind::NotFound), "storage-not-found"),
    (FailureKind::Storage(StorageErrorKind::AlreadyExists), "storage-already-exists"),
    (FailureKind::Storage(StorageErrorKind::Denied), "storage-denied"),
    (FailureKind::Storage(StorageErrorKind::Credentials), "storage-credentials"),
    (FailureKind::Storage(StorageErrorKind::NoBucket), "storage-no-bucket"),
    (FailureKind::Storage(StorageErrorKind::Full), "storage-full"),
    (FailureKind::Storage(StorageErrorKind::Truncated), "storage-truncated"),
    (FailureKind::Storage(StorageErrorKind::TooLarge), "storage-too-large"),
    (FailureKind::Storage(StorageErrorKind::Changed), "storage-changed"),
    (FailureKind::Storage(StorageErrorKind::Unsupported), "storage-unsupported"),
    (FailureKind::Storage(StorageErrorKind::Invalid), "storage-invalid"),
    (FailureKind::Storage(StorageErrorKind::Link), "storage-link"),
    (FailureKind::Storage(StorageErrorKind::Conflict), "storage-conflict"),
    (FailureKind::Storage(StorageErrorKind::Transient), "storage-transient"),
    (FailureKind::Storage(StorageErrorKind::Other), "storage-other"),
    (FailureKind::Damaged, "damaged"),
    (FailureKind::NotACheckpoint, "not-a-checkpoint"),
    (FailureKind::Mismatch, "mismatch"),
    (FailureKind::InvalidPlan, "invalid-plan"),
    (FailureKind::OutOfMemory, "out-of-memory"),
    (FailureKind::MemoryInUse, "memory-in-use"),
    (FailureKind::RankLost, "rank-lost"),
    (FailureKind::Protocol, "protocol"),
    (FailureKind::Canceled, "canceled"),
    (FailureKind::Other, "other"),
];

impl FailureKind {
    /// The kind of the first error in a chain of causes that has one; [`Other`](Self::Other) where
    /// none has, as in a plug-in's own type.
    #[must_use]
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(kind) = kind_of_one(error) {
                return kind;
            }
            next = error.source();
        }
        Self::Other
    }

    /// Whether the same operation may succeed when it is repeated and nothing else is changed:
    /// [`StorageErrorKind::Transient`], and [`RankLost`](Self::RankLost) in a new group. A group
    /// in which a rank was lost refuses every later call.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::RankLost | Self::Storage(StorageErrorKind::Transient))
    }

    /// A name for logs and for the wire, such as `storage-full`.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(kind, _)| *kind == self).map_or("other", |(_, name)| name)
    }

    /// The kind of that name; [`Other`](Self::Other) for one that this version does not know.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        NAMES.iter().find(|(_, known)| *known == name).map_or(Self::Other, |(kind, _)| *kind)
    }
}

fn kind_of_one(error: &(dyn Error + 'static)) -> Option<FailureKind> {
    if let Some(error) = error.downcast_ref::<CheckpointError>() {
        return Some(error.kind());
    }
    if let Some(error) = error.downcast_ref::<StorageError>() {
        return Some(FailureKind::Storage(error.kind()));
    }
    if let Some(error) = error.downcast_ref::<CollectiveError>() {
        return Some(kind_of_group(error));
    }
    if let Some(error) = error.downcast_ref::<PlanError>() {
        return Some(kind_of_plan(error));
    }
    if let Some(error) = error.downcast_ref::<TensorError>() {
        return Some(kind_of_tensor(error));
    }
    error.is::<FormatError>().then_some(FailureKind::Damaged)
}

pub(super) fn kind_of_group(error: &CollectiveError) -> FailureKind {
    if error.is_retryable() { FailureKind::RankLost } else { FailureKind::Protocol }
}

fn kind_of_tensor(error: &TensorError) -> FailureKind {
    match error {
        TensorError::OutOfMemory { .. } => FailureKind::OutOfMemory,
        _ => FailureKind::InvalidPlan,
    }
}

pub(super) fn kind_of_plan(error: &PlanError) -> FailureKind {
    match error {
        PlanError::Tensor(error) => kind_of_tensor(error),
        PlanError::Ranks(RanksProblem::Message { .. } | RanksProblem::OutOfStep { .. }) => {
            FailureKind::Protocol
        }
        PlanError::Missing { .. } => FailureKind::Mismatch,
        PlanError::Index { .. } => FailureKind::Damaged,
        // Plug-ins that break their contract: neither the state dict nor the planner is at fault.
        PlanError::Data(_) => FailureKind::Other,
        // Causes may say more than that a plug-in refused.
        PlanError::Plugin(error) => match FailureKind::of(error.inner()) {
            FailureKind::Other => FailureKind::InvalidPlan,
            kind => kind,
        },
        PlanError::Many(all) => all.first().map_or(FailureKind::InvalidPlan, kind_of_plan),
        _ => FailureKind::InvalidPlan,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Phase, RankFailure, StorageOp};

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        for (kind, name) in NAMES {
            assert_eq!((kind.name(), FailureKind::from_name(name)), (*name, *kind));
        }
        assert_eq!(FailureKind::from_name("of a later version"), FailureKind::Other);
    }

    #[test]
    fn the_kind_is_found_below_the_types_of_plug_ins() {
        #[derive(Debug, thiserror::Error)]
        #[error("a plug-in")]
        struct Wrapped(#[source] StorageError);
        let full = || StorageError::new(StorageErrorKind::Full, StorageOp::Put, None);
        let plugin = CheckpointError::Plugin(Box::new(Wrapped(full())));
        assert_eq!(plugin.kind(), FailureKind::Storage(StorageErrorKind::Full));
        assert_eq!(FailureKind::of(&std::fmt::Error), FailureKind::Other);
    }

    /// A program that retries must not do so while one rank needs something else.
    #[test]
    fn one_rank_that_cannot_go_on_decides_for_all() {
        let transient = FailureKind::Storage(StorageErrorKind::Transient);
        let full = FailureKind::Storage(StorageErrorKind::Full);
        let of = |kinds: &[FailureKind]| {
            let failures = (0..).zip(kinds);
            let failures = failures.map(|(rank, kind)| RankFailure::new(rank, *kind, "")).collect();
            CheckpointError::Ranks { phase: Phase::Write, failures }
        };
        assert!(of(&[transient, transient]).is_retryable());
        let mixed = of(&[transient, full]);
        assert_eq!((mixed.kind(), mixed.is_retryable()), (full, false));
    }
}
