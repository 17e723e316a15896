//! Extracts dataclass instances and numbers from a pickle's nodes.

use std::cell::Cell;

use dcp_core::{Dims, FormatError};

use super::class::{Class, describe};
use crate::pickle::{Field, Node, NodeId, Pickle};

/// A pickle whose globals are classified.
#[derive(Debug)]
pub(super) struct Graph<'p, 'a> {
    pub(super) pickle: &'p Pickle<'a>,
    classes: Vec<Class>,
    /// The number of numbers and chunks that may still be read. A pickle can refer to one long list
    /// from many places; a real checkpoint does not.
    allowance: Cell<usize>,
}

/// Numbers and chunks to read per node or reference of the pickle; real ones have less than one.
const ALLOWANCE: usize = 16;
/// The number of text bytes that count as one number.
const TEXT_UNIT: usize = 16;
/// The maximum number of attributes; PyTorch's classes have fewer.
const ATTRIBUTES_MAX: usize = 64;

/// The attributes of an instance: alternating names and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes<'p> {
    entries: &'p [NodeId],
}

/// Attributes by their names, which mostly are the same nodes in all instances of a class.
#[derive(Debug)]
pub(super) struct Wanted<const N: usize> {
    names: [&'static str; N],
    nodes: [Cell<Option<NodeId>>; N],
}

impl<const N: usize> Wanted<N> {
    pub(super) fn new(names: [&'static str; N]) -> Self {
        Self { names, nodes: [const { Cell::new(None) }; N] }
    }

    /// The position of the attribute that this node names.
    fn position(&self, pickle: &Pickle<'_>, name: NodeId) -> Option<usize> {
        if let Some(known) = self.nodes.iter().position(|node| node.get() == Some(name)) {
            return Some(known);
        }
        let text = pickle.str(name)?;
        let position = self.names.iter().position(|name| *name == text)?;
        self.nodes.get(position)?.set(Some(name));
        Some(position)
    }
}

impl<'p, 'a> Graph<'p, 'a> {
    pub(super) fn new(pickle: &'p Pickle<'a>) -> Self {
        let classes =
            pickle.globals().iter().map(|global| Class::of(&global.module, &global.name)).collect();
        // A record stands for this many nodes and references, or more.
        let records = pickle.record_count().saturating_mul(12);
        let size = pickle.node_count().saturating_add(pickle.reference_count());
        let size = size.saturating_add(records);
        Self { pickle, classes, allowance: Cell::new(size.saturating_mul(ALLOWANCE)) }
    }

    /// Deducts `count` from the allowance.
    pub(super) fn spend(&self, count: usize) -> Result<(), FormatError> {
        match self.allowance.get().checked_sub(count) {
            Some(left) => {
                self.allowance.set(left);
                Ok(())
            }
            None => Err(bad("it refers to the same lists over and over")),
        }
    }

    /// The meaning of a global node.
    pub(super) fn meaning(&self, id: NodeId) -> Option<Class> {
        match self.pickle.node(id) {
            Node::Global(n) => self.classes.get(*n as usize).copied(),
            _ => None,
        }
    }

    /// The class of an object node.
    pub(super) fn class(&self, id: NodeId) -> Option<Class> {
        if let Some(record) = self.pickle.record(id) {
            return self.classes.get(record.class()).copied();
        }
        let object = self.pickle.object(id)?;
        let class = match self.pickle.global_name(object.class) {
            // Protocols 0 and 1 create instances through this function.
            Some(("copyreg", "_reconstructor")) => match self.pickle.tuple(object.args) {
                [class, base, state]
                    if self.pickle.global_name(*base) == Some(("builtins", "object"))
                        && matches!(self.pickle.node(*state), Node::None) =>
                {
                    *class
                }
                _ => object.class,
            },
            _ => object.class,
        };
        self.meaning(class)
    }

    /// The attributes of an instance of `class`.
    pub(super) fn instance(
        &self,
        id: NodeId,
        class: Class,
        what: &str,
    ) -> Result<Attributes<'p>, FormatError> {
        if self.class(id) != Some(class) {
            return Err(self.unexpected(what, id));
        }
        let state = self.pickle.object(id).and_then(|object| object.state);
        let entries = match state.map(|state| self.pickle.node(state)) {
            None | Some(Node::None) => &[],
            Some(Node::Dict(entries)) => self.pickle.children(*entries),
            Some(_) => return Err(bad(format!("{what} has no dict of attributes"))),
        };
        if entries.len() > 2 * ATTRIBUTES_MAX {
            return Err(bad(format!("{what} has more than {ATTRIBUTES_MAX} attributes")));
        }
        Ok(Attributes { entries })
    }

    /// Some attributes of an instance of a class that may have records: the first value of each.
    pub(super) fn parts<const N: usize>(
        &self,
        id: NodeId,
        class: Class,
        wanted: &Wanted<N>,
        what: impl Fn() -> String,
    ) -> Result<[Option<Field<'a>>; N], FormatError> {
        let mut parts = [None; N];
        let Some(record) = self.pickle.record(id) else {
            let attributes = self.instance(id, class, &what())?;
            for (part, name) in parts.iter_mut().zip(wanted.names) {
                *part = self.attribute(attributes, name).map(Field::Node);
            }
            return Ok(parts);
        };
        if self.classes.get(record.class()) != Some(&class) {
            return Err(self.unexpected(&what(), id));
        }
        self.pickle.each_field(record, |name, field| {
            let position = wanted.position(self.pickle, name);
            if let Some(part) = position.and_then(|position| parts.get_mut(position)) {
                part.get_or_insert(field);
            }
            // The record is read no further than to the only attribute.
            N > 1 || position.is_none()
        });
        Ok(parts)
    }

    /// Whether an attribute is missing or `None`.
    pub(super) fn is_none(&self, field: Option<Field<'_>>) -> bool {
        match field {
            None | Some(Field::None) => true,
            Some(Field::Node(id)) => matches!(self.pickle.node(id), Node::None),
            Some(_) => false,
        }
    }

    /// The value of an attribute.
    pub(super) fn attribute(&self, attributes: Attributes<'p>, name: &str) -> Option<NodeId> {
        let entries = attributes.entries.as_chunks::<2>().0;
        let found = entries.iter().find(|[key, _]| self.pickle.str(*key) == Some(name));
        found.map(|[_, value]| *value)
    }

    /// The value of a required attribute.
    pub(super) fn require(
        &self,
        attributes: Attributes<'p>,
        name: &str,
        what: &str,
    ) -> Result<NodeId, FormatError> {
        self.attribute(attributes, name).ok_or_else(|| missing(what, name))
    }

    /// The items of a dict; none for `None`.
    pub(super) fn entries(&self, id: NodeId, what: &str) -> Result<&'p [[NodeId; 2]], FormatError> {
        match self.pickle.node(id) {
            Node::Dict(span) => Ok(self.pickle.children(*span).as_chunks::<2>().0),
            Node::None => Ok(&[]),
            _ => Err(self.unexpected(what, id)),
        }
    }

    pub(super) fn str(&self, id: NodeId, what: &str) -> Result<&'p str, FormatError> {
        let text = self.pickle.str(id).ok_or_else(|| self.unexpected(what, id))?;
        self.spend(text.len() / TEXT_UNIT)?;
        Ok(text)
    }

    pub(super) fn bytes(&self, id: NodeId, what: &str) -> Result<&'p [u8], FormatError> {
        let bytes = self.pickle.bytes(id).ok_or_else(|| self.unexpected(what, id))?;
        self.spend(bytes.len() / TEXT_UNIT)?;
        Ok(bytes)
    }

    /// The text of a field, which the input has or a node.
    pub(super) fn field_str(&self, field: Field<'p>, what: &str) -> Result<&'p str, FormatError> {
        if let Field::Node(id) = field {
            return self.str(id, what);
        }
        let text = self.field_text(field).ok_or_else(|| bad(format!("{what} is not a str")))?;
        self.spend(text.len() / TEXT_UNIT)?;
        Ok(text)
    }

    /// Returns the text without a deduction from the allowance, for a field that is read again.
    pub(super) fn field_text(&self, field: Field<'p>) -> Option<&'p str> {
        match field {
            Field::Node(id) => self.pickle.str(id),
            Field::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The integer of a field.
    pub(super) fn field_int(&self, field: Field<'_>) -> Option<i64> {
        match field {
            Field::Int(n) => Some(n),
            Field::Node(id) => self.pickle.int(id),
            _ => None,
        }
    }

    pub(super) fn field_uint(&self, field: Field<'_>, what: &str) -> Result<u64, FormatError> {
        match field {
            Field::Node(id) => self.uint(id, what),
            Field::Int(n) => u64::try_from(n).map_err(|_| bad(format!("{what} is negative ({n})"))),
            _ => Err(bad(format!("{what} is no int"))),
        }
    }

    /// Appends the sizes or offsets of a field.
    pub(super) fn field_dims(
        &self,
        field: Field<'_>,
        what: &str,
        out: &mut Vec<u64>,
    ) -> Result<(), FormatError> {
        match field {
            Field::Node(id) => self.dims(id, what, out),
            Field::Size(sizes) => {
                self.spend(sizes.len)?;
                out.extend(sizes.numbers());
                Ok(())
            }
            _ => Err(bad(format!("{what} is no torch.Size"))),
        }
    }

    pub(super) fn uint(&self, id: NodeId, what: &str) -> Result<u64, FormatError> {
        match self.pickle.node(id) {
            Node::Int(n) => u64::try_from(*n).map_err(|_| bad(format!("{what} is negative ({n})"))),
            Node::BigInt(_) => Err(bad(format!("{what} exceeds 64 bits"))),
            _ => Err(self.unexpected(what, id)),
        }
    }

    /// The elements of a `torch.Size`, a tuple or a list, which loaders treat alike.
    fn sequence(&self, id: NodeId) -> Option<&'p [NodeId]> {
        match self.pickle.node(id) {
            Node::Tuple(span) | Node::List(span) => Some(self.pickle.children(*span)),
            Node::Object(_) if self.class(id) == Some(Class::Size) => {
                let object = self.pickle.object(id)?;
                let args = self.pickle.tuple(object.args);
                match (args, args.first().map(|first| self.pickle.node(*first))) {
                    ([], _) => Some(&[]),
                    ([_], Some(Node::Tuple(span) | Node::List(span))) => {
                        Some(self.pickle.children(*span))
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Appends sizes or offsets.
    pub(super) fn dims(
        &self,
        id: NodeId,
        what: &str,
        out: &mut Vec<u64>,
    ) -> Result<(), FormatError> {
        let numbers = self.sequence(id).ok_or_else(|| self.unexpected(what, id))?;
        if numbers.len() > Dims::MAX_AXES {
            let (axes, max) = (numbers.len(), Dims::MAX_AXES);
            return Err(bad(format!("{what} has {axes} axes, more than {max}")));
        }
        self.spend(numbers.len())?;
        out.reserve(numbers.len());
        for number in numbers {
            out.push(self.uint(*number, what)?);
        }
        Ok(())
    }

    /// Strides, which are signed.
    pub(super) fn strides(&self, id: NodeId) -> Option<Vec<i64>> {
        let strides = self.sequence(id).filter(|strides| strides.len() <= Dims::MAX_AXES)?;
        strides.iter().map(|stride| self.pickle.int(*stride)).collect()
    }

    pub(super) fn unexpected(&self, what: &str, id: NodeId) -> FormatError {
        bad(format!("{what} is {}", describe(self.pickle, id)))
    }
}

/// The error of an instance without an attribute.
pub(super) fn missing(what: &str, name: &str) -> FormatError {
    bad(format!("{what} has no {name:?}"))
}

pub(super) fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new("metadata", problem)
}
