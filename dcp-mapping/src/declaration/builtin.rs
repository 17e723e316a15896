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
        if let Some((_, file, text)) = families::PROGRAMS.iter().find(|one| one.0 == name) {
            return parse(text, file);
        }
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
            known: families::NAMES
                .iter()
                .copied()
                .chain(families::PROGRAMS.iter().map(|(name, ..)| *name))
                .collect(),
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

    /// The mappings that come with this crate for models of other programs than Megatron-Core, such as
    /// torchtitan.
    ///
    /// # Errors
    ///
    /// None in a released crate: a test reads them all.
    pub fn of_programs() -> Result<Vec<Self>, MappingError> {
        families::PROGRAMS.iter().map(|(_, file, text)| parse(text, file)).collect()
    }

    /// The TOML of a family that comes with this crate, to begin one's own with.
    #[must_use]
    pub fn declaration(family: &str) -> Option<&'static str> {
        let files = families::NAMES.iter().zip(families::FILES);
        let files = files.map(|(name, (_, text))| (*name, *text));
        let mut all = files.chain(families::PROGRAMS.iter().map(|(name, _, text)| (*name, *text)));
        all.find_map(|(name, text)| (name == family).then_some(text))
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
