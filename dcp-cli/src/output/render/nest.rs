//! Flat names as a tree.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use dcp::jobs::inspect::{KeySummary, Summary};

/// Names inside each other; what is deeper stays one name. No model is that deep, but a hostile
/// file may be.
const DEPTH_MAX: usize = 64;

/// A name, and the names below it.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) children: Vec<Node>,
    /// The position of the key of just this name.
    pub(crate) key: Option<usize>,
    /// Bytes of all tensors here and below.
    pub(crate) bytes: u64,
    /// Equal for nodes that hold the same kinds of things under the same names, their own names
    /// apart.
    likeness: u64,
}

/// Nests the keys as the state dict was nested, and dotted names of modules within.
pub(crate) fn nest(summary: &Summary) -> Node {
    let mut root = Builder::default();
    for (index, (fqn, _)) in summary.keys.iter().enumerate() {
        let steps: Vec<&str> = match summary.paths.get(fqn) {
            Some(path) => path.iter().flat_map(|step| split(step)).collect(),
            None => split(fqn),
        };
        let (nested, rest) = steps.split_at(steps.len().min(DEPTH_MAX));
        let mut at = &mut root;
        for step in nested {
            at = at.child(step);
        }
        if !rest.is_empty() {
            at = at.child(&rest.join("."));
        }
        at.keys.push(index);
    }
    root.finish(String::new(), summary)
}

/// The parts between dots, if none is empty.
fn split(name: &str) -> Vec<&str> {
    let parts: Vec<_> = name.split('.').collect();
    if parts.iter().any(|part| part.is_empty()) { vec![name] } else { parts }
}

#[derive(Default)]
struct Builder {
    children: Vec<(String, Builder)>,
    places: HashMap<String, usize>,
    /// Different paths can have the same steps (`a.b` under nothing, `b` under `a`).
    keys: Vec<usize>,
}

impl Builder {
    fn child(&mut self, name: &str) -> &mut Self {
        let place = match self.places.get(name) {
            Some(place) => *place,
            None => {
                self.places.insert(name.to_owned(), self.children.len());
                self.children.push((name.to_owned(), Self::default()));
                self.children.len() - 1
            }
        };
        &mut self.children[place].1
    }

    fn finish(self, name: String, summary: &Summary) -> Node {
        let mut children: Vec<Node> =
            self.children.into_iter().map(|(name, child)| child.finish(name, summary)).collect();
        // Formats that sort by name put layer 10 before layer 2.
        if children.iter().all(Node::is_numbered) {
            children.sort_by_key(Node::number);
        }
        let mut keys = self.keys.into_iter();
        let mut key = keys.next();
        if !children.is_empty() || keys.len() > 0 {
            // A key with others below it is a line of its own. Of several in one place, only their
            // full names are unambiguous.
            let several = keys.len() > 0;
            let name = |key: usize| match summary.keys.get_index(key) {
                Some((fqn, _)) if several => fqn.to_string(),
                _ => String::new(),
            };
            let own = key.take().into_iter().chain(keys);
            let own: Vec<Node> = own.map(|key| leaf(name(key), key, summary)).collect();
            children.splice(0..0, own);
        }
        match key {
            Some(key) => leaf(name, key, summary),
            None => {
                let mut hasher = DefaultHasher::new();
                for child in &children {
                    (&child.name, child.likeness).hash(&mut hasher);
                }
                let bytes = children.iter().fold(0, |sum: u64, c| sum.saturating_add(c.bytes));
                Node { name, children, key: None, bytes, likeness: hasher.finish() }
            }
        }
    }
}

fn leaf(name: String, key: usize, summary: &Summary) -> Node {
    let mut hasher = DefaultHasher::new();
    let mut bytes = 0;
    match summary.keys.get_index(key).map(|(_, key)| key) {
        Some(KeySummary::Tensor(tensor)) => {
            bytes = tensor.bytes;
            (tensor.dtype, &tensor.shape, tensor.chunks.len()).hash(&mut hasher);
        }
        Some(KeySummary::Object { value }) => value.to_string().hash(&mut hasher),
        _ => {}
    }
    Node { name, children: Vec::new(), key: Some(key), bytes, likeness: hasher.finish() }
}

impl Node {
    /// Whether the name is a number, as of a layer.
    pub(crate) fn is_numbered(&self) -> bool {
        self.number().is_some()
    }

    fn number(&self) -> Option<u64> {
        self.name.parse().ok()
    }

    /// Whether this is the layer after `before`, and just like it.
    pub(crate) fn follows(&self, before: &Node) -> bool {
        let next = before.number().and_then(|number| number.checked_add(1));
        next.is_some() && self.number() == next && self.likeness == before.likeness
    }
}
