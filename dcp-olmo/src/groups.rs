//! Assigns an optimizer's parameters to groups of equal settings.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use dcp_core::Value;
use dcp_core::path::PathItem;
use indexmap::IndexMap;

use crate::error::OlmoError;
use crate::roots::{GROUPS, OPTIM};
use crate::value_hash;

/// A setting of a parameter: its field, the path below it, and its entry.
pub(crate) type Setting<'a> = (&'a str, &'a [PathItem], usize);

/// The first setting in which two parameters differ.
fn difference<'a>(
    a: &[Setting<'a>],
    b: &[Setting<'a>],
    values: &HashMap<usize, Value>,
) -> Option<&'a str> {
    if a.len() != b.len() {
        let longer = if a.len() > b.len() { a } else { b };
        return Some(longer.last().map_or("", |(field, ..)| field));
    }
    let differs = a.iter().zip(b).find(|((field, rest, x), (other, below, y))| {
        let same = match (values.get(x), values.get(y)) {
            (Some(x), Some(y)) => x.view().same(y.view()),
            _ => false,
        };
        (field, rest) != (other, below) || !same
    });
    differs.map(|((field, ..), _)| *field)
}

/// Groups parameters by equal settings.
pub(crate) fn equal_groups(
    settings: &IndexMap<&str, Vec<Setting<'_>>>,
    values: &HashMap<usize, Value>,
) -> Vec<Vec<Arc<str>>> {
    let hashes: HashMap<usize, u64> = values
        .iter()
        .map(|(at, value)| {
            let mut hasher = DefaultHasher::new();
            value_hash::hash(value.view(), &mut hasher);
            (*at, hasher.finish())
        })
        .collect();
    let mut groups: Vec<(&[Setting<'_>], Vec<Arc<str>>)> = Vec::new();
    // Groups by the hash of their settings.
    let mut known: HashMap<u64, Vec<usize>> = HashMap::new();
    for (param, fields) in settings {
        let mut hasher = DefaultHasher::new();
        for (field, rest, at) in fields {
            (field, rest, hashes.get(at)).hash(&mut hasher);
        }
        let known = known.entry(hasher.finish()).or_default();
        let same = |at: &&usize| difference(groups[**at].0, fields, values).is_none();
        match known.iter().find(same).copied() {
            Some(at) => groups[at].1.push((*param).into()),
            None => {
                known.push(groups.len());
                groups.push((fields, vec![(*param).into()]));
            }
        }
    }
    groups.into_iter().map(|(_, members)| members).collect()
}

/// The requested groups, whose members must have equal settings.
pub(crate) fn given_groups(
    groups: &[Vec<Arc<str>>],
    settings: &IndexMap<&str, Vec<Setting<'_>>>,
    values: &HashMap<usize, Value>,
) -> Result<Vec<Vec<Arc<str>>>, OlmoError> {
    for (number, members) in groups.iter().enumerate() {
        let mut known = members.iter().filter_map(|param| Some((param, settings.get(&**param)?)));
        let Some((first, fields)) = known.next() else { continue };
        for (param, others) in known {
            if let Some(field) = difference(fields, others, values) {
                return Err(OlmoError::MixedGroup {
                    group: format!("{OPTIM}.{GROUPS}.{number}"),
                    first: first.to_string(),
                    second: param.to_string(),
                    field: field.to_string(),
                });
            }
        }
    }
    Ok(groups.to_vec())
}
