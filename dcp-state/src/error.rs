//! Errors of making or applying a state dict.

use std::fmt;

use dcp_core::CheckpointError;
use dcp_core::text::{Message, Quoted};

use crate::model::ParamId;

/// The state dict of a model or optimizer cannot be made, or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateDictError {
    /// Two entries of the model have one FQN.
    #[error(
        "{first} and {second} of the model have the same FQN {fqn}; rename one of them",
        fqn = Quoted(.fqn), first = Quoted(.first), second = Quoted(.second)
    )]
    DuplicateFqn {
        /// The FQN.
        fqn: String,
        /// The name of one entry in the model.
        first: String,
        /// The name of the other.
        second: String,
    },
    /// The entry is a flat parameter of FSDP1, which has the elements of several parameters.
    #[error(
        "{name} is a flat parameter; the model has to show the parameters in it",
        name = Quoted(.name)
    )]
    FlatParameter {
        /// The name of the entry.
        name: String,
    },
    /// An optimizer has a parameter that the model does not have.
    #[error("parameter {id} of an optimizer is not in the model")]
    UnknownParameter {
        /// The parameter.
        id: ParamId,
    },
    /// The state dict has other keys than the model or the optimizers.
    #[error("the state dict does not fit: {0}; `StateDictOptions::strict(false)` accepts that")]
    IncompatibleKeys(IncompatibleKeys),
    /// A tensor does not fit the one that it is set to.
    #[error("cannot set {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    Unfit {
        /// The key.
        fqn: String,
        /// The problem of the tensor.
        problem: String,
    },
    /// The state dict of an optimizer has neither of the layouts.
    #[error(
        "the optimizer's state dict is invalid at {key}: {problem}",
        key = Quoted(.key), problem = Message(.problem)
    )]
    InvalidLayout {
        /// The key.
        key: String,
        /// The problem of that key.
        problem: String,
    },
    /// Parameters of one group have different options in the state dict.
    #[error(
        "{first} and {second} are in one parameter group and have different values of {option} in \
         the state dict; `StateDictOptions::strict(false)` takes those of the first",
        first = Quoted(.first), second = Quoted(.second), option = Quoted(.option)
    )]
    GroupsDiffer {
        /// A parameter.
        first: String,
        /// The parameter with another value.
        second: String,
        /// The option.
        option: String,
    },
    /// Ranks hold different tensors, so none can be gathered.
    #[error(
        "rank {rank} gathers {theirs} where rank 0 gathers {first}; a full state dict needs the \
         same keys on every rank", first = Message(.first), theirs = Message(.theirs)
    )]
    RanksDiffer {
        /// The rank.
        rank: dcp_core::Rank,
        /// The tensor that rank 0 gathers.
        first: String,
        /// The tensor that the other rank gathers.
        theirs: String,
    },
    /// Options that exclude each other.
    #[error("{0}")]
    InvalidOptions(&'static str),
}

impl From<StateDictError> for CheckpointError {
    fn from(error: StateDictError) -> Self {
        Self::Plugin(Box::new(error))
    }
}

/// Keys that only one of state dict and model has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Keys that the model or an optimizer has and the state dict lacks.
    pub missing: Vec<String>,
    /// Keys that the state dict has and the model lacks.
    pub unexpected: Vec<String>,
}

impl IncompatibleKeys {
    /// Whether all keys fit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }

    /// These keys, unless there are some and `strict` does not allow that.
    pub(crate) fn allowed(self, strict: bool) -> Result<Self, StateDictError> {
        let is_error = strict && !self.is_empty();
        if is_error { Err(StateDictError::IncompatibleKeys(self)) } else { Ok(self) }
    }
}

impl fmt::Display for IncompatibleKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let mut separator = "";
        for (what, keys) in [("it lacks", &self.missing), ("it adds", &self.unexpected)] {
            let mut shown: Vec<_> =
                keys.iter().take(SHOWN).map(|key| Quoted(key).to_string()).collect();
            if keys.len() > SHOWN {
                shown.push(format!("and {} more", keys.len() - SHOWN));
            }
            if !shown.is_empty() {
                write!(f, "{separator}{what} {}", shown.join(", "))?;
                separator = "; ";
            }
        }
        Ok(())
    }
}
