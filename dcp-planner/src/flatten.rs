//! State dicts as flat lists of leaves, by PyTorch's rules.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::error::StateProblem;
use dcp_core::path::{PathItem, StatePath};
use dcp_core::plan::{LeafKind, StateIndex, StateLeaf};
use dcp_core::value::python_str;
use dcp_core::{CheckpointMetadata, PlanError, StateDict, Tensor, Value};

/// Containers within containers that are still descended; CPython's own limit on recursion stops
/// PyTorch at about as many.
pub(crate) const MAX_DEPTH: usize = 512;

/// The rule by which containers become part of the names, or stay one value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FlattenRule {
    /// PyTorch 2.4 and later: every dict is descended, and every list that holds, at any depth of
    /// lists, a tensor or a dict. Empty dicts vanish. Everything else is a leaf, tuples of
    /// tensors included.
    #[default]
    Torch24,
    /// PyTorch 2.0 to 2.3: dicts and lists are descended only when they hold a tensor at some
    /// depth, so `{"lr": 0.1}` is one object.
    Torch20,
    /// `flatten_state_dict=False`: the entries of the top level, which have no path.
    TopLevel,
}

/// A leaf of a flattened state dict.
#[derive(Clone, Debug)]
pub struct FlatEntry<'a> {
    /// The flat name: the steps of the path, joined by dots without any escape.
    pub fqn: Arc<str>,
    /// The steps; `None` under [`FlattenRule::TopLevel`].
    pub path: Option<StatePath>,
    /// The leaf.
    pub value: &'a Value,
}

/// The leaves of a state dict in its order.
///
/// Keys of dicts become text as Python's `str()` prints them. Instances of `OrderedDict`,
/// `defaultdict` and `Counter` are dicts; a [`Value::Opaque`] is a leaf whatever it shows.
///
/// # Errors
///
/// [`StateProblem::Duplicate`] when two leaves get the same name, and
/// [`StateProblem::UnnamedKey`] for keys that have no text of their own, and
/// [`StateProblem::TooDeep`] for containers nested more than 512 deep.
pub fn flatten(state: &StateDict, rule: FlattenRule) -> Result<Vec<FlatEntry<'_>>, PlanError> {
    let mut walk = Walk { rule, path: Vec::new(), leaves: Vec::new() };
    walk.run(state)?;
    let mut seen = HashSet::with_capacity(walk.leaves.len());
    for leaf in &walk.leaves {
        if !seen.insert(&*leaf.fqn) {
            return Err(StateProblem::Duplicate.of(leaf.fqn.to_string()));
        }
    }
    drop(seen);
    Ok(walk.leaves)
}

/// Describes flat leaves to planners. `object_len` says how many bytes an object has when
/// encoded; it is called once for each leaf that is no tensor, in order.
///
/// # Errors
///
/// The first error of `object_len`.
pub fn index_of<E>(
    entries: &[FlatEntry<'_>],
    mut object_len: impl FnMut(&str, &Value) -> Result<u64, E>,
) -> Result<StateIndex, E> {
    let leaves = entries
        .iter()
        .map(|entry| {
            let kind = match entry.value {
                Value::Tensor(tensor) => tensor_kind(tensor),
                object => LeafKind::Object { byte_len: object_len(&entry.fqn, object)? },
            };
            Ok(StateLeaf { fqn: Arc::clone(&entry.fqn), path: entry.path.clone(), kind })
        })
        .collect::<Result<_, E>>()?;
    Ok(StateIndex { leaves })
}

pub(crate) fn tensor_kind(tensor: &Tensor) -> LeafKind {
    LeafKind::Tensor {
        dtype: tensor.dtype(),
        shape: tensor.shape().clone(),
        sharded: tensor.is_sharded(),
        regions: tensor.shards().iter().map(|shard| shard.region().clone()).collect(),
    }
}

/// The rule by which a state dict has to be flattened to meet the names of a checkpoint.
///
/// PyTorch 2.5 and later do the same on every load: the old rule is used for the whole load as
/// soon as it produces a name that the checkpoint has and the present rule does not produce.
///
/// # Errors
///
/// As [`flatten`].
pub fn choose_rule(
    state: &StateDict,
    stored: &CheckpointMetadata,
) -> Result<FlattenRule, PlanError> {
    let present = flatten(state, FlattenRule::Torch24)?;
    let present: HashSet<&str> = present.iter().map(|leaf| &*leaf.fqn).collect();
    if stored.iter().all(|(fqn, _)| present.contains(&**fqn)) {
        return Ok(FlattenRule::Torch24);
    }
    // Names that clash under the old rule alone are no reason to refuse the present one.
    let Ok(old) = flatten(state, FlattenRule::Torch20) else { return Ok(FlattenRule::Torch24) };
    let met =
        old.iter().any(|leaf| !present.contains(&*leaf.fqn) && stored.get(&leaf.fqn).is_some());
    Ok(if met { FlattenRule::Torch20 } else { FlattenRule::Torch24 })
}

/// The entries of a value that Python would call a mapping.
pub(crate) fn mapping(value: &Value) -> Option<Mapping<'_>> {
    match value {
        Value::Dict(dict) => Some(Box::new(dict.iter())),
        Value::Object(object) if &*object.class.module == "collections" => {
            match &*object.class.name {
                "OrderedDict" | "defaultdict" => {
                    Some(Box::new(object.entries.iter().map(|(key, value)| (key, value))))
                }
                "Counter" => {
                    let counted = object.args.iter().filter_map(Value::as_dict);
                    let set = object.entries.iter().map(|(key, value)| (key, value));
                    Some(Box::new(counted.flat_map(|dict| dict.iter()).chain(set)))
                }
                _ => None,
            }
        }
        _ => None,
    }
}

pub(crate) type Mapping<'a> = Box<dyn Iterator<Item = (&'a Value, &'a Value)> + 'a>;

/// The way through a state dict, on a stack of its own: hostile nesting must not use up the
/// thread's.
struct Walk<'a> {
    rule: FlattenRule,
    path: Vec<PathItem>,
    leaves: Vec<FlatEntry<'a>>,
}

/// The entries of a container that are still to be visited.
enum Level<'a> {
    Mapping(Mapping<'a>),
    List(std::iter::Enumerate<std::slice::Iter<'a, Value>>),
}

impl<'a> Walk<'a> {
    fn run(&mut self, state: &'a StateDict) -> Result<(), PlanError> {
        let mut levels = vec![Level::Mapping(Box::new(state.iter()))];
        while let Some(level) = levels.last_mut() {
            let next = match level {
                Level::Mapping(entries) => match entries.next() {
                    Some((key, value)) => Some((self.step(key)?, value)),
                    None => None,
                },
                Level::List(items) => {
                    items.next().map(|(index, item)| (PathItem::Index(index as u64), item))
                }
            };
            let Some((step, value)) = next else {
                levels.pop();
                self.path.pop();
                continue;
            };
            if self.path.len() >= MAX_DEPTH {
                return Err(self.too_deep());
            }
            self.path.push(step);
            match self.descend(value)? {
                Some(level) => levels.push(level),
                None => {
                    let nested = self.rule != FlattenRule::TopLevel;
                    let path = nested.then(|| self.path.as_slice().into());
                    self.leaves.push(FlatEntry {
                        fqn: PathItem::flat_name(&self.path).into(),
                        path,
                        value,
                    });
                    self.path.pop();
                }
            }
        }
        Ok(())
    }

    fn step(&self, key: &Value) -> Result<PathItem, PlanError> {
        let text = python_str(key).ok_or_else(|| {
            StateProblem::UnnamedKey { kind: key.kind().to_owned() }.of(self.shown_path())
        })?;
        Ok(PathItem::Key(text.into()))
    }

    /// The container that `value` is, unless it is a leaf.
    fn descend(&self, value: &'a Value) -> Result<Option<Level<'a>>, PlanError> {
        let descended = match self.rule {
            FlattenRule::TopLevel => false,
            FlattenRule::Torch24 if mapping(value).is_some() => true,
            FlattenRule::Torch24 | FlattenRule::Torch20 => {
                is_not_terminal(value, self.rule).ok_or_else(|| self.too_deep())?
            }
        };
        Ok(match value {
            _ if !descended => None,
            Value::List(items) => Some(Level::List(items.iter().enumerate())),
            _ => mapping(value).map(Level::Mapping),
        })
    }

    fn too_deep(&self) -> PlanError {
        StateProblem::TooDeep { limit: MAX_DEPTH }.of(self.shown_path())
    }

    /// The first steps of the path: the name of something nested too deep would fill the screen.
    fn shown_path(&self) -> String {
        let shown = self.path.get(..16).unwrap_or(&self.path);
        let mut fqn = PathItem::flat_name(shown);
        if shown.len() < self.path.len() {
            fqn.push_str(".…");
        }
        fqn
    }
}

/// PyTorch's test of what is no terminal; `None` for nesting beyond the limit.
fn is_not_terminal(value: &Value, rule: FlattenRule) -> Option<bool> {
    let mut levels = Vec::from_iter(inside(value, rule));
    while let Some(level) = levels.last_mut() {
        let Some(item) = level.next() else {
            levels.pop();
            continue;
        };
        let is_dict = || rule == FlattenRule::Torch24 && mapping(item).is_some();
        if matches!(item, Value::Tensor(_)) || is_dict() {
            return Some(true);
        }
        if levels.len() > MAX_DEPTH {
            return None;
        }
        levels.extend(inside(item, rule));
    }
    Some(false)
}

/// The values that the test of [`is_not_terminal`] walks.
fn inside(value: &Value, rule: FlattenRule) -> Option<Box<dyn Iterator<Item = &Value> + '_>> {
    match value {
        Value::List(items) => Some(Box::new(items.iter())),
        _ if rule == FlattenRule::Torch20 => {
            Some(Box::new(mapping(value)?.map(|(_, value)| value)))
        }
        _ => None,
    }
}
