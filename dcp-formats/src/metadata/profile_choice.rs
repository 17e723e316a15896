//! Which form an index is rewritten in.

use super::profile::Profile;

/// The profile to write. The current one is kept if it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProfileChoice {
    /// This profile.
    Exactly(Profile),
    /// Any that PyTorch reads: the current one, or [`Profile::Compat`].
    Torch,
    /// Any of OLMo-core's own: the current one, or [`Profile::Olmo`].
    Olmo,
}

/// The program that an index is rewritten for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexReader {
    /// PyTorch. OLMo-core reads it too.
    Torch,
    /// OLMo-core alone.
    Olmo,
}

impl ProfileChoice {
    /// The form that `reader` reads, of PyTorch's `version` if that is `Some`. OLMo-core has one form
    /// for all versions before 2.15.
    ///
    /// ```
    /// use dcp_formats::metadata::{IndexReader, Profile, ProfileChoice};
    ///
    /// let choice = ProfileChoice::of(IndexReader::Olmo, Some(Profile::Torch2_3));
    /// assert_eq!(choice, ProfileChoice::Exactly(Profile::Olmo));
    /// ```
    #[must_use]
    pub fn of(reader: IndexReader, version: Option<Profile>) -> Self {
        match (reader, version) {
            (IndexReader::Torch, None) => Self::Torch,
            (IndexReader::Olmo, None) => Self::Olmo,
            (IndexReader::Torch, Some(profile)) => Self::Exactly(profile),
            (IndexReader::Olmo, Some(Profile::Torch2_15 | Profile::OlmoTorch2_15)) => {
                Self::Exactly(Profile::OlmoTorch2_15)
            }
            (IndexReader::Olmo, Some(_)) => Self::Exactly(Profile::Olmo),
        }
    }

    /// The profile to write where the index has `now`.
    #[must_use]
    pub fn for_index_of(self, now: Profile) -> Profile {
        match self {
            Self::Exactly(profile) => profile,
            Self::Torch if now.is_olmo() => Profile::Compat,
            Self::Olmo if !now.is_olmo() => Profile::Olmo,
            Self::Torch | Self::Olmo => now,
        }
    }
}
