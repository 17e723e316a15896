//! Values to pickles.

use bytes::Bytes;
use dcp_core::{Dict, FormatError, Object, Opaque, Tensor, Value};

use super::limits::Limits;
use super::writer::Writer;

/// Writes what a pickle refers to but does not hold: tensors, and objects kept in their encoding.
pub trait TensorSink {
    /// Writes a reference to `tensor`.
    ///
    /// # Errors
    ///
    /// When the tensor cannot be stored.
    fn tensor(&mut self, writer: &mut Writer, tensor: &Tensor) -> Result<(), FormatError>;

    /// Writes an object that was kept in its encoding.
    ///
    /// # Errors
    ///
    /// When it is damaged, or there is no place for it.
    fn opaque(&mut self, writer: &mut Writer, opaque: &Opaque) -> Result<(), FormatError>;
}

/// A sink for values that hold no tensors.
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

/// The pickle of a value that holds no tensors, as `pickle.dumps(value, 2)` makes it where
/// Python's objects are shared as [`Writer`] says.
///
/// # Errors
///
/// As [`Writer::value`].
pub fn dump(value: &Value) -> Result<Bytes, FormatError> {
    let mut writer = Writer::new();
    writer.value(value, &mut Dumper)?;
    writer.finish()
}

/// The refusal of an object that can only be written as the whole that it was read as.
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
    /// Writes a value; equal strings are shared when they are the same [`Arc`](std::sync::Arc).
    ///
    /// # Errors
    ///
    /// When it nests too deeply, or holds an object of a class, which can only be written as the
    /// whole [`Opaque`](dcp_core::Opaque) that it was read as. An `argparse.Namespace` can be: it
    /// is nothing but its attributes.
    pub fn value(
        &mut self,
        value: &Value,
        tensors: &mut dyn TensorSink,
    ) -> Result<(), FormatError> {
        // What was read was that deep at most; a little more leaves room to wrap it.
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
            Value::Bytes(bytes) => self.bytes(bytes),
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
            Value::Global(global) => self.global(&global.module, &global.name),
            Value::Object(object) => {
                if let Some(attributes) = namespace(object) {
                    self.global("argparse", "Namespace");
                    self.empty_tuple();
                    self.new_object();
                    self.dict(attributes.iter(), |writer, (key, value)| {
                        writer.nested(key, tensors, depth)?;
                        writer.nested(value, tensors, depth)
                    })?;
                    self.build();
                    return Ok(());
                }
                let problem = format!("an object of class {} cannot be made anew", object.class);
                return Err(FormatError::new("pickle", problem));
            }
            Value::Opaque(opaque) => tensors.opaque(self, opaque)?,
            other => {
                let problem = format!("a {} cannot be written", other.kind());
                return Err(FormatError::new("pickle", problem));
            }
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
