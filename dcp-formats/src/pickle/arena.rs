//! The nodes of a parsed pickle, which refer to each other by number.

use std::borrow::Cow;
use std::num::NonZeroU32;

use super::memo::Memo;
use super::record::Record;

/// The number of a node in a [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(NonZeroU32);

/// A value of a pickle.
///
/// Strings and bytes borrow from the input unless the opcode escapes them. [`Pickle::str`] and
/// [`Pickle::bytes`] read both kinds.
#[derive(Clone, Debug)]
pub enum Node<'a> {
    /// `None`.
    None,
    /// A bool.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// An integer of more than 64 bits: little-endian two's complement of minimal length.
    BigInt(Box<[u8]>),
    /// A float.
    Float(f64),
    /// A string.
    Str(&'a str),
    /// A string that is stored with escapes.
    EscapedStr(Box<str>),
    /// A string with lone surrogates, in Python's `surrogatepass` form of UTF-8.
    SurrogateStr(&'a [u8]),
    /// Immutable bytes, or a Python 2 string that is not UTF-8.
    Bytes(&'a [u8]),
    /// Bytes stored with escapes.
    EscapedBytes(Box<[u8]>),
    /// A `bytearray` of protocol 5.
    ByteArray(&'a [u8]),
    /// A tuple.
    Tuple(Span),
    /// A list.
    List(Span),
    /// A dict: alternating keys and values.
    Dict(Span),
    /// A set.
    Set(Span),
    /// A frozen set.
    FrozenSet(Span),
    /// A name that Python imports. Each name is one node.
    Global(u32),
    /// An object that Python creates by a call.
    Object(u32),
    /// The object that `persistent_load` returns for this id; `torch.save` refers to storages this
    /// way.
    Persistent(NodeId),
}

/// The index of the first record among nodes, far more than a pickle's memory has room for.
pub(super) const RECORDS: usize = 1 << 31;

/// The children of a node: a range of node numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Span {
    start: u32,
    len: u32,
    capacity: u32,
}

/// A name that Python imports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GlobalName<'a> {
    /// The module, with Python 2 names mapped to Python 3's.
    pub module: Cow<'a, str>,
    /// The qualified name in the module.
    pub name: Cow<'a, str>,
}

/// The call by which Python creates an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Construction {
    /// `class(*args)`: `REDUCE`, `INST`, `OBJ`.
    Call,
    /// `class.__new__(class, *args)`: `NEWOBJ`, `NEWOBJ_EX`.
    New,
}

/// An object, by its parts.
#[derive(Clone, Copy, Debug)]
pub struct ObjectNode {
    /// The callable: nearly always a [`Node::Global`].
    pub class: NodeId,
    /// The arguments, a [`Node::Tuple`].
    pub args: NodeId,
    /// The state that `BUILD` passes to `__setstate__` or adds to the instance's dict.
    pub state: Option<NodeId>,
    /// The kind of call.
    pub construction: Construction,
    /// The number of its rare parts, from 1.
    pub(super) rare: Option<NonZeroU32>,
}

/// Parts that few objects have.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rare {
    pub(super) kwargs: Option<NodeId>,
    pub(super) items: Span,
    pub(super) entries: Span,
}

/// A parsed pickle: an arena of nodes, and the node that is its result.
#[derive(Debug)]
pub struct Pickle<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) pool: Vec<NodeId>,
    pub(super) globals: Vec<GlobalName<'a>>,
    pub(super) objects: Vec<ObjectNode>,
    pub(super) rare: Vec<Rare>,
    pub(super) root: NodeId,
    pub(super) byte_len: usize,
    pub(super) protocol: u8,
    /// The bytes that records refer to; both are empty without records.
    pub(super) input: &'a [u8],
    pub(super) memo: Memo,
    /// The number of `torch.Size` among the globals.
    pub(super) size_class: Option<u32>,
    /// Instances whose attributes stay encoded, numbered from [`RECORDS`] on.
    pub(super) records: Vec<Record>,
}

impl NodeId {
    /// The node of `None`, which every pickle has.
    pub(super) const NONE: Self = Self(NonZeroU32::MIN);

    pub(crate) fn from_index(index: usize) -> Option<Self> {
        u32::try_from(index).ok()?.checked_add(1).and_then(NonZeroU32::new).map(Self)
    }

    pub(super) fn number(self) -> NonZeroU32 {
        self.0
    }

    /// A number from 0 to below [`Pickle::node_count`], for tables indexed by node; that of a record
    /// is larger.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl Span {
    /// The number of children; a dict has two per entry.
    #[must_use]
    pub fn len(self) -> usize {
        self.len as usize
    }

    /// Whether there are no children.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

impl<'a> Pickle<'a> {
    /// The result: the top of the stack at `STOP`.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// The length of the pickle in the input, including `STOP`.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// The declared protocol; 0 if none is declared.
    #[must_use]
    pub fn protocol(&self) -> u8 {
        self.protocol
    }

    /// The number of nodes.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// The number of references from node to node.
    #[must_use]
    pub fn reference_count(&self) -> usize {
        self.pool.len()
    }

    /// The number of records.
    pub(crate) fn record_count(&self) -> usize {
        self.records.len()
    }

    /// A node. Returns Python's `None` for a number of another pickle, and an object without parts
    /// for a record.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node<'a> {
        match self.nodes.get(id.index()) {
            Some(node) => node,
            None if id.index() >= RECORDS => &Node::Object(u32::MAX),
            None => &Node::None,
        }
    }

    /// The children of a node.
    #[must_use]
    pub fn children(&self, span: Span) -> &[NodeId] {
        let start = span.start as usize;
        self.pool.get(start..start + span.len as usize).unwrap_or_default()
    }

    /// The keys and values of a dict.
    pub fn entries(&self, span: Span) -> impl ExactSizeIterator<Item = (NodeId, NodeId)> {
        self.children(span).as_chunks::<2>().0.iter().map(|[key, value]| (*key, *value))
    }

    /// All distinct names that Python imports.
    #[must_use]
    pub fn globals(&self) -> &[GlobalName<'a>] {
        &self.globals
    }

    /// The name, if the node is a global.
    #[must_use]
    pub fn global(&self, id: NodeId) -> Option<&GlobalName<'a>> {
        match self.node(id) {
            Node::Global(n) => self.globals.get(*n as usize),
            _ => None,
        }
    }

    /// Module and name, if the node is a global.
    #[must_use]
    pub fn global_name(&self, id: NodeId) -> Option<(&str, &str)> {
        self.global(id).map(|global| (&*global.module, &*global.name))
    }

    /// The parts of an object node.
    #[must_use]
    pub fn object(&self, id: NodeId) -> Option<&ObjectNode> {
        match self.node(id) {
            Node::Object(n) => self.objects.get(*n as usize),
            _ => None,
        }
    }

    /// The items of a tuple node; none for other nodes.
    #[must_use]
    pub fn tuple(&self, id: NodeId) -> &[NodeId] {
        match self.node(id) {
            Node::Tuple(span) => self.children(*span),
            _ => &[],
        }
    }

    /// The text of a string node.
    #[must_use]
    pub fn str(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Str(text) => Some(text),
            Node::EscapedStr(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes of a bytes node.
    #[must_use]
    pub fn bytes(&self, id: NodeId) -> Option<&[u8]> {
        match self.node(id) {
            Node::Bytes(bytes) => Some(bytes),
            Node::EscapedBytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The value of an integer node of up to 64 bits.
    #[must_use]
    pub fn int(&self, id: NodeId) -> Option<i64> {
        match self.node(id) {
            Node::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// The value of a float node.
    #[must_use]
    pub fn float(&self, id: NodeId) -> Option<f64> {
        match self.node(id) {
            Node::Float(x) => Some(*x),
            _ => None,
        }
    }

    /// The keyword arguments of an object, a dict node.
    #[must_use]
    pub fn kwargs(&self, object: &ObjectNode) -> Option<NodeId> {
        self.rare_of(object).kwargs
    }

    /// The items that Python appends to an object.
    #[must_use]
    pub fn object_items(&self, object: &ObjectNode) -> &[NodeId] {
        self.children(self.rare_of(object).items)
    }

    /// The entries that Python sets in an object: alternating keys and values.
    #[must_use]
    pub fn object_entries(&self, object: &ObjectNode) -> &[NodeId] {
        self.children(self.rare_of(object).entries)
    }

    /// Appends every node that this one refers to.
    pub(crate) fn push_references(&self, id: NodeId, found: &mut Vec<NodeId>) {
        match self.node(id) {
            Node::Tuple(span)
            | Node::List(span)
            | Node::Dict(span)
            | Node::Set(span)
            | Node::FrozenSet(span) => found.extend_from_slice(self.children(*span)),
            Node::Persistent(id) => found.push(*id),
            Node::Object(_) => {
                if let Some(object) = self.object(id) {
                    found.extend([object.class, object.args]);
                    found.extend(object.state);
                    found.extend(self.kwargs(object));
                    found.extend_from_slice(self.object_items(object));
                    found.extend_from_slice(self.object_entries(object));
                }
            }
            _ => {}
        }
    }

    fn rare_of(&self, object: &ObjectNode) -> Rare {
        let index = object.rare.map(|rare| rare.get() as usize - 1);
        index.and_then(|index| self.rare.get(index)).copied().unwrap_or_default()
    }

    /// Appends children to a span. If something follows the span, it moves to the end of the pool;
    /// doubling bounds the cost of moves.
    ///
    /// Returns `None` when the pool is full.
    pub(super) fn extend(&mut self, span: Span, children: &[NodeId]) -> Option<Span> {
        let len = u32::try_from(children.len()).ok()?.checked_add(span.len)?;
        let used = span.start as usize + span.len as usize;
        if len <= span.capacity {
            let room = self.pool.get_mut(used..used + children.len())?;
            room.copy_from_slice(children);
            return Some(Span { len, ..span });
        }
        if span.start as usize + span.capacity as usize == self.pool.len() {
            self.pool.truncate(used);
            self.pool.extend_from_slice(children);
            u32::try_from(self.pool.len()).ok()?;
            return Some(Span { start: span.start, len, capacity: len });
        }
        let start = u32::try_from(self.pool.len()).ok()?;
        let capacity = if span.len == 0 { len } else { len.checked_mul(2)? };
        let end = u32::try_from(self.pool.len() + capacity as usize).ok()?;
        self.pool.extend_from_within(span.start as usize..used);
        self.pool.extend_from_slice(children);
        self.pool.resize(end as usize, NodeId::NONE);
        Some(Span { start, len, capacity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_compact() {
        assert!(size_of::<Node<'_>>() <= 24);
        assert!(size_of::<ObjectNode>() <= 20);
        assert_eq!(size_of::<Option<NodeId>>(), 4);
    }
}
