//! The tensor, object or name that a [`PlanError`] is about.

use super::PlanError;
use crate::error::TensorError;
use crate::region::RegionError;

impl PlanError {
    /// The tensor, object or name that it is about, where it is about one.
    #[must_use]
    pub fn fqn(&self) -> Option<&str> {
        match self {
            Self::DuplicateFqn { fqn, .. }
            | Self::Assembly { fqn, .. }
            | Self::TooIrregular { fqn, .. }
            | Self::Disagreement { fqn, .. }
            | Self::Untrue { fqn, .. }
            | Self::Lost { fqn, .. }
            | Self::AlonePart { fqn, .. }
            | Self::Repeated { fqn, .. }
            | Self::OutOfBounds { fqn, .. }
            | Self::Overlap { fqn, .. }
            | Self::Uncovered { fqn, .. }
            | Self::ShardMemory { fqn, .. }
            | Self::InvalidIndex { fqn, .. }
            | Self::TooDeep { fqn, .. }
            | Self::PathConflict { fqn, .. }
            | Self::AxisCount { fqn, .. }
            | Self::NotATensor { fqn, .. }
            | Self::NotAnObject { fqn, .. }
            | Self::UnknownKind { fqn, .. }
            | Self::NotStorable { fqn, .. }
            | Self::NotCastable { fqn, .. }
            | Self::NoData { fqn, .. }
            | Self::ReservedName { fqn, .. }
            | Self::NotHeld { fqn, .. }
            | Self::MainReplica { fqn, .. }
            | Self::RequestedTwice { fqn, .. }
            | Self::InvalidOptimizer { fqn, .. }
            | Self::ObjectMemory { fqn, .. }
            | Self::Outside { fqn, .. }
            | Self::DestinationShape { fqn, .. }
            | Self::Misplaced { fqn, .. }
            | Self::Unread { fqn, .. }
            | Self::SourceLength { fqn, .. } => Some(fqn),
            Self::Tensor(error) => error.fqn(),
            _ => None,
        }
    }

    /// Replaces the name in an error about one tensor or object by `new`. Errors of tensors
    /// without a name get one, and a view gives errors the names that it shows.
    #[must_use]
    pub fn with_fqn(mut self, new: impl Into<String>) -> Self {
        match &mut self {
            Self::DuplicateFqn { fqn, .. }
            | Self::Assembly { fqn, .. }
            | Self::TooIrregular { fqn, .. }
            | Self::Disagreement { fqn, .. }
            | Self::Untrue { fqn, .. }
            | Self::Lost { fqn, .. }
            | Self::AlonePart { fqn, .. }
            | Self::Repeated { fqn, .. }
            | Self::OutOfBounds { fqn, .. }
            | Self::Overlap { fqn, .. }
            | Self::Uncovered { fqn, .. }
            | Self::ShardMemory { fqn, .. }
            | Self::InvalidIndex { fqn, .. }
            | Self::TooDeep { fqn, .. }
            | Self::PathConflict { fqn, .. }
            | Self::AxisCount { fqn, .. }
            | Self::NotATensor { fqn, .. }
            | Self::NotAnObject { fqn, .. }
            | Self::UnknownKind { fqn, .. }
            | Self::NotStorable { fqn, .. }
            | Self::NotCastable { fqn, .. }
            | Self::NoData { fqn, .. }
            | Self::ReservedName { fqn, .. }
            | Self::NotHeld { fqn, .. }
            | Self::MainReplica { fqn, .. }
            | Self::RequestedTwice { fqn, .. }
            | Self::InvalidOptimizer { fqn, .. }
            | Self::ObjectMemory { fqn, .. }
            | Self::Outside { fqn, .. }
            | Self::DestinationShape { fqn, .. }
            | Self::Misplaced { fqn, .. }
            | Self::Unread { fqn, .. }
            | Self::SourceLength { fqn, .. } => *fqn = new.into(),
            Self::Tensor(error) => return error.clone().with_fqn(new).into(),
            _ => {}
        }
        self
    }
}

impl From<RegionError> for PlanError {
    fn from(error: RegionError) -> Self {
        TensorError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::FailureKind;
    use crate::region::{Region, RegionError};

    fn overflow() -> RegionError {
        Region::new([u64::MAX], [2]).unwrap_err()
    }

    #[test]
    fn an_error_gets_the_name_that_a_view_shows() {
        let inner = PlanError::NotATensor { fqn: "7".to_owned() };
        let shown = inner.with_fqn("optim.step");
        assert_eq!(shown.fqn(), Some("optim.step"));
        let message = "\"optim.step\" is not a tensor; request a tensor, or read it as an object";
        assert_eq!(shown.to_string(), message);
    }

    #[test]
    fn a_region_without_a_name_gets_one() {
        let unnamed = PlanError::from(overflow());
        assert_eq!(unnamed.fqn(), None);
        assert!(unnamed.to_string().starts_with("invalid region: "), "{unnamed}");
        let named = unnamed.with_fqn("w");
        let (fqn, error) = (Some("w".to_owned()), Box::new(overflow()));
        assert_eq!(named, PlanError::Tensor(TensorError::Region { fqn, error }));
        assert!(named.to_string().starts_with("invalid region \"w\": "), "{named}");
    }

    #[test]
    fn errors_of_no_single_name_stay_as_they_are() {
        let error = PlanError::NoItem { item: 3, items: 2 };
        assert_eq!((error.clone().with_fqn("w"), error.fqn()), (error.clone(), None));
    }

    #[test]
    fn each_kind_says_who_can_remove_the_failure() {
        let (message, problem) = ("a message".to_owned(), "it ends too early".to_owned());
        let kinds = [
            (PlanError::Message { message, problem }, FailureKind::Protocol),
            (PlanError::OutOfStep { problem: "no plan".to_owned() }, FailureKind::Protocol),
            (PlanError::NoItem { item: 3, items: 2 }, FailureKind::InvalidPlan),
            (PlanError::Unrequested { entry: 0, leaf: 0 }, FailureKind::Other),
            (PlanError::from(overflow()), FailureKind::InvalidPlan),
        ];
        for (error, kind) in kinds {
            assert_eq!(FailureKind::of(&error), kind, "{error}");
            assert!(!kind.is_retryable());
        }
    }
}
