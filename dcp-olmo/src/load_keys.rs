//! OLMo-core's `load_keys`: reads single values of a checkpoint in order.

use std::sync::Arc;

use dcp_core::path::PathItem;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, StorageReader, Value};
use dcp_jobs::JobError;
use dcp_jobs::keys::unknown_fqn;
use dcp_planner::{KeyFilter, unflatten};
use futures_core::Stream;
use futures_util::{StreamExt, stream};

use crate::values::read_values;

/// Reads `keys` in order; reads nothing of a key before its turn. A key may be
///
/// - the name of a tensor or object;
/// - a part of names that ends before a dot: `optim.state.tiny`, `model.blocks.0`, `model`. Its
///   value is everything below, nested as it was saved;
/// - an element of an object: `optim.param_groups.0.params.2`;
/// - a glob over whole names, with `*` for any text and `?` for a character: `model.*.weight`. Its
///   value is a dict by name.
///
/// Keys may repeat and contain each other. OLMo-core (3.0) supports the first form, and the second
/// only at the steps of paths; it fails on lists, repetitions, and parents before their children.
/// The storage is not listed.
///
/// # Errors
///
/// When keys match nothing, before anything is read, naming all of them; later, for a key of an
/// object that has no such element, and when the checkpoint cannot be read.
pub async fn load_keys<K: Into<String>>(
    reader: Arc<dyn StorageReader>,
    keys: impl IntoIterator<Item = K>,
) -> Result<impl Stream<Item = Result<(String, Value), CheckpointError>>, JobError> {
    let metadata = reader.metadata().await?;
    let mut wanted = Vec::new();
    let mut unknown = Vec::new();
    for key in keys {
        let key = key.into();
        match find(&metadata, &key) {
            Some(found) => wanted.push((key, found)),
            None => unknown.push(key),
        }
    }
    match &*unknown {
        [] => {}
        [one] => return Err(unknown_fqn(&metadata, one)),
        many => {
            let fqns = many.iter().map(|key| format!("{key:?}")).collect();
            return Err(JobError::UnknownFqns { fqns });
        }
    }
    Ok(stream::iter(wanted).then(move |(key, found)| {
        let (reader, metadata) = (Arc::clone(&reader), Arc::clone(&metadata));
        async move {
            let value = read(&reader, &metadata, &key, found).await?;
            Ok((key, value))
        }
    }))
}

/// The meaning of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// The entry of that name.
    Entry(usize),
    /// Everything below the key: paths and entries.
    Tree(Vec<(Vec<PathItem>, usize)>),
    /// An element of an object.
    Inside(usize, String),
    /// All matching names.
    Glob(Vec<usize>),
}

fn find(metadata: &CheckpointMetadata, key: &str) -> Option<Found> {
    if let Some(entry) = metadata.index_of(key) {
        return Some(Found::Entry(entry));
    }
    if key.contains(['*', '?']) {
        let filter = KeyFilter::any_of([key]);
        let matching = metadata.iter().enumerate();
        let matching = matching.filter(|(_, (fqn, _))| filter.selects(fqn, None));
        let all: Vec<usize> = matching.map(|(at, _)| at).collect();
        return (!all.is_empty()).then_some(Found::Glob(all));
    }
    let below = metadata.iter().enumerate().filter_map(|(at, (fqn, entry))| {
        let rest = match entry.path() {
            Some(path) => rest_of_path(path, key),
            None => Some(vec![PathItem::Key(rest_of_name(fqn, key)?.into())]),
        };
        Some((rest?, at))
    });
    let below: Vec<_> = below.collect();
    if !below.is_empty() {
        return Some(Found::Tree(below));
    }
    let (entry, rest) = key.rmatch_indices('.').find_map(|(dot, _)| {
        let at = metadata.index_of(&key[..dot])?;
        metadata.at(at)?.1.as_object()?;
        Some((at, &key[dot + 1..]))
    })?;
    Some(Found::Inside(entry, rest.to_owned()))
}

fn rest_of_name<'n>(name: &'n str, key: &str) -> Option<&'n str> {
    name.strip_prefix(key)?.strip_prefix('.')
}

/// The path below `key`, which may end at a dot within a step.
fn rest_of_path(path: &[PathItem], key: &str) -> Option<Vec<PathItem>> {
    let mut rest = key;
    for (position, step) in path.iter().enumerate() {
        let text = step.to_string();
        let below = path.get(position + 1..)?;
        if rest == text {
            return (!below.is_empty()).then(|| below.to_vec());
        }
        if let Some(after) = rest.strip_prefix(&text).and_then(|after| after.strip_prefix('.')) {
            rest = after;
            continue;
        }
        let inner = PathItem::Key(rest_of_name(&text, rest)?.into());
        return Some([&[inner], below].concat());
    }
    None
}

async fn read(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    key: &str,
    found: Found,
) -> Result<Value, CheckpointError> {
    let one = async |entry: usize| -> Result<Value, CheckpointError> {
        let mut values = read_values(reader, metadata, &[entry]).await?;
        let unread = || PlanError::unread(key, "the value");
        values.pop().ok_or_else(|| unread().into())
    };
    match found {
        Found::Entry(entry) => one(entry).await,
        Found::Inside(entry, rest) => {
            let value = one(entry).await?;
            inside(&value, &rest).cloned().ok_or_else(|| missing(key))
        }
        Found::Glob(entries) => {
            let values = read_values(reader, metadata, &entries).await?;
            let names = entries.iter().filter_map(|at| Some(Arc::clone(metadata.at(*at)?.0)));
            Ok(Value::Dict(names.zip(values).collect::<Dict>()))
        }
        Found::Tree(below) => {
            let entries: Vec<usize> = below.iter().map(|(_, at)| *at).collect();
            let values = read_values(reader, metadata, &entries).await?;
            // The value below may be a list, which a state dict cannot be.
            let root = PathItem::Key("".into());
            let leaves = below.into_iter().zip(values).map(|((path, _), value)| {
                let path: Vec<_> = std::iter::once(root.clone()).chain(path).collect();
                (path, value)
            });
            let mut tree = unflatten(leaves)?;
            tree.remove("").ok_or_else(|| missing(key))
        }
    }
}

/// The element of a value at the path `rest`; dict keys may contain dots themselves.
fn inside<'v>(value: &'v Value, rest: &str) -> Option<&'v Value> {
    match value.view() {
        Value::List(items) | Value::Tuple(items) => {
            let (index, rest) = rest.split_once('.').map_or((rest, None), |(i, r)| (i, Some(r)));
            let item = items.get(index.parse::<usize>().ok()?)?;
            rest.map_or(Some(item), |rest| inside(item, rest))
        }
        Value::Dict(dict) => dict.get(rest).or_else(|| {
            rest.match_indices('.')
                .find_map(|(dot, _)| inside(dict.get(&rest[..dot])?, &rest[dot + 1..]))
        }),
        _ => None,
    }
}

fn missing(key: &str) -> CheckpointError {
    PlanError::Missing { fqns: vec![key.to_owned()] }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_whatever_their_keys() {
        let value = Value::Dict(Dict::from([
            ("a.b", Value::List(vec![1.into(), Value::Tuple(vec![2.into()])])),
            ("c", Dict::from([("d", 3)]).into()),
        ]));
        for (rest, expected) in
            [("a.b.0", Some(1)), ("a.b.1.0", Some(2)), ("c.d", Some(3)), ("a.b.2", None)]
        {
            assert_eq!(inside(&value, rest).and_then(Value::as_int), expected, "{rest}");
        }
        assert!(inside(&value, "a").is_none() && inside(&value, "c.d.e").is_none());
    }

    #[test]
    fn a_key_may_end_within_a_step() {
        let key = |key: &str| PathItem::Key(key.into());
        let path = [key("model"), key("a.b.w"), PathItem::Index(1)];
        assert_eq!(rest_of_path(&path, "model").unwrap(), path[1..]);
        assert_eq!(rest_of_path(&path, "model.a").unwrap(), [key("b.w"), PathItem::Index(1)]);
        assert_eq!(rest_of_path(&path, "model.a.b.w").unwrap(), [PathItem::Index(1)]);
        for none in ["mod", "model.", "model.a.b.w.1", "model.b", ""] {
            assert_eq!(rest_of_path(&path, none), None, "{none}");
        }
    }
}
