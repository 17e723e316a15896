//! Visits every node of a pickle, with the path to it.

use std::collections::VecDeque;

use super::arena::{Node, NodeId, Pickle};

/// The maximum length of a stored path, in bytes.
const PATH_MAX: usize = 256;

/// Every node below a root, nearest first. Shared nodes are visited once; cycles end.
pub(super) struct Visitor {
    root: NodeId,
    order: Vec<NodeId>,
    /// The first reference to each node.
    reached: Vec<Option<(NodeId, Step)>>,
}

/// A reference from one node to another.
#[derive(Clone, Copy)]
enum Step {
    /// A part without a name.
    Part,
    Key(NodeId),
    Index(usize),
}

impl Visitor {
    pub(super) fn new(pickle: &Pickle<'_>, root: NodeId) -> Self {
        let mut walk = Self { root, order: Vec::new(), reached: vec![None; pickle.node_count()] };
        let mut open = VecDeque::from([(root, root, Step::Part)]);
        while let Some((id, from, step)) = open.pop_front() {
            let Some(place @ None) = walk.reached.get_mut(id.index()) else { continue };
            *place = Some((from, step));
            walk.order.push(id);
            push_parts(pickle, id, &mut open);
        }
        walk
    }

    /// The nodes, the root first.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.order.iter().copied()
    }

    /// The path to a node: keys and positions, joined by dots. A long path keeps its innermost
    /// steps.
    pub(super) fn path_to(&self, pickle: &Pickle<'_>, mut id: NodeId) -> String {
        let mut path = String::new();
        while id != self.root
            && let Some(Some((from, step))) = self.reached.get(id.index())
        {
            let step = match step {
                Step::Part => None,
                Step::Index(at) => Some(at.to_string()),
                Step::Key(key) => Some(match (pickle.str(*key), pickle.int(*key)) {
                    (Some(text), _) => text.chars().take(PATH_MAX).collect(),
                    (None, Some(number)) => number.to_string(),
                    (None, None) => "?".to_owned(),
                }),
            };
            if let Some(step) = step {
                if step.len() + path.len() > PATH_MAX {
                    return format!("….{path}");
                }
                path = if path.is_empty() { step } else { format!("{step}.{path}") };
            }
            id = *from;
        }
        path
    }
}

fn push_parts(pickle: &Pickle<'_>, id: NodeId, open: &mut VecDeque<(NodeId, NodeId, Step)>) {
    match pickle.node(id) {
        Node::Dict(span) => push_pairs(id, pickle.children(*span), open),
        Node::Tuple(span) | Node::List(span) | Node::Set(span) | Node::FrozenSet(span) => {
            push_items(id, pickle.children(*span), open);
        }
        Node::Persistent(inner) => open.push_back((*inner, id, Step::Part)),
        Node::Object(_) => {
            let Some(object) = pickle.object(id) else { return };
            let parts = [object.class, object.args].into_iter().chain(object.state);
            let parts = parts.chain(pickle.kwargs(object));
            open.extend(parts.map(|part| (part, id, Step::Part)));
            push_items(id, pickle.object_items(object), open);
            push_pairs(id, pickle.object_entries(object), open);
        }
        _ => {}
    }
}

fn push_items(id: NodeId, items: &[NodeId], open: &mut VecDeque<(NodeId, NodeId, Step)>) {
    open.extend(items.iter().enumerate().map(|(at, item)| (*item, id, Step::Index(at))));
}

fn push_pairs(id: NodeId, pairs: &[NodeId], open: &mut VecDeque<(NodeId, NodeId, Step)>) {
    for [key, value] in pairs.as_chunks::<2>().0 {
        open.push_back((*key, id, Step::Part));
        open.push_back((*value, id, Step::Key(*key)));
    }
}
