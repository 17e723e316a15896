//! Which programs a `.metadata` is written for.

use std::fmt;

use dcp_core::FormatError;

use super::attributes::{Graph, bad};
use super::class::{Class, OLMO_FILESYSTEM, SHARDED_METADATA};
use crate::pickle::{Limits, Pickle};

/// Which programs can read a `.metadata`; each later form is unreadable before its version.
///
/// OLMo-core (3.0) names a place in a file by a class of its own, which PyTorch cannot read even
/// with OLMo-core installed; OLMo-core reads its own and PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// PyTorch 2.1 and later.
    #[default]
    Compat,
    /// PyTorch 2.3 and later: classes where they are since 2.3.
    Torch2_3,
    /// PyTorch 2.15 and later: with strides, version and the ids of the save.
    Torch2_15,
    /// OLMo-core on any PyTorch that it runs on: its own class for places, and the ids of the
    /// save.
    Olmo,
    /// What OLMo-core 3.0 writes on PyTorch 2.15: the same with strides, which only PyTorch 2.15
    /// and later read.
    OlmoTorch2_15,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Compat, Self::Torch2_3, Self::Torch2_15, Self::Olmo, Self::OlmoTorch2_15];

    /// The profile that a `.metadata` has, whoever wrote it: the first that says all that its
    /// form can say.
    ///
    /// # Errors
    ///
    /// When it is no pickle of a `Metadata`.
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

    /// Whether it is for OLMo-core.
    #[must_use]
    pub fn is_olmo(self) -> bool {
        matches!(self, Self::Olmo | Self::OlmoTorch2_15)
    }

    /// Whether tensors are described with strides.
    pub(super) fn has_strides(self) -> bool {
        matches!(self, Self::Torch2_15 | Self::OlmoTorch2_15)
    }

    /// Whether the ids of the save are kept.
    pub(super) fn has_origin(self) -> bool {
        matches!(self, Self::Torch2_15 | Self::Olmo | Self::OlmoTorch2_15)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
