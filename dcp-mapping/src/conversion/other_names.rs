//! Configurations of models whose tensors have names of another program.

use dcp_core::CheckpointMetadata;
use dcp_jobs::{Error, ErrorKind};

use super::stated_sizes::refuse_contradictions;
use crate::mapping::Mapping;
use crate::recognize::recognize_config;

/// The output weights.
const OUTPUT: &str = "lm_head.weight";

/// Refuses a configuration of a family that is known, where no tensor has a name of that family or some
/// have names of another program, or one that contradicts the tensors: transformers opens such a folder
/// with random weights.
pub(super) fn refuse_other_names(
    config: &serde_json::Value,
    names: &CheckpointMetadata,
) -> Result<(), Error> {
    let Ok(family) = recognize_config(config) else { return Ok(()) };
    let tensors = || names.iter().filter(|(_, entry)| entry.as_tensor().is_some());
    let others = || tensors().map(|(fqn, _)| fqn).filter(|fqn| !family.names_in_hf(fqn));
    // Programs share names with families of transformers, such as `model.norm.weight`.
    let families = Mapping::builtins()?;
    let is_in_hf = |fqn: &str| families.iter().any(|family| family.names_in_hf(fqn));
    let title = family.title();
    for mapping in Mapping::of_programs()? {
        let Some(program) = mapping.program() else { continue };
        if let Some(first) = others().find(|fqn| mapping.names_in_program(fqn) && !is_in_hf(fqn)) {
            let message =
                format!("config.json is of {title}, and {first:?} is a name of {program}");
            return Err(Error::new(ErrorKind::InvalidOption, message).with_hint(format!(
                "`MappingOptions::arch` {} gives tensors the names of transformers, and the rows \
                 that go with them",
                mapping.name()
            )));
        }
    }
    // Output weights have one name in all families.
    let is_own = |fqn: &str| fqn != OUTPUT && family.names_in_hf(fqn);
    let Some(first) = others().next().filter(|_| !tensors().any(|(fqn, _)| is_own(fqn))) else {
        return refuse_contradictions(&family, config, names);
    };
    let none = match names.get(OUTPUT) {
        Some(_) => format!("no tensor but {OUTPUT:?}"),
        None => "no tensor".to_owned(),
    };
    let message = format!(
        "config.json is of {title}, and {none} has a name of that family; the first is {first:?}"
    );
    Err(Error::new(ErrorKind::InvalidOption, message).with_hint(
        "give tensors the names of transformers with `Keys::rename` or `Keys::map`, or pass \
         `Destination::config` with the folder of this model",
    ))
}
