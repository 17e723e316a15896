//! The state of the machine: stack, marks, memo, and the arena under construction.

use std::borrow::Cow;
use std::collections::HashMap;

use dcp_core::FormatError;

use super::arena::{
    Construction, GlobalName, Node, NodeId, ObjectNode, Pickle, RECORDS, Rare, Span,
};
use super::cursor::{Cursor, Integer};
use super::limits::Limits;
use super::memo::Memo;
use super::names::to_python3;
use super::opcode as op;

/// The maximum length in bytes of a module's name, and of a name in it. Real ones have a tenth of
/// it; each occurrence is looked up.
const NAME_MAX: usize = 1 << 10;

/// Whether instances of a class, by module and name, are records.
pub(super) type IsRecord = fn(&str, &str) -> bool;

pub(super) struct Machine<'a> {
    pub(super) cursor: Cursor<'a>,
    /// The memory limit for all of it, in bytes.
    memory: u64,
    pub(super) stack: Vec<NodeId>,
    /// The length of the stack at each open `MARK`.
    pub(super) marks: Vec<usize>,
    pub(super) memo: Memo,
    /// Which classes have records; none where instances are made of nodes.
    is_record: Option<IsRecord>,
    /// Whether each class has them, by the number of the global.
    record_classes: Vec<bool>,
    pub(super) by_name: HashMap<GlobalName<'a>, NodeId>,
    pub(super) out: Pickle<'a>,
    pub(super) constants: Constants,
}

/// Values whose occurrences share one node.
pub(super) struct Constants {
    pub(super) yes: NodeId,
    pub(super) no: NodeId,
    pub(super) empty_tuple: NodeId,
    /// The one-byte integers in use: half of all nodes of a `.metadata`.
    pub(super) bytes: [Option<NodeId>; 256],
}

impl<'a> Machine<'a> {
    pub(super) fn new(input: &'a [u8], limits: &Limits) -> Self {
        let nodes =
            vec![Node::None, Node::Bool(true), Node::Bool(false), Node::Tuple(Span::default())];
        let constant = |index| NodeId::from_index(index).unwrap_or(NodeId::NONE);
        Self {
            cursor: Cursor::new(input),
            memory: limits.memory(input.len()),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            is_record: None,
            record_classes: Vec::new(),
            by_name: HashMap::new(),
            out: Pickle {
                nodes,
                pool: Vec::new(),
                globals: Vec::new(),
                objects: Vec::new(),
                rare: Vec::new(),
                root: NodeId::NONE,
                byte_len: 0,
                protocol: 0,
                input: &[],
                memo: Memo::default(),
                size_class: None,
                records: Vec::new(),
            },
            constants: Constants {
                yes: constant(1),
                no: constant(2),
                empty_tuple: constant(3),
                bytes: [None; 256],
            },
        }
    }

    /// Makes records of instances of these classes.
    pub(super) fn with_records(mut self, is_record: IsRecord) -> Self {
        self.is_record = Some(is_record);
        self.out.input = self.cursor.rest();
        self
    }

    pub(super) fn finish(mut self, root: NodeId) -> Pickle<'a> {
        self.out.root = root;
        self.out.byte_len = self.cursor.position();
        self.out.memo = self.memo;
        self.out
    }

    /// Fails when the memory in use exceeds the limit.
    pub(super) fn check_memory(&self) -> Result<(), FormatError> {
        let out = &self.out;
        let taken = size_of_val(&*out.nodes)
            + size_of_val(&*out.pool)
            + size_of_val(&*out.objects)
            + size_of_val(&*out.rare)
            + size_of_val(&*out.records)
            // Counted again for the table by name.
            + 3 * size_of_val(&*out.globals)
            + size_of_val(&*self.stack)
            + size_of_val(&*self.marks)
            + self.memo.memory();
        if taken as u64 > self.memory {
            return Err(self.too_much());
        }
        Ok(())
    }

    fn too_much(&self) -> FormatError {
        let (len, memory) = (self.cursor.input_len(), self.memory >> 20);
        self.cursor.bad(format!(
            "its {len} bytes make so many objects that they take more than {memory} MiB of \
             memory, which no checkpoint does"
        ))
    }

    pub(super) fn add(&mut self, node: Node<'a>) -> Result<NodeId, FormatError> {
        let index = Some(self.out.nodes.len()).filter(|index| *index < RECORDS);
        let id = index.and_then(NodeId::from_index);
        self.out.nodes.push(node);
        id.ok_or_else(|| self.cursor.bad("it makes too many objects"))
    }

    pub(super) fn push(&mut self, node: Node<'a>) -> Result<(), FormatError> {
        let id = self.add(node)?;
        self.stack.push(id);
        Ok(())
    }

    pub(super) fn push_byte(&mut self, n: u8) -> Result<(), FormatError> {
        let id = match self.constants.bytes.get(usize::from(n)).copied().flatten() {
            Some(id) => id,
            None => {
                let id = self.add(Node::Int(n.into()))?;
                if let Some(slot) = self.constants.bytes.get_mut(usize::from(n)) {
                    *slot = Some(id);
                }
                id
            }
        };
        self.stack.push(id);
        Ok(())
    }

    pub(super) fn push_integer(&mut self, integer: Integer) -> Result<(), FormatError> {
        self.push(match integer {
            Integer::Small(n) => Node::Int(n),
            Integer::Big(bytes) => Node::BigInt(bytes),
        })
    }

    pub(super) fn push_str(&mut self, bytes: &'a [u8]) -> Result<(), FormatError> {
        self.push(match str::from_utf8(bytes) {
            Ok(text) => Node::Str(text),
            Err(_) if is_surrogatepass(bytes) => Node::SurrogateStr(bytes),
            Err(_) => return Err(self.cursor.bad("a string is not UTF-8")),
        })
    }

    pub(super) fn push_python2_str(&mut self, bytes: Cow<'a, [u8]>) -> Result<(), FormatError> {
        self.push(match bytes {
            Cow::Borrowed(bytes) => match str::from_utf8(bytes) {
                Ok(text) => Node::Str(text),
                Err(_) => Node::Bytes(bytes),
            },
            Cow::Owned(bytes) => match String::from_utf8(bytes) {
                Ok(text) => Node::EscapedStr(text.into()),
                Err(error) => Node::EscapedBytes(error.into_bytes().into()),
            },
        })
    }

    /// The lower end of the stack: the last mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    pub(super) fn top(&self) -> Result<NodeId, FormatError> {
        match self.stack.last() {
            Some(id) if self.stack.len() > self.floor() => Ok(*id),
            _ => Err(self.cursor.bad("the stack is empty")),
        }
    }

    pub(super) fn pop(&mut self) -> Result<NodeId, FormatError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    pub(super) fn mark(&mut self) -> Result<usize, FormatError> {
        self.marks.pop().ok_or_else(|| self.cursor.bad("there is no mark"))
    }

    /// Pops everything above the mark as children.
    pub(super) fn collect(&mut self) -> Result<Span, FormatError> {
        let start = self.mark()?;
        self.collect_into(Span::default(), start)
    }

    /// Pops everything from `start` as further children of a span.
    fn collect_into(&mut self, span: Span, start: usize) -> Result<Span, FormatError> {
        let children = self.stack.get(start..).unwrap_or_default();
        let span = self
            .out
            .extend(span, children)
            .ok_or_else(|| self.cursor.bad("it has more references than can be numbered"))?;
        self.stack.truncate(start);
        Ok(span)
    }

    pub(super) fn push_tuple(&mut self, start: usize) -> Result<(), FormatError> {
        let span = self.collect_into(Span::default(), start)?;
        self.push(Node::Tuple(span))
    }

    pub(super) fn pop_tuple(&mut self) -> Result<NodeId, FormatError> {
        let id = self.pop()?;
        match self.out.node(id) {
            Node::Tuple(_) => Ok(id),
            _ => Err(self.cursor.bad("arguments are not in a tuple")),
        }
    }

    pub(super) fn pop_str(&mut self) -> Result<Cow<'a, str>, FormatError> {
        let id = self.pop()?;
        match self.out.node(id) {
            Node::Str(text) => Ok(Cow::Borrowed(text)),
            Node::EscapedStr(text) => Ok(Cow::Owned(text.to_string())),
            _ => Err(self.cursor.bad("a name is not a string")),
        }
    }

    pub(super) fn require_pairs(&self, len: usize) -> Result<(), FormatError> {
        match len % 2 {
            0 => Ok(()),
            _ => Err(self.cursor.bad("a dict has a key without a value")),
        }
    }

    /// The position of the `len` uppermost values, all above the last mark.
    pub(super) fn uppermost(&self, len: usize) -> Result<usize, FormatError> {
        let start = self.stack.len().checked_sub(len).filter(|start| *start >= self.floor());
        start.ok_or_else(|| self.cursor.bad("the stack is empty"))
    }

    /// The container below `start`.
    fn below(&self, start: usize) -> Result<NodeId, FormatError> {
        match start.checked_sub(1).filter(|at| *at >= self.floor()) {
            Some(at) => Ok(self.stack.get(at).copied().unwrap_or(NodeId::NONE)),
            None => Err(self.cursor.bad("the stack is empty")),
        }
    }

    pub(super) fn append_from(&mut self, start: usize) -> Result<(), FormatError> {
        let target = self.below(start)?;
        match *self.out.node(target) {
            Node::List(span) => {
                let span = self.collect_into(span, start)?;
                self.replace(target, Node::List(span));
            }
            Node::Set(span) => {
                let span = self.collect_into(span, start)?;
                self.replace(target, Node::Set(span));
            }
            Node::Object(object) => {
                let rare = self.rare(object)?;
                let span = self.out.rare.get(rare).map(|rare| rare.items).unwrap_or_default();
                let span = self.collect_into(span, start)?;
                if let Some(rare) = self.out.rare.get_mut(rare) {
                    rare.items = span;
                }
            }
            _ => return Err(self.cursor.bad("items are added to what is not a list")),
        }
        Ok(())
    }

    pub(super) fn set_from(&mut self, start: usize) -> Result<(), FormatError> {
        self.require_pairs(self.stack.len() - start)?;
        let target = self.below(start)?;
        match *self.out.node(target) {
            Node::Dict(span) => {
                let span = self.collect_into(span, start)?;
                self.replace(target, Node::Dict(span));
            }
            Node::Object(object) => {
                let rare = self.rare(object)?;
                let span = self.out.rare.get(rare).map(|rare| rare.entries).unwrap_or_default();
                let span = self.collect_into(span, start)?;
                if let Some(rare) = self.out.rare.get_mut(rare) {
                    rare.entries = span;
                }
            }
            _ => return Err(self.cursor.bad("entries are set in what is not a dict")),
        }
        Ok(())
    }

    fn replace(&mut self, id: NodeId, node: Node<'a>) {
        if let Some(slot) = self.out.nodes.get_mut(id.index()) {
            *slot = node;
        }
    }

    /// The index of an object's rare parts, which the first use creates.
    fn rare(&mut self, object: u32) -> Result<usize, FormatError> {
        let next = NodeId::from_index(self.out.rare.len());
        let Some(object) = self.out.objects.get_mut(object as usize) else {
            return Err(self.cursor.bad("there is no such object"));
        };
        if let Some(rare) = object.rare {
            return Ok(rare.get() as usize - 1);
        }
        let next = next.ok_or_else(|| self.cursor.bad("it makes too many objects"))?;
        object.rare = Some(next.number());
        self.out.rare.push(Rare::default());
        Ok(next.index())
    }

    pub(super) fn put(&mut self, index: u64) -> Result<(), FormatError> {
        let top = self.top()?;
        // A pickler numbers its memo from 0, and every entry took at least a byte of input.
        let index = usize::try_from(index).ok().filter(|index| *index < self.cursor.input_len());
        let Some(index) = index else {
            return Err(self.cursor.bad("a memo index is larger than the pickle is long"));
        };
        if self.is_record.is_some() && index < self.memo.end() {
            return Err(self.cursor.bad("a memo index is set twice, to which records may refer"));
        }
        self.memo.set(index, top);
        Ok(())
    }

    pub(super) fn get(&mut self, index: u64) -> Result<(), FormatError> {
        let found = usize::try_from(index).ok().and_then(|index| self.memo.get(index));
        let id = found.ok_or_else(|| self.cursor.bad(format!("memo {index} is not set")))?;
        self.stack.push(id);
        if self.is_record.is_some() {
            self.skip_record(id)?;
        }
        Ok(())
    }

    /// Makes a record of the instance that follows its class, if it is one.
    fn skip_record(&mut self, class: NodeId) -> Result<(), FormatError> {
        let [op::EMPTY_TUPLE, op::NEWOBJ, ..] = self.cursor.rest() else { return Ok(()) };
        let Node::Global(number) = *self.out.node(class) else { return Ok(()) };
        if self.record_classes.get(number as usize) != Some(&true) {
            return Ok(());
        }
        let mut texts = Vec::new();
        let found = self.out.find_record(number, self.cursor.position(), &self.memo, |at, text| {
            texts.push((at, text));
        });
        let Some(found) = found else { return Ok(()) };
        self.cursor.take(found.byte_len)?;
        self.pop()?;
        for (at, text) in texts {
            let id = self.add(Node::Str(text))?;
            self.memo.set(at, id);
        }
        self.memo.skip_to(found.memo);
        let id = NodeId::from_index(RECORDS + self.out.records.len());
        self.stack.push(id.ok_or_else(|| self.cursor.bad("it makes too many objects"))?);
        self.out.records.push(found.record);
        Ok(())
    }

    pub(super) fn global(
        &mut self,
        module: Cow<'a, str>,
        name: Cow<'a, str>,
    ) -> Result<NodeId, FormatError> {
        if module.len() > NAME_MAX || name.len() > NAME_MAX {
            let len = module.len().max(name.len());
            let problem = format!("it names a class in {len} bytes, {NAME_MAX} are the most");
            return Err(self.cursor.bad(problem));
        }
        let mapped = match to_python3(&module, &name) {
            (m, n) if m == module && n == name => None,
            (m, n) => Some((m.to_owned(), n.to_owned())),
        };
        let global = match mapped {
            Some((module, name)) => GlobalName { module: module.into(), name: name.into() },
            None => GlobalName { module, name },
        };
        if let Some(id) = self.by_name.get(&global) {
            return Ok(*id);
        }
        let number = u32::try_from(self.out.globals.len())
            .map_err(|_| self.cursor.bad("it names too many classes"))?;
        let id = self.add(Node::Global(number))?;
        if let Some(is_record) = self.is_record {
            self.record_classes.push(is_record(&global.module, &global.name));
        }
        if (&*global.module, &*global.name) == ("torch", "Size") {
            self.out.size_class = Some(number);
        }
        self.out.globals.push(global.clone());
        self.by_name.insert(global, id);
        Ok(id)
    }

    pub(super) fn push_object(
        &mut self,
        construction: Construction,
        class: NodeId,
        args: NodeId,
        kwargs: Option<NodeId>,
    ) -> Result<(), FormatError> {
        let number = u32::try_from(self.out.objects.len())
            .map_err(|_| self.cursor.bad("it makes too many objects"))?;
        self.out.objects.push(ObjectNode { class, args, state: None, construction, rare: None });
        if kwargs.is_some() {
            let rare = self.rare(number)?;
            if let Some(rare) = self.out.rare.get_mut(rare) {
                rare.kwargs = kwargs;
            }
        }
        self.push(Node::Object(number))
    }

    pub(super) fn build(&mut self, state: NodeId) -> Result<(), FormatError> {
        let target = self.top()?;
        let Node::Object(number) = *self.out.node(target) else {
            return Err(self.cursor.bad("BUILD sets state on a value without state"));
        };
        let object = self.out.objects.get_mut(number as usize);
        match object {
            Some(object) if object.state.is_none() => {
                object.state = Some(state);
                Ok(())
            }
            _ => Err(self.cursor.bad("BUILD sets state twice")),
        }
    }
}

/// Text with lone surrogates, escaped as Python prints them: `\udc80`.
pub(crate) fn surrogates_escaped(bytes: &[u8]) -> String {
    let mut shown = String::with_capacity(bytes.len());
    let mut rest = bytes;
    loop {
        let valid = str::from_utf8(rest).map_or_else(|error| error.valid_up_to(), str::len);
        let (text, bad) = rest.split_at(valid);
        shown.push_str(&String::from_utf8_lossy(text));
        let [0xed, high @ 0xa0..=0xbf, low @ 0x80..=0xbf, after @ ..] = bad else {
            shown.push_str(&String::from_utf8_lossy(bad));
            return shown;
        };
        let code = 0xd000 | u32::from(high & 0x3f) << 6 | u32::from(low & 0x3f);
        shown.push_str(&format!("\\u{code:04x}"));
        rest = after;
    }
}

/// Whether it is UTF-8 with encoded surrogates, which Python strings can contain.
fn is_surrogatepass(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        match str::from_utf8(rest) {
            Ok(_) => return true,
            Err(error) => {
                let bad = rest.get(error.valid_up_to()..).unwrap_or_default();
                match bad {
                    [0xed, 0xa0..=0xbf, 0x80..=0xbf, after @ ..] => rest = after,
                    _ => return false,
                }
            }
        }
    }
}
