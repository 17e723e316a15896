//! The stack machine that executes a pickle's opcodes.

use std::borrow::Cow;

use dcp_core::FormatError;

use super::arena::{Construction, Node, NodeId, Pickle, Span};
use super::cursor::{long, raw_unicode_escape, unquote};
use super::limits::Limits;
use super::opcode as op;
use super::stack::{IsRecord, Machine};

const HIGHEST_PROTOCOL: u8 = 5;

impl<'a> Pickle<'a> {
    /// Parses the pickle at the start of `input`. Ignores what follows `STOP`.
    ///
    /// # Errors
    ///
    /// When the input ends early, claims more than it has, uses the stack or the memo in a way that
    /// fails in Python too, exceeds `limits`, or needs data outside the file: out-of-band buffers
    /// or extension codes of the `copyreg` registry.
    pub fn parse(input: &'a [u8], limits: &Limits) -> Result<Self, FormatError> {
        Machine::new(input, limits).run()
    }

    /// Parses as [`parse`](Self::parse) does, with [`Record`](super::Record)s in place of the
    /// instances of the classes that `is_record` accepts, where they have nothing but plain fields.
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse), and where a value inside a record is referred to from outside.
    pub(crate) fn parse_with_records(
        input: &'a [u8],
        limits: &Limits,
        is_record: IsRecord,
    ) -> Result<Self, FormatError> {
        Machine::new(input, limits).with_records(is_record).run()
    }
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Pickle<'a>, FormatError> {
        loop {
            let at = self.cursor.position();
            match self.step().and_then(|root| self.check_memory().map(|()| root)) {
                Ok(None) => {}
                Ok(Some(root)) => return Ok(self.finish(root)),
                // The offset of the opcode is more useful than that of its operand.
                Err(error) => return Err(error.at(at as u64)),
            }
        }
    }

    /// Executes one opcode. Returns the result at `STOP`.
    fn step(&mut self) -> Result<Option<NodeId>, FormatError> {
        match self.cursor.u8()? {
            op::STOP => return self.pop().map(Some),
            op::PROTO => {
                self.out.protocol = self.cursor.u8()?;
                if self.out.protocol > HIGHEST_PROTOCOL {
                    let problem = format!("protocol {} is unknown", self.out.protocol);
                    return Err(self.cursor.bad(problem));
                }
            }
            op::FRAME => {
                let len = u64::from_le_bytes(self.cursor.array()?);
                let left = self.cursor.input_len() - self.cursor.position();
                if len > left as u64 {
                    let problem = format!("a frame of {len} bytes, of which {left} are there");
                    return Err(self.cursor.bad(problem));
                }
            }
            op::MARK => self.marks.push(self.stack.len()),
            op::POP if self.marks.last() == Some(&self.stack.len()) => {
                self.marks.pop();
            }
            op::POP => {
                self.pop()?;
            }
            op::POP_MARK => {
                let start = self.mark()?;
                self.stack.truncate(start);
            }
            op::DUP => self.stack.push(self.top()?),

            op::NONE => self.stack.push(NodeId::NONE),
            op::NEWTRUE => self.stack.push(self.constants.yes),
            op::NEWFALSE => self.stack.push(self.constants.no),
            op::INT => match self.cursor.utf8_line()?.trim() {
                "00" => self.stack.push(self.constants.no),
                "01" => self.stack.push(self.constants.yes),
                line => {
                    let integer = self.cursor.decimal(line)?;
                    self.push_integer(integer)?;
                }
            },
            op::LONG => {
                let line = self.cursor.utf8_line()?;
                let integer = self.cursor.decimal(line)?;
                self.push_integer(integer)?;
            }
            op::BININT => {
                let n = i32::from_le_bytes(self.cursor.array()?);
                self.push(Node::Int(n.into()))?;
            }
            op::BININT1 => {
                let n = self.cursor.u8()?;
                self.push_byte(n)?;
            }
            op::BININT2 => {
                let n = u16::from_le_bytes(self.cursor.array()?);
                self.push(Node::Int(n.into()))?;
            }
            op::LONG1 => {
                let bytes = self.cursor.sized::<1>()?;
                self.push_integer(long(bytes))?;
            }
            op::LONG4 => {
                let bytes = self.cursor.sized::<4>()?;
                self.push_integer(long(bytes))?;
            }
            op::FLOAT => {
                let x = self.cursor.decimal_float()?;
                self.push(Node::Float(x))?;
            }
            op::BINFLOAT => {
                let x = f64::from_be_bytes(self.cursor.array()?);
                self.push(Node::Float(x))?;
            }

            op::STRING => {
                let line = self.cursor.line()?;
                let bytes =
                    unquote(line).ok_or_else(|| self.cursor.bad("a string is not quoted"))?;
                self.push_python2_str(bytes)?;
            }
            op::BINSTRING => {
                let bytes = self.cursor.sized::<4>()?;
                self.push_python2_str(Cow::Borrowed(bytes))?;
            }
            op::SHORT_BINSTRING => {
                let bytes = self.cursor.sized::<1>()?;
                self.push_python2_str(Cow::Borrowed(bytes))?;
            }
            op::UNICODE => {
                let line = self.cursor.line()?;
                let text = raw_unicode_escape(line)
                    .ok_or_else(|| self.cursor.bad("an escaped string is malformed"))?;
                self.push(Node::EscapedStr(text.into()))?;
            }
            op::BINUNICODE => {
                let bytes = self.cursor.sized::<4>()?;
                self.push_str(bytes)?;
            }
            op::SHORT_BINUNICODE => {
                let bytes = self.cursor.sized::<1>()?;
                self.push_str(bytes)?;
            }
            op::BINUNICODE8 => {
                let bytes = self.cursor.sized::<8>()?;
                self.push_str(bytes)?;
            }
            op::BINBYTES => {
                let bytes = self.cursor.sized::<4>()?;
                self.push(Node::Bytes(bytes))?;
            }
            op::SHORT_BINBYTES => {
                let bytes = self.cursor.sized::<1>()?;
                self.push(Node::Bytes(bytes))?;
            }
            op::BINBYTES8 => {
                let bytes = self.cursor.sized::<8>()?;
                self.push(Node::Bytes(bytes))?;
            }
            op::BYTEARRAY8 => {
                let bytes = self.cursor.sized::<8>()?;
                self.push(Node::ByteArray(bytes))?;
            }

            op::EMPTY_TUPLE => self.stack.push(self.constants.empty_tuple),
            op::TUPLE1 => {
                let start = self.uppermost(1)?;
                self.push_tuple(start)?;
            }
            op::TUPLE2 => {
                let start = self.uppermost(2)?;
                self.push_tuple(start)?;
            }
            op::TUPLE3 => {
                let start = self.uppermost(3)?;
                self.push_tuple(start)?;
            }
            op::TUPLE => {
                let start = self.mark()?;
                self.push_tuple(start)?;
            }
            op::EMPTY_LIST => self.push(Node::List(Span::default()))?,
            op::EMPTY_DICT => self.push(Node::Dict(Span::default()))?,
            op::EMPTY_SET => self.push(Node::Set(Span::default()))?,
            op::LIST => {
                let span = self.collect()?;
                self.push(Node::List(span))?;
            }
            op::DICT => {
                let span = self.collect()?;
                self.require_pairs(span.len())?;
                self.push(Node::Dict(span))?;
            }
            op::FROZENSET => {
                let span = self.collect()?;
                self.push(Node::FrozenSet(span))?;
            }
            op::APPEND => {
                let start = self.uppermost(1)?;
                self.append_from(start)?;
            }
            op::APPENDS | op::ADDITEMS => {
                let start = self.mark()?;
                self.append_from(start)?;
            }
            op::SETITEM => {
                let start = self.uppermost(2)?;
                self.set_from(start)?;
            }
            op::SETITEMS => {
                let start = self.mark()?;
                self.set_from(start)?;
            }

            op::PUT => {
                let index = self.cursor.memo_index()?;
                self.put(index)?;
            }
            op::BINPUT => {
                let index = self.cursor.u8()?;
                self.put(index.into())?;
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.cursor.array()?);
                self.put(index.into())?;
            }
            op::MEMOIZE => self.put(self.memo.len() as u64)?,
            op::GET => {
                let index = self.cursor.memo_index()?;
                self.get(index)?;
            }
            op::BINGET => {
                let index = self.cursor.u8()?;
                self.get(index.into())?;
            }
            op::LONG_BINGET => {
                let index = u32::from_le_bytes(self.cursor.array()?);
                self.get(index.into())?;
            }

            op::GLOBAL => {
                let module = self.cursor.utf8_line()?;
                let name = self.cursor.utf8_line()?;
                let id = self.global(module.into(), name.into())?;
                self.stack.push(id);
            }
            op::STACK_GLOBAL => {
                let name = self.pop_str()?;
                let module = self.pop_str()?;
                let id = self.global(module, name)?;
                self.stack.push(id);
            }
            op::INST => {
                let module = self.cursor.utf8_line()?;
                let name = self.cursor.utf8_line()?;
                let class = self.global(module.into(), name.into())?;
                let args = self.collect()?;
                let args = self.add(Node::Tuple(args))?;
                self.push_object(Construction::Call, class, args, None)?;
            }
            op::OBJ => {
                let start = self.mark()?;
                if start >= self.stack.len() {
                    return Err(self.cursor.bad("an object without a class"));
                }
                self.push_tuple(start + 1)?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.push_object(Construction::Call, class, args, None)?;
            }
            op::REDUCE => {
                let args = self.pop_tuple()?;
                let class = self.pop()?;
                self.push_object(Construction::Call, class, args, None)?;
            }
            op::NEWOBJ => {
                let args = self.pop_tuple()?;
                let class = self.pop()?;
                self.push_object(Construction::New, class, args, None)?;
            }
            op::NEWOBJ_EX => {
                let kwargs = self.pop()?;
                let args = self.pop_tuple()?;
                let class = self.pop()?;
                if !matches!(self.out.node(kwargs), Node::Dict(_)) {
                    return Err(self.cursor.bad("keyword arguments are not in a dict"));
                }
                self.push_object(Construction::New, class, args, Some(kwargs))?;
            }
            op::BUILD => {
                let state = self.pop()?;
                self.build(state)?;
            }
            op::PERSID => {
                let text = self.cursor.utf8_line()?;
                let id = self.add(Node::Str(text))?;
                self.push(Node::Persistent(id))?;
            }
            op::BINPERSID => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }

            op::EXT1 | op::EXT2 | op::EXT4 => {
                return Err(self.cursor.bad(
                    "it uses an extension code, whose meaning only the writing program knew",
                ));
            }
            op::NEXT_BUFFER | op::READONLY_BUFFER => {
                return Err(self.cursor.bad("it refers to a buffer outside the pickle"));
            }
            other => return Err(self.cursor.bad(format!("opcode {other:#04x} is unknown"))),
        }
        Ok(None)
    }
}
