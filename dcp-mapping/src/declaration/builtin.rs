//! Mappings from declarations: those of this crate, and others.

use super::families;
use super::parser::parse;
use crate::error::MappingError;
use crate::mapping::Mapping;

impl Mapping {
    /// The mapping of a family that comes with this crate, by the name of the family or by a
    /// `model_type` of transformers.
    ///
    /// # Errors
    ///
    /// [`MappingError::UnknownFamily`] when there is none.
    pub fn builtin(name: &str) -> Result<Self, MappingError> {
        let mut by_type = None;
        for (file, text) in families::FILES {
            let mapping = parse(text, file)?;
            if mapping.family.name == name {
                return Ok(mapping);
            }
            if by_type.is_none() && mapping.family.model_types.iter().any(|kind| kind == name) {
                by_type = Some(mapping);
            }
        }
        let unknown = || MappingError::UnknownFamily {
            name: name.to_owned(),
            known: families::NAMES.to_vec(),
        };
        by_type.ok_or_else(unknown)
    }

    /// All mappings that come with this crate.
    ///
    /// # Errors
    ///
    /// None in a released crate: a test reads them all.
    pub fn builtins() -> Result<Vec<Self>, MappingError> {
        families::FILES.iter().map(|(file, text)| parse(text, file)).collect()
    }

    /// The TOML of a family that comes with this crate, to begin one's own with.
    #[must_use]
    pub fn declaration(family: &str) -> Option<&'static str> {
        let mut files = families::NAMES.iter().zip(families::FILES);
        files.find_map(|(name, (_, text))| (*name == family).then_some(*text))
    }

    /// The names of the families that come with this crate.
    #[must_use]
    pub fn families() -> &'static [&'static str] {
        families::NAMES
    }

    /// Parses a mapping declared in TOML. Errors name it `file_name`.
    ///
    /// # Errors
    ///
    /// [`MappingError::Declaration`] with the line.
    pub fn parse(toml: &str, file_name: &str) -> Result<Self, MappingError> {
        parse(toml, file_name)
    }
}
