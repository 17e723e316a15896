//! Compares the settings of a `config.json` with the tensors that they describe.

use dcp_core::CheckpointMetadata;
use serde_json::Value;

use crate::config::incompatibilities::same;
use crate::config::original_config::OWN_CONFIG;
use crate::error::MappingError;
use crate::facts::{Facts, bad};
use crate::map::resolve::Resolved;
use crate::mapping::Mapping;

/// Settings of biases, which every tensor of a kind has or none.
const BIASES: &[&str] = &["attention_bias", "mlp_bias"];

/// Refuses a model of another program whose `config.json` contradicts its tensors: transformers makes a model by
/// the settings, and cannot load tensors of other shapes, or leaves biases as they were initialized. The
/// arguments of Megatron-Core are compared with its tensors by `Shapes`.
pub(crate) fn check(
    mapping: &Mapping,
    metadata: &CheckpointMetadata,
    resolved: &Resolved<'_>,
    facts: &Facts,
) -> Result<(), MappingError> {
    if mapping.program().is_none() {
        return Ok(());
    }
    if let Some(own) = facts.get(OWN_CONFIG) {
        for (setting, usual) in &mapping.config.constants {
            if let Some(stated) = own.get(setting).filter(|stated| !is_usual(stated, usual)) {
                let problem = format!("the names are made for {usual}");
                return Err(bad(setting, stated, &problem));
            }
        }
    }
    let fields = &mapping.config.fields;
    let is_bias = |name: &str| name.ends_with(".bias");
    for setting in BIASES {
        let Some(arg) = fields.get(*setting) else { continue };
        let mut rules = mapping.rules.iter().flat_map(|rule| &rule.hf);
        if facts.get_bool(arg) == Some(true) && !rules.any(|name| is_bias(&name.text())) {
            let problem = format!("models of {:?} have no biases", mapping.name());
            return Err(bad(setting, &true.into(), &problem));
        }
    }
    for active in &resolved.active {
        let shape = &active.rule.shape;
        for source in active.instances.iter().flat_map(|instance| &instance.sources) {
            let Some((name, entry)) = metadata.at(source.entry).filter(|_| !shape.is_empty())
            else {
                continue;
            };
            let Some(tensor) = entry.as_tensor() else { continue };
            if tensor.shape.ndim() != shape.len() {
                let (found, axes) = (&tensor.shape, shape.len());
                let problem = format!("{name:?} has the shape {found}, and needs {axes} axes");
                return Err(mapping.error(active.rule, problem));
            }
            for (axis, (len, settings)) in tensor.shape.iter().zip(shape).enumerate() {
                let Some(stated) = product(settings, mapping, facts)? else { continue };
                if stated != *len {
                    let problem = format!("{name:?} has {len} on its axis {axis}");
                    return Err(bad(&settings.join(" * "), &Value::from(stated), &problem));
                }
            }
        }
    }
    Ok(())
}

/// Whether a setting is that of a family, or says nothing. Of a list, such as the classes of a model, it has to be
/// among the elements.
fn is_usual(stated: &Value, usual: &Value) -> bool {
    match (stated, usual) {
        (Value::Null, _) => true,
        (Value::Array(stated), Value::Array(usual)) => {
            stated.is_empty() || usual.iter().all(|one| stated.contains(one))
        }
        _ => same(stated, usual),
    }
}

/// The product of settings; `None` where one is not stated.
fn product(
    settings: &[String],
    mapping: &Mapping,
    facts: &Facts,
) -> Result<Option<u64>, MappingError> {
    let mut product = 1_u64;
    for setting in settings {
        let arg = mapping.config.fields.get(setting);
        let value = arg.map(|arg| facts.get_u64(arg)).transpose()?.flatten();
        let Some(value) = value else { return Ok(None) };
        let Some(next) = product.checked_mul(value) else {
            return Err(bad(setting, &value.into(), "that is too large"));
        };
        product = next;
    }
    Ok(Some(product))
}
