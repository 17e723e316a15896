//! Copies nodes of one pickle into another.

use std::collections::HashMap;

use dcp_core::FormatError;
use dcp_core::value::BigInt;

use super::arena::{Construction, Node, NodeId, ObjectNode, Pickle};
use super::opcode as op;
use super::writer::{BATCH, Writer};

/// Writes what a copied part of a pickle refers to but does not contain.
pub trait PersistentSink {
    /// Writes the object of the persistent node `id` of `pickle`, as one value.
    ///
    /// # Errors
    ///
    /// When the new pickle cannot contain it.
    fn persistent(
        &mut self,
        writer: &mut Writer,
        pickle: &Pickle<'_>,
        id: NodeId,
    ) -> Result<(), FormatError>;
}

impl Writer {
    /// Copies the node `root` of a parsed pickle and everything below it: objects of any class by
    /// their parts, shared nodes once, cycles included.
    ///
    /// Writes what protocol 2 has no opcode for as CPython does (sets, bytes). Only calls with
    /// keyword arguments keep an opcode of protocol 4, which every Python 3 reads. There is no
    /// recursion, so any nesting depth works.
    ///
    /// # Errors
    ///
    /// Errors of `sink`; when a class has a line break in its name, or an object is an argument of
    /// its own construction, which no Python program can create.
    pub fn graph(
        &mut self,
        pickle: &Pickle<'_>,
        root: NodeId,
        sink: &mut dyn PersistentSink,
    ) -> Result<(), FormatError> {
        let mut rewrite = Rewrite {
            writer: self,
            pickle,
            memo: HashMap::new(),
            entered: HashMap::new(),
            steps: vec![Step::Value(root)],
        };
        while let Some(step) = rewrite.steps.pop() {
            rewrite.take(step, sink)?;
        }
        Ok(())
    }
}

/// The state of copying a part of a pickle.
struct Rewrite<'w, 'p, 'a> {
    writer: &'w mut Writer,
    pickle: &'p Pickle<'a>,
    /// Nodes in the new memo, by memo index.
    memo: HashMap<NodeId, u32>,
    /// The number of times a node was begun that is memoized only when complete.
    entered: HashMap<NodeId, u8>,
    /// The remaining steps; the next one is last.
    steps: Vec<Step<'p>>,
}

/// A step.
#[derive(Clone, Copy)]
enum Step<'p> {
    Value(NodeId),
    /// Ends a tuple of this many values.
    Tuple(NodeId, usize),
    /// Ends a set of the class below; the list of its items is on top.
    Set(NodeId),
    /// Calls the class with the arguments on top of the stack.
    Construct(NodeId, ObjectNode),
    /// Adds values to the container on top.
    Fill(Fill<'p>),
    /// Writes one opcode.
    Opcode(u8),
}

/// The items or entries to add to a container, in batches.
#[derive(Clone, Copy)]
struct Fill<'p> {
    rest: &'p [NodeId],
    /// Whether the items are alternating keys and values.
    pairs: bool,
    /// Whether it is a `list` or `dict` itself, which CPython batches differently from subclasses.
    exact: bool,
    /// Whether this is the first batch.
    first: bool,
}

impl<'p> Rewrite<'_, 'p, '_> {
    fn take(&mut self, step: Step<'p>, sink: &mut dyn PersistentSink) -> Result<(), FormatError> {
        match step {
            Step::Value(id) => return self.value(id, sink),
            Step::Tuple(id, len) => match self.memo.get(&id) {
                // An item of the tuple refers to the tuple and has written it meanwhile.
                Some(memo) => {
                    let memo = *memo;
                    self.drop_values(len, len > 3);
                    self.writer.get(memo);
                }
                None => {
                    self.memo.insert(id, self.writer.memo_len);
                    self.writer.end_tuple(len);
                }
            },
            Step::Set(id) => match self.memo.get(&id) {
                Some(memo) => {
                    let memo = *memo;
                    self.drop_values(2, false);
                    self.writer.get(memo);
                }
                None => {
                    self.writer.end_tuple(1);
                    self.memo.insert(id, self.writer.memo_len);
                    self.writer.call();
                }
            },
            Step::Construct(id, object) => self.construct(id, &object),
            Step::Fill(fill) => self.fill(fill),
            Step::Opcode(opcode) => self.writer.out.push(opcode),
        }
        Ok(())
    }

    fn value(&mut self, id: NodeId, sink: &mut dyn PersistentSink) -> Result<(), FormatError> {
        if let Some(memo) = self.memo.get(&id) {
            self.writer.get(*memo);
            return Ok(());
        }
        let pickle = self.pickle;
        match pickle.node(id) {
            Node::None => self.writer.none(),
            Node::Bool(b) => self.writer.bool(*b),
            Node::Int(n) => self.writer.int(*n),
            Node::BigInt(n) => self.writer.big_int(&BigInt::from_le_bytes(n.to_vec())),
            Node::Float(x) => self.writer.float(*x),
            Node::Str(text) => self.text(id, text.as_bytes()),
            Node::EscapedStr(text) => self.text(id, text.as_bytes()),
            Node::SurrogateStr(text) => self.text(id, text),
            Node::Bytes(bytes) => self.bytes(id, bytes),
            Node::EscapedBytes(bytes) => self.bytes(id, bytes),
            Node::ByteArray(bytes) => {
                self.writer.global("builtins", "bytearray");
                if !bytes.is_empty() {
                    self.writer.bytes(bytes);
                }
                self.writer.end_tuple(usize::from(!bytes.is_empty()));
                self.memo.insert(id, self.writer.memo_len);
                self.writer.call();
            }
            Node::Tuple(span) if span.is_empty() => self.writer.empty_tuple(),
            Node::Tuple(span) => {
                self.enter(id)?;
                if span.len() > 3 {
                    self.writer.out.push(op::MARK);
                }
                self.steps.push(Step::Tuple(id, span.len()));
                self.push_values(pickle.children(*span));
            }
            Node::List(span) => {
                self.memo.insert(id, self.writer.memo_len);
                self.open(op::EMPTY_LIST);
                let rest = pickle.children(*span);
                self.push_fill(Fill { rest, pairs: false, exact: true, first: true });
            }
            Node::Dict(span) => {
                self.memo.insert(id, self.writer.memo_len);
                self.open(op::EMPTY_DICT);
                let rest = pickle.children(*span);
                self.push_fill(Fill { rest, pairs: true, exact: true, first: true });
            }
            Node::Set(span) => self.set(id, "set", pickle.children(*span))?,
            Node::FrozenSet(span) => self.set(id, "frozenset", pickle.children(*span))?,
            Node::Global(_) => {
                let Some((module, name)) = pickle.global_name(id) else { return Ok(()) };
                if module.contains('\n') || name.contains('\n') {
                    let problem = format!("the name {name:?} has a line break");
                    return Err(FormatError::new("pickle", problem));
                }
                self.writer.global(module, name);
            }
            Node::Object(_) => {
                let Some(object) = pickle.object(id).copied() else { return Ok(()) };
                self.enter(id)?;
                self.steps.push(Step::Construct(id, object));
                self.steps.extend(pickle.kwargs(&object).map(Step::Value));
                self.push_values(&[object.class, object.args]);
            }
            Node::Persistent(_) => sink.persistent(self.writer, pickle, id)?,
        }
        Ok(())
    }

    /// Strings keep their sharing and are not shared by value.
    fn text(&mut self, id: NodeId, text: &[u8]) {
        self.memo.insert(id, self.writer.memo_len);
        self.writer.utf8(text);
        self.writer.memoize();
    }

    fn bytes(&mut self, id: NodeId, bytes: &[u8]) {
        self.writer.bytes(bytes);
        if bytes.len() > 1 {
            self.memo.insert(id, self.writer.memo_len.saturating_sub(1));
        }
    }

    fn open(&mut self, opcode: u8) {
        self.writer.out.push(opcode);
        self.writer.memoize();
    }

    fn set(&mut self, id: NodeId, class: &str, items: &'p [NodeId]) -> Result<(), FormatError> {
        self.enter(id)?;
        self.writer.global("builtins", class);
        self.open(op::EMPTY_LIST);
        self.steps.push(Step::Set(id));
        self.push_fill(Fill { rest: items, pairs: false, exact: true, first: true });
        Ok(())
    }

    /// Marks a node as begun that can be referred to only when complete. A cycle through it returns
    /// once, and then ends at a container that was memoized empty.
    fn enter(&mut self, id: NodeId) -> Result<(), FormatError> {
        let times = self.entered.entry(id).or_insert(0);
        *times += 1;
        if *times > 2 {
            let problem = "an object is part of what it is made from";
            return Err(FormatError::new("pickle", problem));
        }
        Ok(())
    }

    fn drop_values(&mut self, len: usize, marked: bool) {
        match marked {
            true => self.writer.out.push(op::POP_MARK),
            false => self.writer.out.extend(std::iter::repeat_n(op::POP, len)),
        }
    }

    fn construct(&mut self, id: NodeId, object: &ObjectNode) {
        let pickle = self.pickle;
        let kwargs = pickle.kwargs(object).is_some();
        if let Some(memo) = self.memo.get(&id) {
            let memo = *memo;
            self.drop_values(2 + usize::from(kwargs), false);
            self.writer.get(memo);
            return;
        }
        self.memo.insert(id, self.writer.memo_len);
        self.open(match (object.construction, kwargs) {
            (_, true) => op::NEWOBJ_EX,
            (Construction::Call, false) => op::REDUCE,
            (Construction::New, false) => op::NEWOBJ,
        });
        if let Some(state) = object.state {
            self.steps.push(Step::Opcode(op::BUILD));
            self.steps.push(Step::Value(state));
        }
        let (items, entries) = (pickle.object_items(object), pickle.object_entries(object));
        self.push_fill(Fill { rest: entries, pairs: true, exact: false, first: true });
        self.push_fill(Fill { rest: items, pairs: false, exact: false, first: true });
    }

    fn push_values(&mut self, ids: &[NodeId]) {
        self.steps.extend(ids.iter().rev().map(|id| Step::Value(*id)));
    }

    fn push_fill(&mut self, fill: Fill<'p>) {
        if !fill.rest.is_empty() {
            self.steps.push(Step::Fill(fill));
        }
    }

    /// Writes the next batch of a container.
    fn fill(&mut self, fill: Fill<'p>) {
        let width = if fill.pairs { 2 } else { 1 };
        let (one, many) =
            if fill.pairs { (op::SETITEM, op::SETITEMS) } else { (op::APPEND, op::APPENDS) };
        let left = fill.rest.len() / width;
        if left == 1 && (fill.first || !fill.exact) {
            self.steps.push(Step::Opcode(one));
            self.push_values(fill.rest);
            return;
        }
        let (now, rest) = fill.rest.split_at(left.min(BATCH) * width);
        self.writer.out.push(op::MARK);
        // CPython ends a dict of a multiple of 1000 entries with an empty batch.
        if !rest.is_empty() || (left == BATCH && fill.exact && fill.pairs) {
            self.steps.push(Step::Fill(Fill { rest, first: false, ..fill }));
        }
        self.steps.push(Step::Opcode(many));
        self.push_values(now);
    }
}
