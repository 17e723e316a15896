//! The two layouts of an optimizer in OLMo-core's checkpoints, and the conversion between them.
//!
//! With `flatten_optimizer_state=False` the state dict is PyTorch's own, nested: `{"state": {FQN:
//! {field: tensor}}, "param_groups": [{field: value, "params": [FQN, …]}]}`. With `True`, the
//! trainer's default, it is flat: `{"state.FQN.field": tensor, "param_groups.FQN.field": value}`,
//! with a value for every parameter and no `params`. Flattened names of tensors are equal in both;
//! only paths show where a step ends (3.0.0).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader, Value};
use dcp_jobs::integrity::CheckedSource;
use dcp_jobs::{JobError, JobOptions, Source};
use indexmap::IndexMap;

use crate::error::OlmoError;
use crate::groups::{Setting, equal_groups, given_groups};
use crate::rekeyed::{Origin, Rekeyed, Shown};
use crate::roots::{GROUPS, MODEL, OPTIM, PARAMS, STATE};
use crate::values::read_values;

/// The maximum size of a group's setting; OLMo-core writes no larger tensor as one.
const SETTING_BYTES_MAX: u64 = 64 << 10;

/// The maximum size of a flat index in bytes, as [`NAME_BYTES`] estimates it: a fixed amount, and
/// an amount per entry of the checkpoint. AdamW's is a tenth of that.
const INDEX_BYTES_MAX: u64 = 128 << 20;
const ENTRY_BYTES_MAX: u64 = 4 << 10;
/// Bytes of a name in an index besides its text.
const NAME_BYTES: u64 = 64;

/// The division of optimizer state into keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerLayout {
    /// PyTorch's own: `flatten_optimizer_state=False`.
    Nested,
    /// By parameter: `flatten_optimizer_state=True`.
    Flat,
}

impl OptimizerLayout {
    /// The layout of a checkpoint; `None` without an optimizer.
    ///
    /// Paths decide; without paths, the presence of a list of parameters.
    #[must_use]
    pub fn of(metadata: &CheckpointMetadata) -> Option<Self> {
        let mut found = None;
        for (fqn, entry) in metadata.iter() {
            match OptimKey::of(fqn, entry.path()) {
                Some(OptimKey::Flat { .. }) => return Some(Self::Flat),
                Some(OptimKey::Unknown) => found = found.or(Some(Self::Flat)),
                Some(_) => return Some(Self::Nested),
                None => {}
            }
        }
        let listed = metadata.get(&format!("{OPTIM}.{GROUPS}.0.{PARAMS}")).is_some();
        if listed { Some(Self::Nested) } else { found }
    }
}

impl fmt::Display for OptimizerLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nested => "nested",
            Self::Flat => "flat",
        })
    }
}

/// The meaning of an entry below `optim`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OptimKey<'a> {
    /// `optim.state.FQN.field…` of the nested layout.
    State { param: &'a Arc<str>, rest: &'a [PathItem] },
    /// `optim.param_groups.N.field…` of the nested layout.
    Group { group: u64, rest: &'a [PathItem] },
    /// `optim.{state|param_groups}.FQN.field…` of the flat layout, the first steps as one.
    Flat { of_groups: bool, name: &'a str, rest: &'a [PathItem] },
    /// Without a path.
    Unknown,
}

impl<'a> OptimKey<'a> {
    pub(crate) fn of(fqn: &str, path: Option<&'a StatePath>) -> Option<Self> {
        let Some(path) = path else {
            return fqn.starts_with("optim.").then_some(Self::Unknown);
        };
        let (PathItem::Key(root), steps) = path.split_first()? else { return None };
        if &**root != OPTIM {
            return None;
        }
        let (PathItem::Key(first), rest) = steps.split_first()? else { return None };
        match (&**first, rest) {
            (STATE, [PathItem::Key(param), rest @ ..]) => Some(Self::State { param, rest }),
            (GROUPS, [PathItem::Index(group), rest @ ..]) => {
                Some(Self::Group { group: *group, rest })
            }
            (first, rest) => {
                let state = first.strip_prefix(STATE).and_then(|name| name.strip_prefix('.'));
                let group = first.strip_prefix(GROUPS).and_then(|name| name.strip_prefix('.'));
                let name = state.or(group)?;
                Some(Self::Flat { of_groups: group.is_some(), name, rest })
            }
        }
    }
}

/// The parameter and the field of a name such as `blocks.0.w.exp_avg`. Both may contain dots: a
/// known parameter decides, or else the last dot.
pub(crate) fn split_param<'n>(name: &'n str, params: &HashSet<&str>) -> Option<(&'n str, &'n str)> {
    let cuts = name.rmatch_indices('.').map(|(at, _)| (&name[..at], &name[at + 1..]));
    let mut cuts = cuts.filter(|(param, field)| !param.is_empty() && !field.is_empty());
    let last = cuts.clone().next();
    cuts.find(|(param, _)| params.contains(param)).or(last)
}

/// The parameters of the model in a checkpoint.
pub(crate) fn model_params(metadata: &CheckpointMetadata) -> HashSet<&str> {
    let names = metadata.iter().filter_map(|(fqn, entry)| match entry.path().map(|path| &**path) {
        Some([PathItem::Key(root), PathItem::Key(param)]) if &**root == MODEL => Some(&**param),
        Some(_) => None,
        None => fqn.strip_prefix("model."),
    });
    names.collect()
}

/// A reader in which the optimizer has `layout` and all else is as in `reader`. It reads nothing
/// but the small objects with the members of groups.
///
/// From flat to nested, parameters with equal settings form a group, in order of first use; the
/// original groups are not stored.
///
/// # Errors
///
/// When the checkpoint cannot be read, or its optimizer has neither layout.
pub async fn with_layout(
    reader: Arc<dyn StorageReader>,
    layout: OptimizerLayout,
) -> Result<Arc<dyn StorageReader>, CheckpointError> {
    relaid(reader, layout, None).await
}

/// Like [`with_layout`], for a job on a whole checkpoint, such as
/// [`reshard`](dcp_jobs::reshard::reshard()).
///
/// # Errors
///
/// As [`with_layout`].
pub async fn source_with_layout(
    source: &Source,
    layout: OptimizerLayout,
    job: &JobOptions,
) -> Result<Source, JobError> {
    let inner = CheckedSource::new(source, job);
    let reader = with_layout(Arc::clone(&inner.reader), layout).await?;
    Ok(Source::derived(reader, std::slice::from_ref(&inner)).unwrap_or_else(|| source.clone()))
}

/// Like [`with_layout`], with the requested groups, if known.
pub(crate) async fn relaid(
    reader: Arc<dyn StorageReader>,
    layout: OptimizerLayout,
    groups: Option<&[Vec<Arc<str>>]>,
) -> Result<Arc<dyn StorageReader>, CheckpointError> {
    let metadata = reader.metadata().await?;
    let now = OptimizerLayout::of(&metadata);
    let shown = match (now, layout) {
        (Some(OptimizerLayout::Nested), OptimizerLayout::Flat) => flat(&reader, &metadata).await?,
        (Some(OptimizerLayout::Flat), OptimizerLayout::Nested) => {
            nested(&reader, &metadata, groups).await?
        }
        _ => return Ok(reader),
    };
    Ok(Arc::new(Rekeyed::new(reader, metadata, shown)?))
}

/// Entries in three parts: before the groups, the groups, and after them.
#[derive(Default)]
struct Parts {
    before: Vec<Shown>,
    groups: Vec<Shown>,
    after: Vec<Shown>,
    in_groups: bool,
}

impl Parts {
    fn other(&mut self, shown: Shown) {
        if self.in_groups { self.after.push(shown) } else { self.before.push(shown) }
    }

    fn all(self) -> Vec<Shown> {
        let (mut all, groups, after) = (self.before, self.groups, self.after);
        all.extend(groups);
        all.extend(after);
        all
    }
}

/// The entry at a path, under its flattened name.
fn shown(path: Vec<PathItem>, origin: Origin) -> Shown {
    Shown { fqn: PathItem::flat_name(&path).into(), path: Some(path.into()), origin }
}

fn key(key: impl Into<Arc<str>>) -> PathItem {
    PathItem::Key(key.into())
}

/// Joins `first` and `rest` to the steps of the flat layout: everything down to the field is one
/// step.
fn flat_path(kind: &str, param: &str, rest: &[PathItem]) -> Option<Vec<PathItem>> {
    let (PathItem::Key(field), rest) = rest.split_first()? else { return None };
    let first = key(format!("{kind}.{param}.{field}"));
    Some([key(OPTIM), first].into_iter().chain(rest.iter().cloned()).collect())
}

async fn flat(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
) -> Result<Vec<Shown>, CheckpointError> {
    let members = group_members(reader, metadata).await?;
    // Settings by group: their paths below the group, and entries.
    let mut settings: IndexMap<u64, Vec<(&[PathItem], usize)>> = IndexMap::new();
    let mut parts = Parts::default();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let origin = Origin::Entry(at);
        let bad = || strange(fqn, OptimizerLayout::Nested);
        match OptimKey::of(fqn, entry.path()) {
            None => {
                let (fqn, path) = (Arc::clone(fqn), entry.path().cloned());
                parts.other(Shown { fqn, path, origin });
            }
            Some(OptimKey::State { param, rest }) => {
                parts.other(shown(flat_path(STATE, param, rest).ok_or_else(bad)?, origin));
            }
            Some(OptimKey::Group { group, rest }) => {
                parts.in_groups = true;
                if !is_params(rest) {
                    settings.entry(group).or_default().push((rest, at));
                }
            }
            Some(_) => return Err(bad().into()),
        }
    }
    refuse_senseless(&members, &settings, metadata)?;
    for (group, params) in &members {
        for param in params {
            for (rest, at) in settings.get(group).into_iter().flatten() {
                let path = flat_path(GROUPS, param, rest);
                let path = path.ok_or_else(|| strange(param, OptimizerLayout::Nested))?;
                parts.groups.push(shown(path, Origin::Entry(*at)));
            }
        }
    }
    Ok(parts.all())
}

/// Fails when lists name a parameter twice, or when a small file would become a huge index because
/// many parameters get many settings.
fn refuse_senseless(
    members: &[(u64, Vec<Arc<str>>)],
    settings: &IndexMap<u64, Vec<(&[PathItem], usize)>>,
    metadata: &CheckpointMetadata,
) -> Result<(), OlmoError> {
    let refused = |group: u64, problem: String| OlmoError::Optimizer {
        key: format!("{OPTIM}.{GROUPS}.{group}.{PARAMS}"),
        problem,
    };
    let entries = u64::try_from(metadata.len()).unwrap_or(u64::MAX);
    let most = ENTRY_BYTES_MAX.saturating_mul(entries).saturating_add(INDEX_BYTES_MAX);
    let (mut seen, mut bytes) = (HashSet::new(), 0_u64);
    for (group, params) in members {
        if let Some(twice) = params.iter().find(|param| !seen.insert(&***param)) {
            return Err(refused(*group, format!("it names the parameter {twice:?} once more")));
        }
        let names: u64 = params.iter().map(|param| NAME_BYTES + param.len() as u64).sum();
        for (rest, _) in settings.get(group).into_iter().flatten() {
            let below: u64 = rest.iter().map(|step| NAME_BYTES + step_len(step)).sum();
            let each = below.saturating_mul(params.len() as u64);
            bytes = bytes.saturating_add(names).saturating_add(each);
        }
        if bytes > most {
            let problem = format!(
                "its {} parameters would each get {} settings, which is more than such a \
                 checkpoint can mean",
                params.len(),
                settings.get(group).map_or(0, Vec::len)
            );
            return Err(refused(*group, problem));
        }
    }
    Ok(())
}

fn step_len(step: &PathItem) -> u64 {
    match step {
        PathItem::Key(key) => key.len() as u64,
        PathItem::Index(_) => 0,
    }
}

fn is_params(rest: &[PathItem]) -> bool {
    matches!(rest, [PathItem::Key(field)] if &**field == PARAMS)
}

fn strange(fqn: &str, layout: OptimizerLayout) -> OlmoError {
    let problem = format!("it is not a key of an optimizer of the {layout} layout");
    OlmoError::Optimizer { key: fqn.to_owned(), problem }
}

/// The parameters of every group of a nested optimizer, in the order of the groups.
pub(crate) async fn group_members(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
) -> Result<Vec<(u64, Vec<Arc<str>>)>, CheckpointError> {
    let lists: Vec<(u64, usize)> = params_entries(metadata).collect();
    let entries: Vec<usize> = lists.iter().map(|(_, at)| *at).collect();
    let values = read_values(reader, metadata, &entries).await?;
    let mut members = Vec::with_capacity(lists.len());
    for ((group, at), value) in lists.into_iter().zip(values) {
        let fqn = || metadata.entry_name(at).into_owned();
        members.push((group, names(&value).ok_or_else(|| not_names(fqn(), &value))?));
    }
    Ok(members)
}

/// The lists of parameters: group and position.
pub(crate) fn params_entries(
    metadata: &CheckpointMetadata,
) -> impl Iterator<Item = (u64, usize)> + '_ {
    metadata.iter().enumerate().filter_map(|(at, (fqn, entry))| {
        match OptimKey::of(fqn, entry.path()) {
            Some(OptimKey::Group { group, rest })
                if is_params(rest) && entry.as_object().is_some() =>
            {
                Some((group, at))
            }
            _ => None,
        }
    })
}

pub(crate) fn names(value: &Value) -> Option<Vec<Arc<str>>> {
    let Value::List(items) = value.view() else { return None };
    items.iter().map(|item| item.as_str().map(Arc::from)).collect()
}

fn not_names(fqn: String, value: &Value) -> OlmoError {
    let problem = format!("it should be a list of parameters by name, and is a {}", value.kind());
    OlmoError::Optimizer { key: fqn, problem }
}

async fn nested(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    groups: Option<&[Vec<Arc<str>>]>,
) -> Result<Vec<Shown>, CheckpointError> {
    let params = model_params(metadata);
    let mut settings: IndexMap<&str, Vec<Setting<'_>>> = IndexMap::new();
    let mut parts = Parts::default();
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        let bad = || strange(fqn, OptimizerLayout::Flat);
        match OptimKey::of(fqn, entry.path()) {
            None => {
                let (fqn, path) = (Arc::clone(fqn), entry.path().cloned());
                parts.other(Shown { fqn, path, origin: Origin::Entry(at) });
            }
            Some(OptimKey::Flat { of_groups, name, rest }) => {
                let (param, field) = split_param(name, &params).ok_or_else(bad)?;
                if of_groups {
                    parts.in_groups = true;
                    settings.entry(param).or_default().push((field, rest, at));
                } else {
                    let path = [key(OPTIM), key(STATE), key(param), key(field)];
                    let path = path.into_iter().chain(rest.iter().cloned()).collect();
                    parts.other(shown(path, Origin::Entry(at)));
                }
            }
            Some(_) => return Err(bad().into()),
        }
    }
    let values = setting_values(reader, metadata, &settings).await?;
    let groups = match groups {
        Some(groups) => given_groups(groups, &settings, &values)?,
        None => equal_groups(&settings, &values),
    };
    for (number, members) in (0_u64..).zip(&groups) {
        let group = [key(OPTIM), key(GROUPS), PathItem::Index(number)];
        let first = members.iter().find_map(|param| settings.get(&**param));
        let mut object = None;
        for (field, rest, at) in first.into_iter().flatten() {
            let path = group.iter().cloned().chain([key(*field)]).chain(rest.iter().cloned());
            parts.groups.push(shown(path.collect(), Origin::Entry(*at)));
            let is_object = metadata.at(*at).is_some_and(|(_, e)| e.as_object().is_some());
            object = object.or(Some(*at).filter(|_| is_object));
        }
        let Some(object) = object else { continue };
        let names = members.iter().map(|param| Value::from(Arc::clone(param))).collect();
        let path = group.into_iter().chain([key(PARAMS)]).collect();
        parts.groups.push(shown(path, Origin::Made(object, Value::List(names))));
    }
    Ok(parts.all())
}

/// The value of every setting, by entry.
async fn setting_values(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    settings: &IndexMap<&str, Vec<Setting<'_>>>,
) -> Result<HashMap<usize, Value>, CheckpointError> {
    let entries: Vec<usize> = settings.values().flatten().map(|(_, _, at)| *at).collect();
    for at in &entries {
        if let Some((fqn, Entry::Tensor(tensor))) = metadata.at(*at)
            && tensor.byte_len().is_none_or(|len| len > SETTING_BYTES_MAX)
        {
            let problem = "a setting of an optimizer is a large tensor".to_owned();
            return Err(OlmoError::Optimizer { key: fqn.to_string(), problem }.into());
        }
    }
    let values = read_values(reader, metadata, &entries).await?;
    Ok(entries.into_iter().zip(values).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_told_from_fields() {
        let params = HashSet::from(["a.b", "a", "w"]);
        assert_eq!(split_param("a.b.exp_avg", &params), Some(("a.b", "exp_avg")));
        assert_eq!(split_param("a.c.d", &params), Some(("a", "c.d")));
        assert_eq!(split_param("x.y.z", &params), Some(("x.y", "z")));
        assert_eq!(split_param("w", &params), None);
        assert_eq!(split_param(".w", &params), None);
        assert_eq!(split_param("w.", &params), None);
    }

    #[test]
    fn many_groups_are_found_at_once() {
        let names: Vec<String> = (0..50_000).map(|n| format!("w{n}")).collect();
        let fields = |n: usize| vec![("lr", &[][..], 2 * n), ("betas", &[][..], 2 * n + 1)];
        let settings = names.iter().enumerate().map(|(n, name)| (name.as_str(), fields(n)));
        let value = |n: usize| [Value::Float(0.5), Value::Int((n / 2) as i64)][n % 2].clone();
        let values = (0..2 * names.len()).map(|at| (at, value(at % 50_000))).collect();
        let groups = equal_groups(&settings.collect(), &values);
        assert_eq!(groups.len(), 25_000);
        assert_eq!(groups[1], [Arc::from("w1"), Arc::from("w25001")]);
    }

    #[test]
    fn parameters_times_settings_are_bounded() {
        let path = [PathItem::Key("lr".into())];
        let refused = |params: Vec<Arc<str>>, settings: usize| {
            let settings = vec![(&path[..], 0); settings];
            let metadata = CheckpointMetadata::new();
            let members = [(0, params)];
            refuse_senseless(&members, &IndexMap::from([(0, settings)]), &metadata)
        };
        let names = |count| (0..count).map(|n| Arc::from(format!("w{n}"))).collect::<Vec<_>>();
        refused(names(50_000), 10).unwrap();
        let error = refused(names(100_000), 1000).unwrap_err().to_string();
        assert!(error.contains("100000 parameters would each get 1000 settings"), "{error}");
        let long = "w".repeat(1 << 20);
        assert!(refused(vec![long.as_str().into()], 1000).is_err());
        let error = refused(vec!["w".into(); 2], 1000).unwrap_err().to_string();
        assert!(error.contains("\"w\" once more"), "{error}");
    }
}
