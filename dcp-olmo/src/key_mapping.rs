//! Renames parameters: OLMo-core's `key_mapping`.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader, Value};
use indexmap::IndexMap;

use crate::error::OlmoError;
use crate::layout::{OptimKey, group_members, model_params, params_entries, split_param};
use crate::rekeyed::{Origin, Rekeyed, Shown};
use crate::roots::{GROUPS, MODEL, OPTIM, STATE};

/// The names of parameters as OLMo-core's `load_model_and_optim_state` takes them: the model's name
/// to the checkpoint's, both without `model.`.
pub type KeyMapping = IndexMap<String, String>;

/// A reader in which parameters have the model's names: their tensors, their optimizer state, and
/// their membership in groups, in either layout. Several parameters may map to one of the
/// checkpoint.
///
/// OLMo-core (3.0) skips entries whose name is not in the checkpoint. Here they are an error, or
/// with `lenient` returned.
///
/// # Errors
///
/// When names of the mapping are not in the checkpoint, or a mapped parameter gets another one's
/// name; the error lists all. When the checkpoint cannot be read.
pub(crate) async fn mapped(
    reader: Arc<dyn StorageReader>,
    mapping: &KeyMapping,
    lenient: bool,
) -> Result<(Arc<dyn StorageReader>, Vec<String>), CheckpointError> {
    if mapping.is_empty() {
        return Ok((reader, Vec::new()));
    }
    let metadata = reader.metadata().await?;
    let stored = model_params(&metadata);
    let (known, unknown): (Vec<_>, Vec<_>) =
        mapping.iter().partition(|(_, name)| stored.contains(name.as_str()));
    if !unknown.is_empty() && !lenient {
        let keys = unknown.iter().map(|(_, then)| (*then).clone()).collect();
        return Err(OlmoError::MappedToNothing { keys }.into());
    }
    let skipped = unknown.into_iter().map(|(now, _)| now.clone()).collect();
    let mut names: HashMap<&str, Vec<&str>> = HashMap::new();
    for (now, then) in known {
        names.entry(then).or_default().push(now);
    }
    let taken: Vec<&str> = names
        .values()
        .flatten()
        .copied()
        .filter(|now| stored.contains(now) && !names.contains_key(now))
        .collect();
    if !taken.is_empty() {
        let keys = taken.into_iter().map(ToOwned::to_owned).collect();
        return Err(OlmoError::MappedToTaken { keys }.into());
    }
    let lists = renamed_members(&reader, &metadata, &names).await?;
    let mut shown = Vec::with_capacity(metadata.len());
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let origin = match lists.get(&at) {
            Some(list) => Origin::Made(at, list.clone()),
            None => Origin::Entry(at),
        };
        match renamed(fqn, entry.path(), &names, &stored) {
            Some(all) => shown.extend(all.into_iter().map(|(fqn, path)| Shown {
                fqn,
                path,
                origin: origin.clone(),
            })),
            None => {
                let (fqn, path) = (Arc::clone(fqn), entry.path().cloned());
                shown.push(Shown { fqn, path, origin });
            }
        }
    }
    Ok((Arc::new(Rekeyed::new(reader, metadata, shown)?), skipped))
}

/// The new names and paths of an entry of a mapped parameter; `None` for other entries.
fn renamed(
    fqn: &str,
    path: Option<&StatePath>,
    names: &HashMap<&str, Vec<&str>>,
    stored: &std::collections::HashSet<&str>,
) -> Option<Vec<(Arc<str>, Option<StatePath>)>> {
    let key = |text: String| PathItem::Key(text.into());
    let with = |param: &str, make: &dyn Fn(&str) -> Vec<PathItem>| {
        let all = names.get(param)?.iter().map(|now| {
            let path = make(now);
            (PathItem::flat_name(&path).into(), Some(path.into()))
        });
        Some(all.collect())
    };
    let Some(path) = path else {
        // Without a path, only the model's tensors are certain.
        let all = names.get(fqn.strip_prefix("model.")?)?;
        return Some(all.iter().map(|now| (format!("{MODEL}.{now}").into(), None)).collect());
    };
    if let [PathItem::Key(root), PathItem::Key(param), rest @ ..] = &**path
        && &**root == MODEL
    {
        return with(param, &|now| {
            let first = [key(MODEL.to_owned()), key(now.to_owned())];
            first.into_iter().chain(rest.iter().cloned()).collect()
        });
    }
    match OptimKey::of(fqn, Some(path))? {
        OptimKey::State { param, rest } => with(param, &|now| {
            let first = [OPTIM, STATE, now].map(|text| key(text.to_owned()));
            first.into_iter().chain(rest.iter().cloned()).collect()
        }),
        OptimKey::Flat { of_groups, name, rest } => {
            let (param, field) = split_param(name, stored)?;
            let kind = if of_groups { GROUPS } else { STATE };
            with(param, &|now| {
                let first = [key(OPTIM.to_owned()), key(format!("{kind}.{now}.{field}"))];
                first.into_iter().chain(rest.iter().cloned()).collect()
            })
        }
        OptimKey::Group { .. } | OptimKey::Unknown => None,
    }
}

/// The lists of parameters of a nested optimizer under the new names, by their positions.
async fn renamed_members(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    names: &HashMap<&str, Vec<&str>>,
) -> Result<HashMap<usize, Value>, CheckpointError> {
    let entries: Vec<usize> = params_entries(metadata).map(|(_, at)| at).collect();
    let members = group_members(reader, metadata).await?;
    let lists = entries.into_iter().zip(members).map(|(at, (_, members))| {
        let renamed = members.iter().flat_map(|param| match names.get(&**param) {
            Some(all) => all.iter().map(|now| Value::from(*now)).collect(),
            None => vec![Value::from(Arc::clone(param))],
        });
        (at, Value::List(renamed.collect()))
    });
    Ok(lists.collect())
}
