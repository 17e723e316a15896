//! Converts nodes to values.

use std::collections::HashMap;

use bytes::Bytes;
use dcp_core::value::{BigInt, Dict, Global, MadeBy, Object};
use dcp_core::{FormatError, Value};

use super::arena::{Construction, Node, NodeId, ObjectNode, Pickle, Span};
use super::limits::Limits;
use super::stack::surrogates_escaped;

/// The length in bytes from which a shared number counts as shared.
const LONG_NUMBER: usize = 256;

/// Converts objects that the pickle refers to but does not contain, mainly tensors.
pub trait Hook {
    /// Converts an object or persistent node. Also returns whether writing the value restores the
    /// object. `None` converts the node by its parts.
    ///
    /// # Errors
    ///
    /// When the object is damaged, which ends the conversion.
    fn object(&mut self, pickle: &Pickle<'_>, id: NodeId)
    -> Result<Option<Converted>, FormatError>;
}

/// A hook without objects.
impl Hook for () {
    fn object(&mut self, _: &Pickle<'_>, _: NodeId) -> Result<Option<Converted>, FormatError> {
        Ok(None)
    }
}

/// A converted value.
#[derive(Clone, Debug)]
pub struct Converted {
    /// The value, as far as it could be converted.
    pub value: Value,
    /// Whether writing the value restores the object. False when it contains shared or cyclic
    /// parts, instances of classes, names, or more than the limits allow. Omitted parts are a
    /// [`Value::Global`] without a module, named `<cycle>`, `<deeper>` or `<more>`.
    pub faithful: bool,
}

/// Converts nodes of one pickle to values.
///
/// `set`, `frozenset`, `complex`, `bytes` and `bytearray` have values of their own. An
/// `OrderedDict` without attributes becomes a dict and a `torch.Size` a tuple, which counts as
/// unfaithful. Instances of all other classes become [`Value::Object`].
pub struct Converter<'p, 'a> {
    pickle: &'p Pickle<'a>,
    hook: &'p mut dyn Hook,
    depth: usize,
    budget: usize,
    shared: Shared,
    faithful: bool,
    /// Containers that were visited.
    seen: HashMap<NodeId, Seen>,
    /// Values without children by node, so that shared ones stay shared.
    leaves: HashMap<NodeId, Value>,
}

/// State shared by several conversions of one pickle.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Strings, bytes and names: one value each, for all references.
    texts: HashMap<NodeId, Value>,
    /// Bytes of keys that may still be hashed: one long string can be a key of many dicts.
    keys_left: usize,
}

impl Shared {
    /// Bytes of keys to hash: per byte of the pickle, plus a fixed number.
    const KEYS_PER_BYTE: usize = 16;
    const KEYS_MIN: usize = 1 << 20;

    pub(crate) fn new(pickle: &Pickle<'_>) -> Self {
        let earned = pickle.byte_len().saturating_mul(Self::KEYS_PER_BYTE);
        Self { texts: HashMap::new(), keys_left: earned.saturating_add(Self::KEYS_MIN) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Open,
    Done,
}

impl std::fmt::Debug for Converter<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Converter").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl<'p, 'a> Converter<'p, 'a> {
    /// Creates a converter for nodes of `pickle`.
    pub fn new(pickle: &'p Pickle<'a>, limits: &Limits, hook: &'p mut dyn Hook) -> Self {
        let size = pickle.node_count().saturating_add(pickle.reference_count());
        Self {
            pickle,
            hook,
            depth: limits.depth,
            budget: size.saturating_mul(limits.values_per_node),
            shared: Shared::new(pickle),
            faithful: true,
            seen: HashMap::new(),
            leaves: HashMap::new(),
        }
    }

    /// Sets limits for a part of the pickle with `size` nodes and references.
    pub(crate) fn with_size(mut self, size: usize, limits: &Limits) -> Self {
        self.budget = size.saturating_mul(limits.values_per_node);
        self
    }

    /// Reuses the state of earlier conversions of the pickle.
    pub(crate) fn with_shared(mut self, shared: Shared) -> Self {
        self.shared = shared;
        self
    }

    /// Converts a node and everything below it.
    ///
    /// # Errors
    ///
    /// Errors of the hook.
    pub fn convert(self, id: NodeId) -> Result<Converted, FormatError> {
        self.convert_one(id).0
    }

    /// Like [`convert`](Self::convert); also returns the state for the next conversion.
    pub(crate) fn convert_one(mut self, id: NodeId) -> (Result<Converted, FormatError>, Shared) {
        let depth = self.depth;
        let value = self.value(id, depth);
        let faithful = self.faithful;
        (value.map(|value| Converted { value, faithful }), self.shared)
    }

    /// The limits keep `depth`, and so the recursion, small.
    fn value(&mut self, id: NodeId, depth: usize) -> Result<Value, FormatError> {
        let Some(budget) = self.budget.checked_sub(1) else { return Ok(self.left_out("<more>")) };
        self.budget = budget;
        Ok(match self.pickle.node(id) {
            Node::None => Value::None,
            Node::Bool(b) => Value::Bool(*b),
            Node::Int(n) => Value::Int(*n),
            Node::Float(x) => Value::Float(*x),
            Node::Global(_)
            | Node::Str(_)
            | Node::EscapedStr(_)
            | Node::EscapedBytes(_)
            | Node::SurrogateStr(_)
            | Node::Bytes(_)
            | Node::ByteArray(_)
            | Node::BigInt(_) => self.leaf(id),
            Node::Tuple(_)
            | Node::List(_)
            | Node::Dict(_)
            | Node::Set(_)
            | Node::FrozenSet(_)
            | Node::Object(_)
            | Node::Persistent(_) => self.container(id, depth)?,
        })
    }

    fn left_out(&mut self, why: &str) -> Value {
        self.faithful = false;
        Value::Global(Global::new("", why))
    }

    fn leaf(&mut self, id: NodeId) -> Value {
        let known = self.leaves.get(&id).cloned();
        let node = self.pickle.node(id);
        let again = known.is_some();
        if match node {
            Node::Global(_) | Node::SurrogateStr(_) => true,
            Node::ByteArray(_) => again,
            // Numbers are written in full each time, as Python does.
            Node::BigInt(bytes) => again && bytes.len() > LONG_NUMBER,
            _ => false,
        } {
            self.faithful = false;
        }
        if let Some(known) = known {
            return known;
        }
        let value = self.shared.texts.get(&id).cloned().unwrap_or_else(|| self.text(id));
        self.shared.texts.insert(id, value.clone());
        self.leaves.insert(id, value.clone());
        value
    }

    fn text(&self, id: NodeId) -> Value {
        match self.pickle.node(id) {
            Node::Str(text) => Value::Str((*text).into()),
            Node::EscapedStr(text) => Value::Str((&**text).into()),
            Node::EscapedBytes(bytes) => Value::Bytes(Bytes::copy_from_slice(bytes)),
            Node::SurrogateStr(bytes) => Value::Str(surrogates_escaped(bytes).into()),
            Node::Bytes(bytes) => Value::Bytes(Bytes::copy_from_slice(bytes)),
            Node::ByteArray(bytes) => Value::ByteArray(Bytes::copy_from_slice(bytes)),
            Node::BigInt(bytes) => Value::BigInt(BigInt::from_le_bytes(bytes.to_vec())),
            _ => match self.pickle.global_name(id) {
                Some((module, name)) => Value::Global(Global::new(module, name)),
                None => Value::None,
            },
        }
    }

    fn container(&mut self, id: NodeId, depth: usize) -> Result<Value, FormatError> {
        let Some(depth) = depth.checked_sub(1) else { return Ok(self.left_out("<deeper>")) };
        if let Some(value) = self.leaves.get(&id).cloned() {
            // Of the nodes that reach this line, only bytes are indistinguishable from a copy.
            self.faithful &= matches!(value, Value::Bytes(_));
            return Ok(value);
        }
        let immutable = matches!(self.pickle.node(id), Node::Tuple(_) | Node::FrozenSet(_));
        match self.seen.get(&id) {
            Some(Seen::Open) => return Ok(self.left_out("<cycle>")),
            Some(Seen::Done) if !immutable => self.faithful = false,
            _ => {}
        }
        self.seen.insert(id, Seen::Open);
        let value = match *self.pickle.node(id) {
            Node::Tuple(span) => Value::Tuple(self.values(span, depth)?),
            Node::List(span) => Value::List(self.values(span, depth)?),
            Node::Set(span) => self.set(self.pickle.children(span), depth, Value::Set)?,
            Node::FrozenSet(span) => {
                self.set(self.pickle.children(span), depth, Value::FrozenSet)?
            }
            Node::Dict(span) => {
                let entries = self.pairs(self.pickle.children(span), depth)?;
                self.dict(entries)
            }
            _ => self.object(id, depth)?,
        };
        self.seen.insert(id, Seen::Done);
        Ok(value)
    }

    fn values(&mut self, span: Span, depth: usize) -> Result<Vec<Value>, FormatError> {
        let pickle = self.pickle;
        self.each(pickle.children(span), depth)
    }

    fn each(&mut self, ids: &[NodeId], depth: usize) -> Result<Vec<Value>, FormatError> {
        let mut values = Vec::new();
        for id in ids {
            if self.budget == 0 {
                values.push(self.left_out("<more>"));
                break;
            }
            values.push(self.value(*id, depth)?);
        }
        Ok(values)
    }

    fn pairs(&mut self, ids: &[NodeId], depth: usize) -> Result<Vec<(Value, Value)>, FormatError> {
        let mut values = self.each(ids, depth)?.into_iter();
        let mut entries = Vec::with_capacity(values.len() / 2);
        while let (Some(key), Some(value)) = (values.next(), values.next()) {
            entries.push((key, value));
        }
        Ok(entries)
    }

    /// Converts a set, whose items are hashed like keys.
    fn set(
        &mut self,
        items: &[NodeId],
        depth: usize,
        set: impl FnOnce(Vec<Value>) -> Value,
    ) -> Result<Value, FormatError> {
        let items = self.each(items, depth)?;
        Ok(if self.takes_keys(items.iter()) { set(items) } else { self.left_out("<more>") })
    }

    /// Whether these keys may be hashed, given those before.
    fn takes_keys<'v>(&mut self, keys: impl Iterator<Item = &'v Value>) -> bool {
        let weight = keys.map(weight).fold(0, usize::saturating_add);
        let left = self.shared.keys_left.checked_sub(weight);
        self.shared.keys_left = left.unwrap_or(self.shared.keys_left);
        left.is_some()
    }

    /// Converts to a dict, or to its parts when keys cannot be looked up.
    fn dict(&mut self, entries: Vec<(Value, Value)>) -> Value {
        if !entries.iter().all(|(key, _)| is_plain_key(key)) {
            self.faithful = false;
            let mut object = Object::new(Global::new("builtins", "dict"), Vec::new());
            object.entries = entries;
            return Value::Object(Box::new(object));
        }
        if !self.takes_keys(entries.iter().map(|(key, _)| key)) {
            return self.left_out("<more>");
        }
        let len = entries.len();
        let dict: Dict = entries.into_iter().collect();
        self.faithful &= dict.len() == len;
        Value::Dict(dict)
    }

    fn object(&mut self, id: NodeId, depth: usize) -> Result<Value, FormatError> {
        if let Some(Converted { value, faithful }) = self.hook.object(self.pickle, id)? {
            self.faithful &= faithful;
            self.leaves.insert(id, value.clone());
            return Ok(value);
        }
        let Some(object) = self.pickle.object(id).copied() else {
            return self.persistent(id, depth);
        };
        if let Some(value) = self.known(&object, depth)? {
            if matches!(value, Value::Bytes(_) | Value::ByteArray(_)) {
                self.leaves.insert(id, value.clone());
            }
            return Ok(value);
        }
        self.faithful = false;
        let pickle = self.pickle;
        let mut args = self.each(pickle.tuple(object.args), depth)?;
        let class = match pickle.global(object.class).map(|_| self.leaf(object.class)) {
            Some(Value::Global(class)) => class,
            _ => {
                args.insert(0, self.value(object.class, depth)?);
                Global::new("", "<call>")
            }
        };
        let mut made_by = match object.construction {
            Construction::Call => MadeBy::Call,
            Construction::New => MadeBy::New,
        };
        if let Some(kwargs) = pickle.kwargs(&object) {
            args.push(self.value(kwargs, depth)?);
            made_by = MadeBy::NewWithKeywords;
        }
        let mut parts = Object::new(class, args);
        parts.made_by = made_by;
        parts.state = object.state.map(|state| self.value(state, depth)).transpose()?;
        parts.items = self.each(pickle.object_items(&object), depth)?;
        parts.entries = self.pairs(pickle.object_entries(&object), depth)?;
        Ok(Value::Object(Box::new(parts)))
    }

    fn persistent(&mut self, id: NodeId, depth: usize) -> Result<Value, FormatError> {
        self.faithful = false;
        let args = match *self.pickle.node(id) {
            Node::Persistent(pid) => vec![self.value(pid, depth)?],
            _ => Vec::new(),
        };
        let mut object = Object::new(Global::new("", "<persistent>"), args);
        object.made_by = MadeBy::Unknown;
        Ok(Value::Object(Box::new(object)))
    }

    /// Converts an instance of a class that has a value of its own.
    fn known(&mut self, object: &ObjectNode, depth: usize) -> Result<Option<Value>, FormatError> {
        let pickle = self.pickle;
        let Some(name) = pickle.global_name(object.class) else { return Ok(None) };
        let args = pickle.tuple(object.args);
        let entries = pickle.object_entries(object);
        if object.state.is_some()
            || pickle.kwargs(object).is_some()
            || !pickle.object_items(object).is_empty()
            || !(entries.is_empty() || name == ("collections", "OrderedDict"))
        {
            return Ok(None);
        }
        let list = |id: NodeId| match pickle.node(id) {
            Node::List(span) => Some(pickle.children(*span)),
            _ => None,
        };
        Ok(match (name, args) {
            (("builtins", "set"), [items]) => {
                list(*items).map(|items| self.set(items, depth, Value::Set)).transpose()?
            }
            (("builtins", "frozenset"), [items]) => {
                list(*items).map(|items| self.set(items, depth, Value::FrozenSet)).transpose()?
            }
            (("builtins", "complex"), [re, im]) => {
                let parts = pickle.float(*re).zip(pickle.float(*im));
                parts.map(|(re, im)| Value::Complex(re, im))
            }
            (("_codecs", "encode"), [_, _]) => latin1(pickle, args).map(Value::Bytes),
            (("builtins", "bytes"), []) => Some(Value::Bytes(Bytes::new())),
            (("builtins", "bytearray"), _) => bytearray(pickle, args).map(Value::ByteArray),
            (("collections", "OrderedDict"), []) => {
                self.faithful = false;
                let entries = self.pairs(entries, depth)?;
                Some(self.dict(entries))
            }
            (("torch", "Size"), [sizes]) => {
                self.faithful = false;
                Some(Value::Tuple(self.each(pickle.tuple(*sizes), depth)?))
            }
            _ => None,
        })
    }
}

/// The kinds of keys that hash reliably.
fn is_plain_key(key: &Value) -> bool {
    match key {
        Value::Tuple(items) => items.iter().all(is_plain_key),
        Value::None
        | Value::Bool(_)
        | Value::Int(_)
        | Value::BigInt(_)
        | Value::Float(_)
        | Value::Str(_)
        | Value::Bytes(_)
        | Value::Global(_) => true,
        _ => false,
    }
}

/// The number of bytes to hash of a key.
fn weight(key: &Value) -> usize {
    match key {
        Value::Str(text) => text.len(),
        Value::Bytes(bytes) => bytes.len(),
        Value::BigInt(n) => n.to_le_bytes().len(),
        Value::Global(global) => global.module.len() + global.name.len(),
        Value::Tuple(items) => items.iter().map(weight).fold(0, usize::saturating_add),
        _ => 0,
    }
}

/// The bytes in `(text, "latin1")`.
fn latin1(pickle: &Pickle<'_>, args: &[NodeId]) -> Option<Bytes> {
    let [text, encoding] = args else { return None };
    matches!(pickle.str(*encoding)?, "latin1" | "latin-1").then_some(())?;
    pickle
        .str(*text)?
        .chars()
        .map(|c| u8::try_from(c).ok())
        .collect::<Option<Vec<u8>>>()
        .map(Into::into)
}

fn bytearray(pickle: &Pickle<'_>, args: &[NodeId]) -> Option<Bytes> {
    match args {
        [] => Some(Bytes::new()),
        [bytes] => match pickle.bytes(*bytes) {
            Some(bytes) => Some(Bytes::copy_from_slice(bytes)),
            None => {
                let object = pickle.object(*bytes)?;
                let name = pickle.global_name(object.class)?;
                match (name, pickle.tuple(object.args)) {
                    (("_codecs", "encode"), args) => latin1(pickle, args),
                    (("builtins", "bytes"), []) => Some(Bytes::new()),
                    _ => None,
                }
            }
        },
        _ => latin1(pickle, args),
    }
}
