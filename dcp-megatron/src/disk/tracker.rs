//! The tracker file of a training run, which names its latest checkpoint.

use std::fmt;

use dcp_core::{FormatError, Key, StorageError};
use dcp_jobs::run::StepNaming;
use serde::{Deserialize, Serialize};

/// The tracker's name in the folder of a run.
pub const TRACKER: &str = "latest_checkpointed_iteration.txt";

/// The checkpoint that a tracker names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Tracked {
    /// The checkpoint after so many iterations, in `iter_0000010`.
    Iteration(u64),
    /// A checkpoint of no iteration, in `release`: it is loaded as one of iteration 0, without
    /// optimizer and random state.
    Release,
}

impl Tracked {
    /// Parses the text of a tracker: a decimal number or the word `release`, with spaces and line
    /// breaks around it.
    ///
    /// # Errors
    ///
    /// When it is anything else.
    pub fn parse(text: &[u8]) -> Result<Self, FormatError> {
        let trimmed = text.trim_ascii();
        if trimmed == b"release" {
            return Ok(Self::Release);
        }
        let digits = !trimmed.is_empty() && trimmed.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(trimmed).ok().filter(|_| digits);
        number.and_then(|number| number.parse().ok()).map(Self::Iteration).ok_or_else(|| {
            let shown = String::from_utf8_lossy(trimmed.get(..40).unwrap_or(trimmed)).into_owned();
            let problem = format!("{shown:?} is neither an iteration nor \"release\"");
            FormatError::new("tracker", problem)
        })
    }

    /// Returns the checkpoint that a folder of that name holds; `None` for any other name.
    #[must_use]
    pub fn of_folder(name: &str) -> Option<Self> {
        if name == "release" {
            return Some(Self::Release);
        }
        match StepNaming::parse(name) {
            Some((StepNaming::Iteration, iteration)) => Some(Self::Iteration(iteration)),
            _ => None,
        }
    }

    /// The iteration; `None` of a release.
    #[must_use]
    pub fn iteration(self) -> Option<u64> {
        if let Self::Iteration(iteration) = self { Some(iteration) } else { None }
    }

    /// The folder of the checkpoint in that of the run.
    ///
    /// # Errors
    ///
    /// Never; every such name is a key.
    pub fn folder(self) -> Result<Key, StorageError> {
        Ok(Key::new(self.folder_name())?)
    }

    /// The name of that folder.
    #[must_use]
    pub fn folder_name(self) -> String {
        match self {
            Self::Iteration(iteration) => StepNaming::Iteration.folder(iteration),
            Self::Release => "release".to_owned(),
        }
    }
}

impl fmt::Display for Tracked {
    /// As the file has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Iteration(iteration) => write!(f, "{iteration}"),
            Self::Release => f.write_str("release"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_padded_to_seven_digits_and_may_be_longer() {
        let folder = |tracked: Tracked| tracked.folder().unwrap().to_string();
        assert_eq!(folder(Tracked::Iteration(10)), "iter_0000010");
        assert_eq!(folder(Tracked::Iteration(12_345_678)), "iter_12345678");
        assert_eq!(folder(Tracked::Release), "release");
        for name in ["iter_0000010", "iter_12345678", "release"] {
            assert_eq!(folder(Tracked::of_folder(name).unwrap()), name);
        }
        for name in ["iter_10", "iter_00000x0", "release2", "iter_", "iter_99999999999999999999"] {
            assert_eq!(Tracked::of_folder(name), None, "{name}");
        }
    }

    #[test]
    fn a_tracker_is_a_number_or_a_word() {
        for (text, tracked) in [
            ("10", Tracked::Iteration(10)),
            (" 0010\n", Tracked::Iteration(10)),
            ("release\r\n", Tracked::Release),
        ] {
            assert_eq!(Tracked::parse(text.as_bytes()).unwrap(), tracked);
        }
        for text in ["", " ", "-1", "1e3", "Release", "10 11", "99999999999999999999999"] {
            assert!(Tracked::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(Tracked::parse(&[0xff; 100]).is_err());
    }
}
