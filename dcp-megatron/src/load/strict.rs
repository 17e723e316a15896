//! Strict handling: how a load treats keys that only the request or only the checkpoint has.

use std::fmt;
use std::str::FromStr;

use crate::error::UnknownStrictHandling;

/// The treatment of requested keys that are not stored (*unexpected*, of this rank) and of stored
/// keys that no rank requests (*missing*), as in Megatron-Core since 0.8. Keys of objects count
/// without their place.
///
/// In all modes but the first, unexpected keys are left out of the request and of the result, with the
/// whole factory of each; lists close up over them. An object whose key is stored but whose place is not, because
/// its grid has changed, is unexpected, too; Megatron-Core does not notice before it reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StrictHandling {
    /// Unexpected keys fail at their read; missing ones are ignored.
    #[default]
    AssumeOkUnexpected,
    /// Unexpected keys are logged; missing ones are ignored.
    LogUnexpected,
    /// Both are logged.
    LogAll,
    /// Unexpected keys are an error before anything is read; missing ones are ignored.
    RaiseUnexpected,
    /// Both are an error.
    RaiseAll,
    /// Unexpected keys are returned, and an empty set of missing ones.
    ReturnUnexpected,
    /// Both are returned.
    ReturnAll,
    /// Neither is reported.
    IgnoreAll,
}

impl StrictHandling {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::AssumeOkUnexpected,
        Self::LogUnexpected,
        Self::LogAll,
        Self::RaiseUnexpected,
        Self::RaiseAll,
        Self::ReturnUnexpected,
        Self::ReturnAll,
        Self::IgnoreAll,
    ];

    /// The value that Megatron-Core has for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AssumeOkUnexpected => "assume_ok_unexpected",
            Self::LogUnexpected => "log_unexpected",
            Self::LogAll => "log_all",
            Self::RaiseUnexpected => "raise_unexpected",
            Self::RaiseAll => "raise_all",
            Self::ReturnUnexpected => "return_unexpected",
            Self::ReturnAll => "return_all",
            Self::IgnoreAll => "ignore_all",
        }
    }

    /// Whether requested and stored keys are compared before anything is read.
    #[must_use]
    #[doc(alias = "requires_explicit_ckpt_mismatch_check")]
    pub fn compares(self) -> bool {
        self != Self::AssumeOkUnexpected
    }

    /// Whether the requests of other ranks matter.
    #[must_use]
    #[doc(alias = "requires_global_app_metadata")]
    pub fn asks_all_ranks(self) -> bool {
        matches!(self, Self::IgnoreAll | Self::RaiseAll | Self::ReturnAll | Self::LogAll)
    }

    /// Whether the load returns the sets of keys.
    #[must_use]
    #[doc(alias = "requires_returning_mismatch_keys")]
    pub fn returns_keys(self) -> bool {
        matches!(self, Self::ReturnUnexpected | Self::ReturnAll)
    }

    pub(crate) fn raises(self) -> bool {
        matches!(self, Self::RaiseUnexpected | Self::RaiseAll)
    }

    pub(crate) fn logs(self) -> bool {
        matches!(self, Self::LogUnexpected | Self::LogAll)
    }
}

impl fmt::Display for StrictHandling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn names() -> String {
    StrictHandling::ALL.map(StrictHandling::name).join(", ")
}

impl FromStr for StrictHandling {
    type Err = UnknownStrictHandling;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|handling| handling.name() == name);
        found.ok_or_else(|| UnknownStrictHandling { name: name.to_owned(), known: names() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_megatron_and_nothing_else() {
        for handling in StrictHandling::ALL {
            assert_eq!(handling.name().parse(), Ok(handling));
        }
        let error = "True".parse::<StrictHandling>().unwrap_err().to_string();
        assert!(error.contains("\"True\"") && error.contains("return_all"), "{error}");
    }
}
