//! The tensor, object or name that a [`PlanError`] is about.

use super::{DataProblem, PlanError, PlanProblem, PlanSubject, RanksProblem};
use crate::error::TensorError;
use crate::tensors::region::RegionError;

impl PlanError {
    /// The tensor, object or name that it is about, where it is about one.
    #[must_use]
    pub fn fqn(&self) -> Option<&str> {
        match self {
            Self::State { fqn, .. }
            | Self::Chunks { fqn, .. }
            | Self::Index { fqn, .. }
            | Self::Planner { fqn, .. }
            | Self::Ranks(RanksProblem::Disagreement {
                subject: PlanSubject::Entry(fqn), ..
            })
            | Self::Plan(PlanProblem::NotHeld { fqn, .. } | PlanProblem::Misplaced { fqn, .. })
            | Self::Data(
                DataProblem::Unread { fqn, .. }
                | DataProblem::Source { fqn, .. }
                | DataProblem::Destination { fqn, .. },
            ) => Some(fqn),
            Self::Tensor(error) => error.fqn(),
            _ => None,
        }
    }

    /// Replaces the name in an error about one tensor or object by `new`. Errors of tensors
    /// without a name get one, and a view gives errors the names that it shows.
    #[must_use]
    pub fn with_fqn(mut self, new: impl Into<String>) -> Self {
        match &mut self {
            Self::State { fqn, .. }
            | Self::Chunks { fqn, .. }
            | Self::Index { fqn, .. }
            | Self::Planner { fqn, .. }
            | Self::Ranks(RanksProblem::Disagreement {
                subject: PlanSubject::Entry(fqn), ..
            })
            | Self::Plan(PlanProblem::NotHeld { fqn, .. } | PlanProblem::Misplaced { fqn, .. })
            | Self::Data(
                DataProblem::Unread { fqn, .. }
                | DataProblem::Source { fqn, .. }
                | DataProblem::Destination { fqn, .. },
            ) => *fqn = new.into(),
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
    use crate::tensors::region::{Region, RegionError};

    fn overflow() -> RegionError {
        Region::new([u64::MAX], [2]).unwrap_err()
    }

    #[test]
    fn an_error_gets_the_name_that_a_view_shows() {
        let inner = PlanError::not_a_tensor("7");
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
        let error = PlanError::from(PlanProblem::NoItem { item: 3, items: 2 });
        assert_eq!((error.clone().with_fqn("w"), error.fqn()), (error.clone(), None));
    }

    #[test]
    fn the_error_of_a_plug_in_keeps_its_type_and_its_causes() {
        let error = PlanError::plugin(overflow());
        assert_eq!(error, PlanError::plugin(overflow()));
        assert_eq!(error.to_string(), overflow().to_string());
        let PlanError::Plugin(plugin) = &error else { panic!("{error}") };
        assert_eq!(plugin.downcast_ref::<RegionError>(), Some(&overflow()));
        assert_eq!(error.fqn(), None);
    }

    #[test]
    fn each_kind_says_who_can_remove_the_failure() {
        let kinds = [
            (PlanError::message("a message", "it ends too early"), FailureKind::Protocol),
            (PlanError::out_of_step("no plan"), FailureKind::Protocol),
            (PlanProblem::NoItem { item: 3, items: 2 }.into(), FailureKind::InvalidPlan),
            (DataProblem::Unrequested { entry: 0, leaf: 0 }.into(), FailureKind::Other),
            (PlanError::from(overflow()), FailureKind::InvalidPlan),
            (PlanError::plugin(overflow()), FailureKind::InvalidPlan),
        ];
        for (error, kind) in kinds {
            assert_eq!(FailureKind::of(&error), kind, "{error}");
            assert!(!kind.is_retryable());
        }
    }
}
