//! The programs for which a `.metadata` is written.

use std::fmt;

use dcp_core::FormatError;

use super::attributes::{Graph, bad};
use super::class::{Class, OLMO_FILESYSTEM, SHARDED_METADATA};
use crate::pickle::{Limits, Pickle};

/// The programs that read a `.metadata`. Earlier versions cannot read a form of a later one.
///
/// OLMo-core (3.0) stores placements as a class of its own, which PyTorch cannot load even with
/// OLMo-core installed. OLMo-core reads its own class and PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// PyTorch 2.1 and later.
    #[default]
    Compat,
    /// PyTorch 2.3 and later: classes in their modules since 2.3.
    Torch2_3,
    /// PyTorch 2.15 and later: with strides, a version, and the ids of the save.
    Torch2_15,
    /// OLMo-core on any PyTorch that it supports: its own class for placements, and the ids of the
    /// save.
    Olmo,
    /// OLMo-core 3.0 on PyTorch 2.15: like [`Olmo`](Self::Olmo), with strides, which only PyTorch
    /// 2.15 and later read.
    OlmoTorch2_15,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 5] =
        [Self::Compat, Self::Torch2_3, Self::Torch2_15, Self::Olmo, Self::OlmoTorch2_15];

    /// The profile of an existing `.metadata`: the first one that expresses all of it.
    ///
    /// # Errors
    ///
    /// When it is not a pickle of `Metadata`.
    pub fn of(metadata: &[u8]) -> Result<Self, FormatError> {
        let pickle = Pickle::parse(metadata, &Limits::DEFAULT)?;
        let graph = Graph::new(&pickle);
        let whole = graph.instance(pickle.root(), Class::Metadata, "the whole")?;
        let names = |module: &str, name: &str| {
            pickle.globals().iter().any(|global| global.module == module && global.name == name)
        };
        let olmo = names(OLMO_FILESYSTEM, "_StorageInfo");
        if names(SHARDED_METADATA, "TensorProperties") {
            // PyTorch moved the class before OLMo-core existed.
            return if olmo {
                Err(bad("it has classes of PyTorch before 2.3 and of OLMo-core, which was never"))
            } else {
                Ok(Self::Compat)
            };
        }
        let entries = graph.attribute(whole, "state_dict_metadata");
        let entries = entries.map_or(Ok(&[][..]), |id| graph.entries(id, "state_dict_metadata"))?;
        let mut strides = false;
        for [_, entry] in entries {
            if graph.class(*entry) != Some(Class::TensorMetadata) {
                continue;
            }
            let tensor = graph.instance(*entry, Class::TensorMetadata, "a tensor")?;
            let properties = graph.require(tensor, "properties", "a tensor")?;
            let state = pickle.object(properties).and_then(|object| object.state);
            strides = state.is_some_and(|state| pickle.tuple(state).len() > 5);
            break;
        }
        Ok(match (olmo, strides) {
            (true, true) => Self::OlmoTorch2_15,
            (true, false) => Self::Olmo,
            (false, true) => Self::Torch2_15,
            (false, false) => Self::Torch2_3,
        })
    }

    /// A short name, such as `torch2.3`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Compat => "compat",
            Self::Torch2_3 => "torch2.3",
            Self::Torch2_15 => "torch2.15",
            Self::Olmo => "olmo",
            Self::OlmoTorch2_15 => "olmo-torch2.15",
        }
    }

    /// Whether OLMo-core reads it and PyTorch does not.
    #[must_use]
    pub fn is_olmo(self) -> bool {
        matches!(self, Self::Olmo | Self::OlmoTorch2_15)
    }

    /// Whether tensors have strides.
    pub(super) fn has_strides(self) -> bool {
        matches!(self, Self::Torch2_15 | Self::OlmoTorch2_15)
    }

    /// Whether it contains the ids of the save.
    pub(super) fn has_origin(self) -> bool {
        matches!(self, Self::Torch2_15 | Self::Olmo | Self::OlmoTorch2_15)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
