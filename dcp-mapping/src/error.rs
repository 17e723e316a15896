//! Errors of mappings, and of checkpoints that do not match one.

use dcp_core::CheckpointError;
use dcp_core::text::{Message, Quoted};
use dcp_jobs::JobError;

/// A mapping could not be read, or does not fit the checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The file is no mapping: bad TOML, an unknown operation or field, a bad name.
    #[error("{file}:{line}: {problem}", file = Message(.file), problem = Message(.problem))]
    Declaration {
        /// The file's name as given.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// A configuration in YAML that cannot be read, or says nothing of a model.
    #[error("{file}:{line}: {problem}", file = Message(.file), problem = Message(.problem))]
    Yaml {
        /// The file's name as given.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// A rule does not fit the checkpoint.
    #[error("{file}:{line}: rule {rule}: {problem}", rule = Quoted(.rule), file = Message(.file), problem = Message(.problem))]
    Rule {
        /// The file's name as given.
        file: String,
        /// The line that the rule begins at, from 1.
        line: usize,
        /// The rule's name, or the Megatron name that it is about.
        rule: String,
        /// The problem, with the tensor.
        problem: String,
    },
    /// There is no built-in mapping of that name.
    #[error("there is no model family {name}; there are {}", .known.join(", "), name = Quoted(.name))]
    UnknownFamily {
        /// The name requested.
        name: String,
        /// The families that have built-in mappings.
        known: Vec<&'static str>,
    },
    /// The weights are not those of a model of the mapping's family.
    #[error("the checkpoint is not a model of the family {family}: {why}", family = Quoted(.family), why = Message(.why))]
    OtherFamily {
        /// The mapping's name.
        family: String,
        /// The evidence against it.
        why: String,
    },
    /// Some tensors of the checkpoint have no rule.
    #[error("the mapping {family} has no rule for {}", first_of(.tensors), family = Quoted(.family))]
    LeftOver {
        /// The mapping's name.
        family: String,
        /// The tensors, in the checkpoint's order.
        tensors: Vec<String>,
    },
    /// A required number is missing.
    #[error("{needed_for} needs {fact}, which is in neither the arguments nor the shapes", needed_for = Message(.needed_for), fact = Message(.fact))]
    UnknownFact {
        /// The number, by the name that Megatron's arguments have for it.
        fact: String,
        /// The size or tensors that need it.
        needed_for: String,
    },
    /// An invalid argument or configuration field.
    #[error("{fact} is {value}: {problem}", fact = Message(.fact), value = Message(.value), problem = Message(.problem))]
    BadFact {
        /// Its name.
        fact: String,
        /// Its value, as JSON.
        value: String,
        /// The reason why the value is invalid.
        problem: String,
    },
    /// The other side would compute something else: it has no way to say this.
    #[error("{fact} is {value}: {problem}", fact = Message(.fact), value = Message(.value), problem = Message(.problem))]
    Differs {
        /// The argument of Megatron's, or the field of `config.json`.
        fact: String,
        /// Its value, as JSON.
        value: String,
        /// The limitation of the other side.
        problem: String,
    },
    /// `config.json` would have holes, which transformers fills with numbers of another model.
    #[error("config.json needs {}, which the arguments do not have", .fields.join(", "))]
    Unsaid {
        /// Fields of `config.json`.
        fields: Vec<String>,
    },
    /// The checkpoint, or what is beneath it.
    #[error(transparent)]
    Convert(#[from] JobError),
}

impl From<CheckpointError> for MappingError {
    fn from(error: CheckpointError) -> Self {
        Self::Convert(error.into())
    }
}

/// The first names of a list, and how many more there are.
pub(crate) fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(|n| Quoted(n).to_string()).collect::<Vec<_>>();
    if names.len() > SHOWN {
        text.push(format!("and {} more", names.len() - SHOWN));
    }
    text.join(", ")
}
