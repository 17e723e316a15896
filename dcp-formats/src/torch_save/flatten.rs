//! Flattens the object of a file by PyTorch's rule (2.4 and later), on its nodes.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::FormatError;
use dcp_core::path::{PathItem, StatePath};
use dcp_core::value::python_str;
use indexmap::IndexMap;

use crate::pickle::{Converter, Limits, Node, NodeId, Pickle};
use crate::torch_tensor::makes_tensor;

/// The key of a root object that is not a dict.
pub(super) const ROOT_KEY: &str = "value";
/// The maximum nesting depth, as in the planner's flattening.
const DEPTH_MAX: usize = 512;
/// The maximum number of path steps and containers: per node or reference of the pickle, plus a
/// fixed number.
const STEPS_PER_NODE: usize = 16;
const STEPS_MIN: usize = 1 << 16;
/// The maximum total length of names in bytes: per byte of the pickle, plus a fixed number.
const NAMES_PER_BYTE: usize = 16;
const NAMES_MIN: usize = 1 << 20;
/// The maximum number of name clashes that are reported.
const NOTES_MAX: usize = 8;
/// The maximum total length of names in bytes for a pickle of any length.
const NAMES_MAX: usize = 256 << 20;
/// The maximum number of items in all flattened containers: ten times that of large checkpoints. An
/// item takes about half a KiB.
const ITEMS_MAX: usize = 1 << 21;

/// A tensor, or an object that is not flattened.
#[derive(Debug)]
pub(super) struct Leaf {
    pub(super) fqn: Arc<str>,
    pub(super) path: StatePath,
    pub(super) node: NodeId,
}

impl Leaf {
    /// A leaf below this one.
    pub(super) fn part(&self, number: u64) -> Self {
        let path: StatePath = self.path.iter().cloned().chain([PathItem::Index(number)]).collect();
        Self { fqn: PathItem::flat_name(&path).into(), path, node: self.node }
    }
}

/// The leaves of a file's object.
#[derive(Debug)]
pub(super) struct Leaves {
    pub(super) all: Vec<Leaf>,
    /// Observations about their names.
    pub(super) notes: Vec<String>,
}

/// Flattens the root, in its order.
///
/// Leaves whose paths join to the same name are named after their paths, as Python indexes:
/// `["a"]["b"]`.
///
/// Flattens every dict, including instances of `OrderedDict`, `defaultdict` and `Counter`, and
/// every list that contains a tensor or a dict at any depth of lists. Empty dicts are leaves, unlike
/// in PyTorch, where they vanish and an optimizer without state cannot be loaded again. Tuples are
/// leaves, and so is a dict with a key whose text depends on its class. A root that is not a dict is
/// the only entry, [`ROOT_KEY`].
pub(super) fn flatten(pickle: &Pickle<'_>) -> Result<Leaves, FormatError> {
    let size = pickle.node_count().saturating_add(pickle.reference_count());
    let names = pickle.byte_len().saturating_mul(NAMES_PER_BYTE).saturating_add(NAMES_MIN);
    let mut walk = Walk {
        pickle,
        path: Vec::new(),
        leaves: Vec::new(),
        surrogates: None,
        barren: HashSet::new(),
        steps_left: size.saturating_mul(STEPS_PER_NODE).saturating_add(STEPS_MIN),
        names_left: names.min(NAMES_MAX),
        keys_left: names,
        items_left: ITEMS_MAX,
    };
    walk.run()?;
    let Walk { mut leaves, surrogates, .. } = walk;
    let mut notes = clashes(&mut leaves)?;
    notes.extend(surrogates.map(|key| {
        format!(
            "the key {key:?} has half of a surrogate pair, which is not text elsewhere than in \
             Python: it is shown with an escape, and has this name wherever it is written but to \
             torch.save"
        )
    }));
    Ok(Leaves { all: leaves, notes })
}

/// Names leaves with equal names after their paths, and reports it.
fn clashes(leaves: &mut [Leaf]) -> Result<Vec<String>, FormatError> {
    let mut seen = HashSet::with_capacity(leaves.len());
    if leaves.iter().all(|leaf| seen.insert(&leaf.fqn)) {
        return Ok(Vec::new());
    }
    let mut by_name: IndexMap<Arc<str>, Vec<usize>> = IndexMap::new();
    for (at, leaf) in leaves.iter().enumerate() {
        by_name.entry(Arc::clone(&leaf.fqn)).or_default().push(at);
    }
    let mut names: HashSet<Arc<str>> = by_name.keys().cloned().collect();
    by_name.retain(|_, leaves| leaves.len() > 1);
    let mut notes = Vec::new();
    for (fqn, clashing) in by_name {
        let mut shown = Vec::new();
        for at in clashing {
            let Some(leaf) = leaves.get_mut(at) else { continue };
            let name: Arc<str> = indexed(&leaf.path).into();
            if !names.insert(Arc::clone(&name)) {
                return Err(FormatError::new(
                    "torch.save file",
                    format!("two values are named {fqn:?} once their paths are joined by dots"),
                ));
            }
            leaf.fqn = Arc::clone(&name);
            shown.push(name.to_string());
        }
        if notes.len() < NOTES_MAX {
            notes.push(format!(
                "{} would all be {fqn:?}, joined by dots, and have these names here; leave all but \
                 one out, or rename them",
                shown.join(" and ")
            ));
        }
    }
    Ok(notes)
}

/// A path in Python's index notation.
fn indexed(path: &[PathItem]) -> String {
    let step = |item: &PathItem| match item {
        PathItem::Key(key) => format!("[{key:?}]"),
        PathItem::Index(at) => format!("[{at}]"),
    };
    path.iter().map(step).collect()
}

/// The error for long keys that many dicts share.
fn shared_keys() -> FormatError {
    FormatError::new("torch.save file", "its keys are shared too often to be listed")
}

struct Walk<'p, 'a> {
    pickle: &'p Pickle<'a>,
    path: Vec<PathItem>,
    leaves: Vec<Leaf>,
    /// The first key with lone surrogates.
    surrogates: Option<Arc<str>>,
    /// Lists without tensors and dicts.
    barren: HashSet<NodeId>,
    steps_left: usize,
    names_left: usize,
    /// Bytes of keys that may still be compared.
    keys_left: usize,
    items_left: usize,
}

type Level = std::vec::IntoIter<(PathItem, NodeId)>;

impl<'p, 'a> Walk<'p, 'a> {
    fn run(&mut self) -> Result<(), FormatError> {
        let root = self.pickle.root();
        let mut levels: Vec<Level> = match self.mapping(root)? {
            Some(level) => vec![level],
            None => vec![vec![(PathItem::Key(ROOT_KEY.into()), root)].into_iter()],
        };
        while let Some(level) = levels.last_mut() {
            let Some((step, node)) = level.next() else {
                levels.pop();
                self.path.pop();
                continue;
            };
            if self.path.len() >= DEPTH_MAX {
                let problem = format!("it is nested more than {DEPTH_MAX} deep, or in itself");
                return Err(self.bad(problem));
            }
            self.path.push(step);
            match self.descend(node)?.filter(|level| !level.as_slice().is_empty()) {
                Some(level) => {
                    self.spend(1)?;
                    levels.push(level);
                }
                None => {
                    self.spend(self.path.len())?;
                    self.leaf(node)?;
                    self.path.pop();
                }
            }
        }
        Ok(())
    }

    fn spend(&mut self, steps: usize) -> Result<(), FormatError> {
        self.steps_left = self
            .steps_left
            .checked_sub(steps)
            .ok_or_else(|| self.bad("its containers are shared too often to be listed"))?;
        Ok(())
    }

    fn leaf(&mut self, node: NodeId) -> Result<(), FormatError> {
        let fqn: Arc<str> = PathItem::flat_name(&self.path).into();
        self.names_left = self.names_left.checked_sub(fqn.len()).ok_or_else(shared_keys)?;
        self.leaves.push(Leaf { fqn, path: self.path.as_slice().into(), node });
        Ok(())
    }

    fn bad(&self, problem: impl Into<String>) -> FormatError {
        let shown = PathItem::flat_name(self.path.get(..8).unwrap_or(&self.path));
        let shown: String = shown.chars().take(200).collect();
        FormatError::new("torch.save file", format!("{shown:?}: {}", problem.into()))
    }

    /// The container of a node; `None` for a leaf.
    fn descend(&mut self, node: NodeId) -> Result<Option<Level>, FormatError> {
        if let Node::List(span) = *self.pickle.node(node) {
            if !self.is_fertile(node) {
                return Ok(None);
            }
            self.count(span.len())?;
            let items = self.pickle.children(span).iter().zip(0..);
            let items = items.map(|(item, index)| (PathItem::Index(index), *item));
            return Ok(Some(items.collect::<Vec<_>>().into_iter()));
        }
        self.mapping(node)
    }

    /// The entries of a Python mapping; of equal keys the last one wins.
    fn mapping(&mut self, node: NodeId) -> Result<Option<Level>, FormatError> {
        let Some(pairs) = self.pairs(node) else { return Ok(None) };
        self.count(pairs.size_hint().0)?;
        let mut entries: IndexMap<(bool, Arc<str>), NodeId> = IndexMap::new();
        for [key, value] in pairs {
            let is_text = self.pickle.str(*key).is_some();
            let Some(text) = self.text(*key) else { return Ok(None) };
            if matches!(self.pickle.node(*key), Node::SurrogateStr(_)) {
                self.surrogates.get_or_insert_with(|| Arc::clone(&text));
            }
            self.keys_left = self.keys_left.checked_sub(text.len()).ok_or_else(shared_keys)?;
            entries.insert((is_text, text), *value);
        }
        let entries = entries.into_iter().map(|((_, key), value)| (PathItem::Key(key), value));
        Ok(Some(entries.collect::<Vec<_>>().into_iter()))
    }

    /// Counts a container's items against the limits.
    fn count(&mut self, items: usize) -> Result<(), FormatError> {
        self.items_left = self.items_left.checked_sub(items).ok_or_else(|| {
            let problem = format!(
                "the dicts and lists of it and before it have more than {ITEMS_MAX} items, which \
                 are too many to be listed; save large tables as tensors"
            );
            self.bad(problem)
        })?;
        Ok(())
    }

    /// The keys and values of a Python mapping.
    fn pairs(&self, node: NodeId) -> Option<impl Iterator<Item = &'p [NodeId; 2]> + use<'p, 'a>> {
        let pickle = self.pickle;
        let (counted, set) = match pickle.node(node) {
            Node::Dict(span) => (pickle.children(*span), &[][..]),
            Node::Object(_) => {
                let object = pickle.object(node)?;
                let set = pickle.object_entries(object);
                match pickle.global_name(object.class)? {
                    ("collections", "OrderedDict" | "defaultdict") => (&[][..], set),
                    ("collections", "Counter") => {
                        let counted = pickle.tuple(object.args).first();
                        match counted.map(|id| pickle.node(*id)) {
                            Some(Node::Dict(span)) => (pickle.children(*span), set),
                            _ => (&[][..], set),
                        }
                    }
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some(counted.as_chunks::<2>().0.iter().chain(set.as_chunks::<2>().0))
    }

    fn text(&self, key: NodeId) -> Option<Arc<str>> {
        if let Some(text) = self.pickle.str(key) {
            return Some(text.into());
        }
        // Keys are numbers, or small tuples at most.
        let limits = Limits { depth: 8, ..Limits::DEFAULT };
        let mut no_hook = ();
        let converter = Converter::new(self.pickle, &limits, &mut no_hook).with_size(16, &limits);
        python_str(&converter.convert(key).ok()?.value).map(Arc::from)
    }

    /// Whether a list contains a tensor or a dict, at any depth of lists.
    fn is_fertile(&mut self, list: NodeId) -> bool {
        let mut visited = Vec::new();
        let mut open = vec![list];
        while let Some(id) = open.pop() {
            let Node::List(span) = *self.pickle.node(id) else { continue };
            if !self.barren.insert(id) {
                continue;
            }
            visited.push(id);
            for item in self.pickle.children(span) {
                match self.pickle.node(*item) {
                    Node::List(_) => open.push(*item),
                    Node::Dict(_) => open.clear(),
                    Node::Object(_)
                        if makes_tensor(self.pickle, *item) || self.pairs(*item).is_some() =>
                    {
                        open.clear();
                    }
                    _ => continue,
                }
                if open.is_empty() {
                    // The list that led here is unknown, so all are checked again.
                    visited.iter().for_each(|id| {
                        self.barren.remove(id);
                    });
                    return true;
                }
            }
        }
        false
    }
}
