//! Recognizes the family of a model.

pub(crate) mod family_check;
pub(crate) mod shapes;

use dcp_core::CheckpointMetadata;
use serde::Serialize;
use serde_json::Value;

use crate::error::MappingError;
use crate::facts::Facts;
use crate::mapping::Mapping;
use crate::recognize::shapes::Shapes;
use crate::template::Template;

/// The result of the recognition of a checkpoint's family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "recognized", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recognition {
    /// It is of this family.
    Found {
        /// The family's name, for [`Mapping::builtin`].
        family: String,
        /// The evidence.
        because: Vec<String>,
        /// Families whose weights look the same but of which nothing speaks for being them.
        alike: Vec<String>,
    },
    /// It may be of several families, and nothing speaks for one of them.
    Ambiguous {
        /// Their names.
        candidates: Vec<String>,
        /// The features that the families share.
        why: String,
    },
    /// It is of no family that is known here.
    Unknown {
        /// For each family, what speaks against it.
        why: Vec<(String, String)>,
    },
}

/// The family of a Megatron checkpoint, recognized by its keys, its shapes and its arguments, among
/// those that come with this crate.
///
/// # Errors
///
/// [`MappingError::BadFact`] when an argument is invalid.
pub fn recognize(
    metadata: &CheckpointMetadata,
    facts: &Facts,
) -> Result<Recognition, MappingError> {
    Ok(recognize_among(&Mapping::builtins()?, metadata, facts))
}

/// Like [`recognize`], among these mappings. Returns the one with the most evidence.
#[must_use]
pub fn recognize_among(
    mappings: &[Mapping],
    metadata: &CheckpointMetadata,
    facts: &Facts,
) -> Recognition {
    let (mut fitting, mut against) = (Vec::new(), Vec::new());
    for mapping in mappings {
        let shapes = Shapes::of(metadata, mapping);
        let name = mapping.family.name.clone();
        match judge(mapping, &shapes, facts) {
            Ok(because) => fitting.push((name, because)),
            Err(problem) => against.push((name, problem)),
        }
    }
    let came_as = facts.own_model_type().unwrap_or_default();
    let is_own = |name: &str| {
        let mut own = mappings.iter().filter(|mapping| mapping.family.name == name);
        own.any(|mapping| mapping.family.model_types.iter().any(|kind| kind == came_as))
    };
    if fitting.iter().any(|(name, _)| is_own(name)) {
        fitting.retain(|(name, _)| is_own(name));
    }
    if !came_as.is_empty() && !mappings.iter().any(|mapping| is_own(&mapping.family.name)) {
        // Whatever its weights look like, it may compute something else.
        let why = format!("the config.json that the model came with is of a {came_as}");
        let all = mappings.iter().map(|mapping| (mapping.family.name.clone(), why.clone()));
        return Recognition::Unknown { why: all.collect() };
    }
    let Some(most) = fitting.iter().map(|(_, because)| because.len()).max() else {
        return Recognition::Unknown { why: against };
    };
    let (best, rest): (Vec<_>, Vec<_>) =
        fitting.into_iter().partition(|(_, because)| because.len() == most);
    let mut best = best.into_iter();
    match (best.next(), best.next()) {
        (Some((family, because)), None) => {
            let alike = rest.into_iter().map(|(name, _)| name).collect();
            Recognition::Found { family, because, alike }
        }
        (first, second) => {
            let all = first.into_iter().chain(second).chain(best).collect::<Vec<_>>();
            let why = all.first().map_or_else(String::new, |(_, because)| because.join("; "));
            let candidates = all.into_iter().map(|(name, _)| name).collect();
            Recognition::Ambiguous { candidates, why }
        }
    }
}

/// The family of a transformers model, by `model_type` in its `config.json`.
///
/// # Errors
///
/// [`MappingError::UnknownFamily`] when there is no mapping for it, or no `model_type`.
pub fn recognize_config(config: &Value) -> Result<Mapping, MappingError> {
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let found = Mapping::builtins()?
        .into_iter()
        .find(|mapping| mapping.family.model_types.iter().any(|known| known == kind));
    let known = Mapping::families().to_vec();
    found.ok_or_else(|| MappingError::UnknownFamily { name: kind.to_owned(), known })
}

/// The name of a tensor without prefix, layer and expert.
fn bare(template: &Template) -> String {
    template.text().replace("{prefix}", "").replace("{layer}.", "").replace("{expert}.", "")
}

/// Lists the names that are missing or in excess, compared with models of a family.
pub(crate) fn contradictions(mapping: &Mapping, shapes: &Shapes) -> Vec<String> {
    let missing = mapping.recognize.has.iter().map(bare).filter(|name| !shapes.has(name));
    let excess = mapping.recognize.lacks.iter().map(bare).filter(|name| shapes.has(name));
    let missing = missing.map(|name| format!("there is no {name}"));
    missing.chain(excess.map(|name| format!("there is {name}"))).collect()
}

/// Returns the evidence for a family, or the first contradiction.
fn judge(mapping: &Mapping, shapes: &Shapes, facts: &Facts) -> Result<Vec<String>, String> {
    let recognize = &mapping.recognize;
    let mut because = Vec::new();
    let came_as = facts.own_model_type();
    let came_as = came_as.filter(|kind| mapping.family.model_types.iter().any(|own| own == kind));
    for template in &recognize.has {
        let name = bare(template);
        if !shapes.has(&name) {
            return Err(format!("there is no {name}"));
        }
        because.push(format!("there is {name}"));
    }
    for template in &recognize.lacks {
        let name = bare(template);
        match shapes.has(&name) {
            false => because.push(format!("there is no {name}")),
            true if came_as.is_some() => {}
            true => return Err(format!("there is {name}")),
        }
    }
    if let Some(gated) = recognize.gated {
        let text = |gated| if gated { "the MLP is gated" } else { "the MLP is not gated" };
        match shapes.gated() {
            Some(found) if found == gated => because.push(text(gated).to_owned()),
            Some(found) => return Err(text(found).to_owned()),
            None => return Err("there is no MLP".to_owned()),
        }
    }
    for (arg, expected) in &recognize.args {
        let found = facts.get(arg);
        let fits = match (expected.as_str(), found) {
            (Some("set"), found) => found.is_some(),
            (_, found) => found == Some(expected),
        };
        let shown = found.map_or_else(|| "not set".to_owned(), Value::to_string);
        let text = format!("the argument {arg} is {shown}");
        match fits {
            true => because.push(text),
            false if came_as.is_some() => {}
            false => return Err(text),
        }
    }
    if let Some(kind) = came_as {
        let reason = format!("the config.json that it came with is of a {kind}");
        because.insert(0, reason);
    }
    if because.is_empty() {
        return Err("it says nothing of how to recognize it".to_owned());
    }
    Ok(because)
}
