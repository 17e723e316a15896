//! Encodes state-dict values, for ranks that cannot read them themselves.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::state::value::{BigInt, Global, MadeBy, Object, Opaque, Value};
use crate::tensors::tensor::Tensor;

const VALUE: &[u8; 4] = b"dvl3";
/// Kinds of construction, by their number in a message.
const MADE_BY: [MadeBy; 4] = [MadeBy::Call, MadeBy::New, MadeBy::NewWithKeywords, MadeBy::Unknown];
/// The maximum nesting depth, beyond what any reader accepts.
const DEPTH_MAX: usize = 256;

impl Value {
    /// Encodes the value as a message.
    ///
    /// # Errors
    ///
    /// When it contains a sharded tensor or memory that is lent to a writer, or is nested too
    /// deeply.
    pub fn to_wire(&self) -> Result<Bytes, PlanError> {
        let mut sender = Sender { out: MessageWriter::new(*VALUE), sent: HashMap::new() };
        sender.value(self, DEPTH_MAX)?;
        Ok(sender.out.finish())
    }

    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a value of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let input = MessageReader::new(bytes, *VALUE)?;
        let mut receiver = Receiver { input, received: Vec::new() };
        let value = receiver.value(DEPTH_MAX)?;
        receiver.input.finish()?;
        Ok(value)
    }
}

fn deeper(depth: usize) -> Result<usize, PlanError> {
    depth.checked_sub(1).ok_or_else(|| bad(format!("a value nested deeper than {DEPTH_MAX}")))
}

/// Strings and bytes of at least this length are sent once, however many values share them.
const SHARED_MIN: usize = 64;

/// Encodes a value.
struct Sender {
    out: MessageWriter,
    /// The number of each blob sent, by address and length.
    sent: HashMap<(*const u8, usize), u64>,
}

/// Decodes a value.
struct Receiver<'a> {
    input: MessageReader<'a>,
    received: Vec<Blob>,
}

/// Bytes that several values may share, as bytes or as text.
#[derive(Clone)]
struct Blob {
    bytes: Bytes,
    text: Option<Arc<str>>,
    /// Its number among the received blobs.
    at: Option<usize>,
}

// One function per nested kind and one for all others, so that a frame contains only what its kind
// needs.

impl Sender {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), PlanError> {
        let depth = deeper(depth)?;
        match value {
            Value::List(items) => self.values(10, items, depth),
            Value::Tuple(items) => self.values(11, items, depth),
            Value::Dict(dict) => self.pairs(12, dict.len(), dict.iter(), depth),
            Value::Set(items) => self.values(13, items, depth),
            Value::FrozenSet(items) => self.values(14, items, depth),
            Value::Object(object) => self.object(object, depth),
            Value::Opaque(opaque) => {
                self.out.number(18);
                self.blob(&opaque.encoded);
                self.value(&opaque.view, depth)
            }
            other => self.leaf(other),
        }
    }

    fn values(&mut self, tag: u64, values: &[Value], depth: usize) -> Result<(), PlanError> {
        self.out.number(tag);
        self.out.number(values.len() as u64);
        values.iter().try_for_each(|value| self.value(value, depth))
    }

    fn pairs<'a>(
        &mut self,
        tag: u64,
        len: usize,
        mut pairs: impl Iterator<Item = (&'a Value, &'a Value)>,
        depth: usize,
    ) -> Result<(), PlanError> {
        self.out.number(tag);
        self.out.number(len as u64);
        pairs.try_for_each(|(key, value)| {
            self.value(key, depth)?;
            self.value(value, depth)
        })
    }

    fn object(&mut self, object: &Object, depth: usize) -> Result<(), PlanError> {
        self.out.number(17);
        let made_by = MADE_BY.iter().position(|known| *known == object.made_by);
        let made_by = made_by.ok_or_else(|| bad("an object that is made in an unknown way"))?;
        self.out.number(made_by as u64);
        self.global(&object.class);
        self.values(10, &object.args, depth)?;
        self.out.number(object.state.is_some().into());
        if let Some(state) = &object.state {
            self.value(state, depth)?;
        }
        self.values(10, &object.items, depth)?;
        let entries = object.entries.iter().map(|(key, value)| (key, value));
        self.pairs(12, object.entries.len(), entries, depth)
    }

    fn leaf(&mut self, value: &Value) -> Result<(), PlanError> {
        match value {
            Value::Bool(b) => self.out.number(1 + u64::from(*b)),
            Value::Int(n) => {
                self.out.number(3);
                self.out.0.extend_from_slice(&n.to_le_bytes());
            }
            Value::BigInt(n) => {
                self.out.number(4);
                self.out.bytes(n.to_le_bytes());
            }
            Value::Float(x) => {
                self.out.number(5);
                self.out.0.extend_from_slice(&x.to_le_bytes());
            }
            Value::Complex(re, im) => {
                self.out.number(6);
                self.out.0.extend_from_slice(&re.to_le_bytes());
                self.out.0.extend_from_slice(&im.to_le_bytes());
            }
            Value::Str(text) => {
                self.out.number(7);
                self.text(text);
            }
            Value::Bytes(bytes) => {
                self.out.number(8);
                self.blob(bytes);
            }
            Value::ByteArray(bytes) => {
                self.out.number(9);
                self.blob(bytes);
            }
            Value::Tensor(tensor) => {
                self.out.number(15);
                let bytes = tensor.to_vec().filter(|_| !tensor.is_sharded());
                let bytes = bytes.ok_or_else(|| bad("a value holds a tensor that is not whole"))?;
                self.out.dtype(tensor.dtype());
                self.out.dims(tensor.shape());
                self.out.bytes(&bytes);
            }
            Value::Global(global) => {
                self.out.number(16);
                self.global(global);
            }
            // `None`; nested kinds are not sent here.
            _ => self.out.number(0),
        }
        Ok(())
    }

    fn global(&mut self, global: &Global) {
        self.text(&global.module);
        self.text(&global.name);
    }

    fn text(&mut self, text: &str) {
        self.blob(text.as_bytes());
    }

    /// Writes bytes, or the number of an earlier equal blob.
    fn blob(&mut self, bytes: &[u8]) {
        if bytes.len() >= SHARED_MIN {
            let next = self.sent.len() as u64;
            match self.sent.entry((bytes.as_ptr(), bytes.len())) {
                Entry::Occupied(known) => return self.out.number(1 + *known.get()),
                Entry::Vacant(new) => _ = new.insert(next),
            }
        }
        self.out.number(0);
        self.out.bytes(bytes);
    }
}

impl Receiver<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, PlanError> {
        let depth = deeper(depth)?;
        match self.input.number()? {
            10 => self.values(depth).map(Value::List),
            11 => self.values(depth).map(Value::Tuple),
            12 => self.dict(depth),
            13 => self.values(depth).map(Value::Set),
            14 => self.values(depth).map(Value::FrozenSet),
            17 => self.object(depth),
            18 => self.opaque(depth),
            tag => self.leaf(tag),
        }
    }

    fn values(&mut self, depth: usize) -> Result<Vec<Value>, PlanError> {
        (0..self.input.count()?).map(|_| self.value(depth)).collect()
    }

    fn dict(&mut self, depth: usize) -> Result<Value, PlanError> {
        Ok(Value::Dict(self.pairs(depth)?.into_iter().collect()))
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(Value, Value)>, PlanError> {
        (0..self.input.count()?).map(|_| Ok((self.value(depth)?, self.value(depth)?))).collect()
    }

    fn object(&mut self, depth: usize) -> Result<Value, PlanError> {
        let made_by =
            usize::try_from(self.input.number()?).ok().and_then(|at| MADE_BY.get(at).copied());
        let made_by = made_by.ok_or_else(|| bad("an object that is made in an unknown way"))?;
        let class = self.global()?;
        let mut object = Box::new(Object::new(class, self.tagged(10, depth)?));
        object.made_by = made_by;
        object.state = match self.input.number()? {
            0 => None,
            1 => Some(self.value(depth)?),
            other => return Err(bad(format!("neither a state nor none but {other}"))),
        };
        object.items = self.tagged(10, depth)?;
        if self.input.number()? != 12 {
            return Err(bad("an object without entries"));
        }
        object.entries = self.pairs(depth)?;
        Ok(Value::Object(object))
    }

    fn tagged(&mut self, tag: u64, depth: usize) -> Result<Vec<Value>, PlanError> {
        if self.input.number()? != tag {
            return Err(bad("an object without a list"));
        }
        self.values(depth)
    }

    fn opaque(&mut self, depth: usize) -> Result<Value, PlanError> {
        let encoded = self.blob()?.bytes;
        Ok(Value::Opaque(Arc::new(Opaque { encoded, view: self.value(depth)? })))
    }

    fn leaf(&mut self, tag: u64) -> Result<Value, PlanError> {
        Ok(match tag {
            0 => Value::None,
            1 => Value::Bool(false),
            2 => Value::Bool(true),
            3 => Value::Int(i64::from_le_bytes(self.input.array()?)),
            4 => Value::BigInt(BigInt::from_le_bytes(self.input.bytes()?.to_vec())),
            5 => Value::Float(f64::from_le_bytes(self.input.array()?)),
            6 => {
                let (re, im) = (self.input.array()?, self.input.array()?);
                Value::Complex(f64::from_le_bytes(re), f64::from_le_bytes(im))
            }
            7 => Value::Str(self.text()?),
            8 => Value::Bytes(self.blob()?.bytes),
            9 => Value::ByteArray(self.blob()?.bytes),
            15 => {
                let (dtype, shape) = (self.input.dtype()?, self.input.dims()?);
                Value::Tensor(Tensor::replicated(dtype, shape, self.input.bytes()?.to_vec())?)
            }
            16 => Value::Global(self.global()?),
            other => return Err(bad(format!("unknown kind of value {other}"))),
        })
    }

    fn global(&mut self) -> Result<Global, PlanError> {
        let (module, name) = (self.text()?, self.text()?);
        Ok(Global::new(module, name))
    }

    fn text(&mut self) -> Result<Arc<str>, PlanError> {
        let blob = self.blob()?;
        if let Some(text) = blob.text {
            return Ok(text);
        }
        let text = std::str::from_utf8(&blob.bytes).map_err(|_| bad("text that is not UTF-8"))?;
        let text: Arc<str> = text.into();
        if let Some(known) = blob.at.and_then(|at| self.received.get_mut(at)) {
            known.text = Some(Arc::clone(&text));
        }
        Ok(text)
    }

    fn blob(&mut self) -> Result<Blob, PlanError> {
        if let Some(at) = self.input.number()?.checked_sub(1) {
            let known = usize::try_from(at).ok().and_then(|at| self.received.get(at));
            return known.cloned().ok_or_else(|| bad("it refers to what was not sent"));
        }
        let bytes = Bytes::copy_from_slice(self.input.bytes()?);
        let mut blob = Blob { bytes, text: None, at: None };
        if blob.bytes.len() >= SHARED_MIN {
            blob.at = Some(self.received.len());
            self.received.push(blob.clone());
        }
        Ok(blob)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::value::Dict;
    use crate::tensors::dtype::DType;

    fn sample() -> Value {
        let mut object = Object::new(Global::new("m", "C"), vec![Value::Int(-1)]);
        object.state = Some(Value::Dict(Dict::from([("lr", 0.1)])));
        object.items = vec![Value::Bool(true), Value::Bool(false)];
        object.entries = vec![(Value::Str("k".into()), Value::None)];
        object.made_by = MadeBy::New;
        let tensor = Tensor::replicated(DType::Int16, [2], vec![1, 2, 3, 4]).unwrap();
        let view = Value::Set(vec![Value::Int(3)]);
        Value::Tuple(vec![
            Value::Object(Box::new(object)),
            Value::Tensor(tensor),
            Value::BigInt(BigInt::from_le_bytes(vec![7; 12])),
            Value::Complex(1.5, f64::NAN),
            Value::Bytes(Bytes::from_static(b"b")),
            Value::ByteArray(Bytes::from_static(b"")),
            Value::List(vec![Value::FrozenSet(Vec::new()), Value::Global(Global::new("a", "b"))]),
            Value::Opaque(Arc::new(Opaque { encoded: Bytes::from_static(b"zip"), view })),
        ])
    }

    #[test]
    fn every_kind_of_value_arrives_as_it_was_sent() {
        let value = sample();
        let found = Value::from_wire(&value.to_wire().unwrap()).unwrap();
        assert!(found.same(&value), "{found:?}");
    }

    /// A file of little more than a MiB may refer to one text in a hundred thousand places.
    #[test]
    fn what_values_share_is_sent_once() {
        let text: Arc<str> = "x".repeat(1 << 20).into();
        let bytes = Bytes::from(vec![7; 1 << 20]);
        let class = Global::new(Arc::clone(&text), "C");
        let each = (0..10_000).flat_map(|_| {
            [
                Value::Str(Arc::clone(&text)),
                Value::Bytes(bytes.clone()),
                Value::ByteArray(bytes.clone()),
                Value::Global(class.clone()),
            ]
        });
        let value = Value::List(each.collect());
        let wire = value.to_wire().unwrap();
        assert!(wire.len() < 3 << 20, "{} bytes", wire.len());
        let Value::List(found) = Value::from_wire(&wire).unwrap() else { panic!("no list") };
        assert_eq!(found.len(), 40_000);
        let same = |a: &Value, b: &Value| match (a, b) {
            (Value::Str(a), Value::Str(b)) => Arc::ptr_eq(a, b) && **a == *text,
            (Value::Bytes(a), Value::Bytes(b)) | (Value::ByteArray(a), Value::ByteArray(b)) => {
                a.as_ptr() == b.as_ptr() && *a == bytes
            }
            (Value::Global(a), Value::Global(b)) => Arc::ptr_eq(&a.module, &b.module),
            _ => false,
        };
        for values in found.chunks(4) {
            let all = values.iter().zip(&found).all(|(a, b)| same(a, b));
            assert!(all, "what was shared is shared no more");
        }
    }

    #[test]
    fn what_cannot_be_sent_or_is_damaged_is_refused() {
        let sharded = Tensor::sharded(DType::Int8, [2], Vec::new()).unwrap();
        assert!(Value::Tensor(sharded).to_wire().is_err());
        let deep = (0..DEPTH_MAX).fold(Value::None, |inner, _| Value::List(vec![inner]));
        assert!(deep.to_wire().is_err());
        let wire = sample().to_wire().unwrap();
        for len in 0..wire.len() {
            assert!(Value::from_wire(&wire[..len]).is_err(), "{len}");
        }
        for at in 0..8 * wire.len() {
            let mut damaged = wire.to_vec();
            damaged[at / 8] ^= 1 << (at % 8);
            let _ = Value::from_wire(&damaged);
        }
        let nested = [&VALUE[..], &[10, 1].repeat(100_000)].concat();
        assert!(Value::from_wire(&nested).is_err());
    }
}
