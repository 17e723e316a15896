//! Replaces objects of classes that another program lacks with plain values.

use std::collections::HashSet;

use super::arena::{Construction, Node, NodeId, Pickle, Span};
use super::visitor::Visitor;

/// An object that [`replace_classes`](crate::torch_save::replace_classes) has replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplacedObject {
    /// The path of the object: keys and positions, joined by dots.
    pub path: String,
    /// Its class or its own name: `module.Name`.
    pub class: String,
    /// Whether a plain value replaces it. If not, its dict entry is removed, or it is `None`
    /// elsewhere.
    pub is_plain: bool,
}

/// The enumerations of PyTorch that are in checkpoints.
const ENUMERATIONS: &[(&str, &str)] = &[
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
];

/// A class that another one contains, which Python pickles as `getattr` of that and a name in protocols
/// before 4. `ProcessGroupState` stores four numbers.
const NESTED_CLASSES: &[((&str, &str), &str)] =
    &[(("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), "ProcessGroupState")];

/// The replacement of an object.
enum Replacement {
    /// The argument of its class, as for a member of an enumeration.
    Argument(NodeId),
    /// Nothing.
    Gone,
}

/// A node to replace: its path, and the unknown class or name.
type Unknown = (NodeId, String, String, Replacement);

impl Pickle<'_> {
    /// Replaces every object below `from` whose class or name (module, name) is not `known`.
    ///
    /// A member of an enumeration, which Python pickles as a call of its class with its value or as
    /// `getattr` of class and name, becomes that value or name. So does any object created by a
    /// call with one argument and without state. Other objects are removed: their dict entry is
    /// deleted, and elsewhere they become `None`.
    pub(crate) fn replace_classes(
        &mut self,
        from: NodeId,
        known: &dyn Fn(&str, &str) -> bool,
    ) -> Vec<ReplacedObject> {
        let mut replaced = Vec::new();
        let mut gone = HashSet::new();
        let mut seen = HashSet::new();
        // The argument that replaces its object may be or contain another object. A second
        // replacement of a node is `Gone`, so cycles end.
        loop {
            let walk = Visitor::new(self, from);
            let unknown: Vec<Unknown> = walk
                .nodes()
                .filter_map(|id| Some((id, self.replacement(id, known)?)))
                .map(|(id, (class, by))| (id, walk.path_to(self, id), class, by))
                .collect();
            // A class is a name too, but is removed with its object.
            let unknown =
                if unknown.is_empty() { self.unknown_names(&walk, known) } else { unknown };
            if unknown.is_empty() {
                break;
            }
            for (id, path, class, by) in unknown {
                let node = match by {
                    Replacement::Argument(argument) if seen.insert(id) => {
                        self.node(argument).clone()
                    }
                    _ => {
                        gone.insert(id);
                        Node::None
                    }
                };
                replaced.push(ReplacedObject { path, class, is_plain: !gone.contains(&id) });
                if let Some(place) = self.nodes.get_mut(id.index()) {
                    *place = node;
                }
            }
        }
        if !gone.is_empty() {
            let dicts: Vec<_> = Visitor::new(self, from).nodes().collect();
            for id in dicts {
                self.remove_entries(id, &gone);
            }
        }
        replaced
    }

    /// Whether `getattr` is called for nothing but known nested classes and members of known
    /// enumerations, which Python 3.11 and later pickle in this way: `getattr(MEM_FORMAT_ENCODING,
    /// "TORCH_CONTIGUOUS_FORMAT")`.
    pub(super) fn only_gets_known(&self, getattr: u32) -> bool {
        let is_it = |id: NodeId| matches!(self.node(id), Node::Global(of) if *of == getattr);
        let is_member = |name: &str| {
            let constant =
                |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
            name.starts_with(|first: char| first.is_ascii_uppercase()) && name.bytes().all(constant)
        };
        let looks_up = |args: &[NodeId]| match args {
            [class, name] => {
                let Some((class, name)) = self.global_name(*class).zip(self.str(*name)) else {
                    return false;
                };
                ENUMERATIONS.contains(&class) && is_member(name)
                    || NESTED_CLASSES.contains(&(class, name))
            }
            _ => false,
        };
        let harmless = self.objects.iter().all(|object| {
            let calls = is_it(object.class);
            let is_lookup = || {
                object.construction == Construction::Call
                    && looks_up(self.tuple(object.args))
                    && self.kwargs(object).is_none()
            };
            (!calls || is_lookup()) && !object.state.is_some_and(is_it)
        });
        harmless && !self.pool.iter().any(|id| is_it(*id)) && !is_it(self.root())
    }

    /// The class of an object to replace, and its replacement.
    fn replacement(
        &self,
        id: NodeId,
        known: &dyn Fn(&str, &str) -> bool,
    ) -> Option<(String, Replacement)> {
        let unknown = |id| self.unknown_name(id, known);
        let object = self.object(id)?;
        let args = self.tuple(object.args);
        if self.global_name(object.class) == Some(("builtins", "getattr")) {
            let [class, name] = args else { return None };
            let by = match self.str(*name) {
                Some(_) => Replacement::Argument(*name),
                None => Replacement::Gone,
            };
            return Some((unknown(*class)?, by));
        }
        let class = unknown(object.class)?;
        let bare = object.state.is_none()
            && self.kwargs(object).is_none()
            && self.object_items(object).is_empty()
            && self.object_entries(object).is_empty();
        Some(match args {
            [argument] if bare => (class, Replacement::Argument(*argument)),
            _ => (class, Replacement::Gone),
        })
    }

    fn unknown_name(&self, id: NodeId, known: &dyn Fn(&str, &str) -> bool) -> Option<String> {
        let (module, name) = self.global_name(id)?;
        (!known(module, name)).then(|| format!("{module}.{name}"))
    }

    fn unknown_names(&self, walk: &Visitor, known: &dyn Fn(&str, &str) -> bool) -> Vec<Unknown> {
        let names = walk.nodes().filter_map(|id| Some((id, self.unknown_name(id, known)?)));
        names.map(|(id, name)| (id, walk.path_to(self, id), name, Replacement::Gone)).collect()
    }

    /// Removes the entries of a dict whose key or value is `gone`.
    fn remove_entries(&mut self, id: NodeId, gone: &HashSet<NodeId>) {
        let Node::Dict(span) = self.node(id) else { return };
        let is_left = |[key, value]: &&[NodeId; 2]| !gone.contains(key) && !gone.contains(value);
        let pairs = self.children(*span).as_chunks::<2>().0;
        let left: Vec<NodeId> = pairs.iter().filter(is_left).flatten().copied().collect();
        if left.len() < span.len()
            && let Some(span) = self.extend(Span::default(), &left)
            && let Some(place) = self.nodes.get_mut(id.index())
        {
            *place = Node::Dict(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::Limits;

    fn replaced(pickle: &[u8], known: &[&str]) -> (String, Vec<(String, String, bool)>) {
        let mut pickle = Pickle::parse(pickle, &Limits::DEFAULT).unwrap();
        let is_known = |module: &str, name: &str| known.contains(&&*format!("{module}.{name}"));
        let replaced = pickle.replace_classes(pickle.root(), &is_known);
        let replaced = replaced.into_iter().map(|o| (o.path, o.class, o.is_plain)).collect();
        (show(&pickle, pickle.root()), replaced)
    }

    fn show(pickle: &Pickle<'_>, id: NodeId) -> String {
        let all =
            |ids: &[NodeId]| ids.iter().map(|id| show(pickle, *id)).collect::<Vec<_>>().join(" ");
        match pickle.node(id) {
            Node::None => "None".to_owned(),
            Node::Int(n) => n.to_string(),
            Node::Dict(span) => format!("{{{}}}", all(pickle.children(*span))),
            Node::List(span) | Node::Tuple(span) => format!("[{}]", all(pickle.children(*span))),
            Node::Global(_) => pickle.global_name(id).unwrap().1.to_owned(),
            Node::Object(_) => {
                let object = pickle.object(id).unwrap();
                format!("{}{}", show(pickle, object.class), show(pickle, object.args))
            }
            _ => pickle.str(id).unwrap().to_owned(),
        }
    }

    #[test]
    fn members_of_enumerations_become_their_values() {
        // {"a": m.E(3), "b": getattr(m.E, "x"), "c": m.K(4)}
        let pickle =
            b"(dVa\ncm\nE\n(I3\ntRsVb\ncbuiltins\ngetattr\n(cm\nE\nVx\ntRsVc\ncm\nK\n(I4\ntRs.";
        let (shown, replaced) = replaced(pickle, &["m.K", "builtins.getattr"]);
        assert_eq!(shown, "{a 3 b x c K[4]}");
        let plain = |path: &str| (path.to_owned(), "m.E".to_owned(), true);
        assert_eq!(replaced, [plain("a"), plain("b")]);
    }

    #[test]
    fn what_has_no_plain_form_is_left_out() {
        // {"a": m.E(3, 4), "b": m.f, "c": [m.f, 1], "d": 2}
        let pickle = b"(dVa\ncm\nE\n(I3\nI4\ntRsVb\ncm\nf\nsVc\n(lcm\nf\naI1\nasVd\nI2\ns.";
        let (shown, replaced) = replaced(pickle, &[]);
        assert_eq!(shown, "{c [None 1] d 2}");
        assert!(replaced.iter().all(|(_, _, is_plain)| !is_plain), "{replaced:?}");
        let classes: Vec<_> = replaced.iter().map(|(_, class, _)| class.as_str()).collect();
        assert_eq!(classes, ["m.E", "m.f"]);
    }

    #[test]
    fn objects_in_objects_end() {
        // m.A(m.A(m.A(1)))
        let pickle = b"cm\nA\n(cm\nA\n(cm\nA\n(I1\ntRtRtR.";
        let (shown, _) = replaced(pickle, &[]);
        assert!(!shown.contains('A'), "{shown}");
        // l = []; m.A(l) in l: a cycle through an argument.
        let pickle = b"(lp0\ncm\nA\n(g0\ntRa.";
        let mut parsed = Pickle::parse(pickle, &Limits::DEFAULT).unwrap();
        let root = parsed.root();
        assert_eq!(parsed.replace_classes(root, &|_, _| false).len(), 1);
    }
}
