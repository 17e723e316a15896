//! Writes values as pickles.

use bytes::Bytes;
use dcp_core::value::{Dict, Global, MadeBy, Object, Opaque};
use dcp_core::{FormatError, Tensor, Value};

use super::limits::Limits;
use super::opcode as op;
use super::writer::{BATCH, Writer};

/// Writes what a pickle refers to but does not contain: tensors, and opaque objects.
pub trait TensorSink {
    /// Writes a reference to `tensor`.
    ///
    /// # Errors
    ///
    /// When the tensor cannot be stored.
    fn tensor(&mut self, writer: &mut Writer, tensor: &Tensor) -> Result<(), FormatError>;

    /// Writes an opaque object.
    ///
    /// # Errors
    ///
    /// When it is damaged, or cannot be stored here.
    fn opaque(&mut self, writer: &mut Writer, opaque: &Opaque) -> Result<(), FormatError>;
}

/// A sink for values without tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dumper;

impl TensorSink for Dumper {
    fn tensor(&mut self, _: &mut Writer, _: &Tensor) -> Result<(), FormatError> {
        Err(FormatError::new("pickle", "a tensor can only be stored in a torch archive"))
    }

    fn opaque(&mut self, _: &mut Writer, opaque: &Opaque) -> Result<(), FormatError> {
        Err(not_alone(opaque))
    }
}

/// Writes a value without tensors as `pickle.dumps(value, 2)` does, if Python's objects are shared
/// as [`Writer`] documents.
///
/// # Errors
///
/// As [`Writer::value`].
pub fn dump(value: &Value) -> Result<Bytes, FormatError> {
    let mut writer = Writer::new();
    writer.value(value, &mut Dumper)?;
    writer.finish()
}

/// The error for an object that can only be written whole.
pub(crate) fn not_alone(opaque: &Opaque) -> FormatError {
    let kind = opaque.view.kind();
    let problem = format!(
        "a {kind} that was kept in its encoding is part of another value and can only be written by itself"
    );
    FormatError::new("pickle", problem)
}

/// The attributes of an `argparse.Namespace`.
fn namespace(object: &Object) -> Option<&Dict> {
    let plain = object.args.is_empty() && object.items.is_empty() && object.entries.is_empty();
    let is_one = object.class.is("argparse", "Namespace") && plain;
    object.state.as_ref().filter(|_| is_one)?.as_dict()
}

impl Writer {
    /// Writes a value. Equal strings are shared when they are the same [`Arc`](std::sync::Arc).
    ///
    /// # Errors
    ///
    /// When it is nested too deeply, has a name with a line break, or contains a value that is only
    /// for display: an object that is [made in an unknown way](MadeBy::Unknown), a cyclic part, or
    /// an omitted one.
    pub fn value(
        &mut self,
        value: &Value,
        tensors: &mut dyn TensorSink,
    ) -> Result<(), FormatError> {
        // Values from a file have at most this depth; the rest is for wrapping them.
        self.nested(value, tensors, Limits::DEFAULT.depth + 16)
    }

    fn nested(
        &mut self,
        value: &Value,
        tensors: &mut dyn TensorSink,
        depth: usize,
    ) -> Result<(), FormatError> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(FormatError::new("pickle", "containers are nested too deeply to write"));
        };
        match value {
            Value::None => self.none(),
            Value::Bool(b) => self.bool(*b),
            Value::Int(n) => self.int(*n),
            Value::BigInt(n) => self.big_int(n),
            Value::Float(x) => self.float(*x),
            Value::Complex(re, im) => {
                self.global("builtins", "complex");
                self.tuple(2, |writer| {
                    writer.float(*re);
                    writer.float(*im);
                    Ok::<(), FormatError>(())
                })?;
                self.call();
            }
            Value::Str(text) => self.shared_str(text),
            Value::Bytes(bytes) => self.shared_bytes(bytes),
            Value::ByteArray(bytes) => {
                self.global("builtins", "bytearray");
                self.tuple(usize::from(!bytes.is_empty()), |writer| {
                    if !bytes.is_empty() {
                        writer.bytes(bytes);
                    }
                    Ok::<(), FormatError>(())
                })?;
                self.call();
            }
            Value::List(items) => {
                self.list(items.iter(), |writer, item| writer.nested(item, tensors, depth))?;
            }
            Value::Tuple(items) => self.tuple(items.len(), |writer| {
                items.iter().try_for_each(|item| writer.nested(item, tensors, depth))
            })?,
            Value::Dict(dict) => self.dict(dict.iter(), |writer, (key, value)| {
                writer.nested(key, tensors, depth)?;
                writer.nested(value, tensors, depth)
            })?,
            Value::Set(items) => self.set("set", items, tensors, depth)?,
            Value::FrozenSet(items) => self.set("frozenset", items, tensors, depth)?,
            Value::Tensor(tensor) => tensors.tensor(self, tensor)?,
            Value::Global(global) => self.name(global)?,
            Value::Object(object) => self.object(object, tensors, depth)?,
            Value::Opaque(opaque) => tensors.opaque(self, opaque)?,
            other => {
                let problem = format!("a {} cannot be written", other.kind());
                return Err(FormatError::new("pickle", problem));
            }
        }
        Ok(())
    }

    fn name(&mut self, global: &Global) -> Result<(), FormatError> {
        if global.module.is_empty() {
            let name = &global.name;
            let problem =
                format!("{name} marks a value that was not decoded, which cannot be written");
            return Err(FormatError::new("pickle", problem));
        }
        if global.module.contains('\n') || global.name.contains('\n') {
            let problem = format!("the name {:?} has a line break", global.to_string());
            return Err(FormatError::new("pickle", problem));
        }
        self.global(&global.module, &global.name);
        Ok(())
    }

    /// Begins a batch of items. Returns the opcode that ends it.
    fn batch(&mut self, len: usize, one: u8, many: u8) -> u8 {
        if len == 1 {
            return one;
        }
        self.out.push(op::MARK);
        many
    }

    /// Writes an object by its parts, with the opcodes that CPython uses for its kind of
    /// construction.
    fn object(
        &mut self,
        object: &Object,
        tensors: &mut dyn TensorSink,
        depth: usize,
    ) -> Result<(), FormatError> {
        let bad = |problem: &str| {
            let problem = format!("an object of class {} {problem}", object.class);
            FormatError::new("pickle", problem)
        };
        let mut args = &*object.args;
        if object.class.is("", "<call>") {
            let (callee, rest) =
                args.split_first().ok_or_else(|| bad("does not say what is called"))?;
            self.nested(callee, tensors, depth)?;
            args = rest;
        } else {
            self.name(&object.class)?;
        }
        let mut keywords = None;
        let opcode = match object.made_by {
            // When both are possible, as CPython pickles such an instance.
            MadeBy::Call if namespace(object).is_some() => op::NEWOBJ,
            MadeBy::Call => op::REDUCE,
            MadeBy::New => op::NEWOBJ,
            MadeBy::NewWithKeywords => {
                let (last, rest) =
                    args.split_last().ok_or_else(|| bad("is without its keywords"))?;
                (keywords, args) = (Some(last), rest);
                op::NEWOBJ_EX
            }
            _ => return Err(bad("was only shown, and cannot be written by what was")),
        };
        self.tuple(args.len(), |writer| {
            args.iter().try_for_each(|arg| writer.nested(arg, tensors, depth))
        })?;
        if let Some(keywords) = keywords {
            self.nested(keywords, tensors, depth)?;
        }
        self.out.push(opcode);
        self.memoize();
        for items in object.items.chunks(BATCH) {
            let opcode = self.batch(items.len(), op::APPEND, op::APPENDS);
            items.iter().try_for_each(|item| self.nested(item, tensors, depth))?;
            self.out.push(opcode);
        }
        for entries in object.entries.chunks(BATCH) {
            let opcode = self.batch(entries.len(), op::SETITEM, op::SETITEMS);
            for (key, value) in entries {
                self.nested(key, tensors, depth)?;
                self.nested(value, tensors, depth)?;
            }
            self.out.push(opcode);
        }
        if let Some(state) = &object.state {
            self.nested(state, tensors, depth)?;
            self.build();
        }
        Ok(())
    }

    fn set(
        &mut self,
        class: &str,
        items: &[Value],
        tensors: &mut dyn TensorSink,
        depth: usize,
    ) -> Result<(), FormatError> {
        self.global("builtins", class);
        self.tuple(1, |writer| {
            writer.list(items.iter(), |writer, item| writer.nested(item, tensors, depth))
        })?;
        self.call();
        Ok(())
    }
}
