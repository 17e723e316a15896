//! Values of a state dict, for ranks that cannot read them themselves.

use std::sync::Arc;

use bytes::Bytes;

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::tensor::Tensor;
use crate::value::{BigInt, Global, MadeBy, Object, Opaque, Value};

const VALUE: &[u8; 4] = b"dvl2";
/// Every way to make an object, by its number in a message.
const MADE_BY: [MadeBy; 4] = [MadeBy::Call, MadeBy::New, MadeBy::NewWithKeywords, MadeBy::Unknown];
/// Values nest no deeper than this: more than any reader lets through.
const DEPTH_MAX: usize = 256;

impl Value {
    /// The value as a message.
    ///
    /// # Errors
    ///
    /// When it holds a sharded tensor, memory that is lent to a writer, or nests too deeply.
    pub fn to_wire(&self) -> Result<Bytes, PlanError> {
        let mut out = MessageWriter::new(*VALUE);
        out.value(self, DEPTH_MAX)?;
        Ok(out.finish())
    }

    /// The value of a message.
    ///
    /// # Errors
    ///
    /// When the bytes are no value of this version.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut input = MessageReader::new(bytes, *VALUE)?;
        let value = input.value(DEPTH_MAX)?;
        input.finish()?;
        Ok(value)
    }
}

fn deeper(depth: usize) -> Result<usize, PlanError> {
    depth.checked_sub(1).ok_or_else(|| bad(format!("a value nested deeper than {DEPTH_MAX}")))
}

// One function for every kind that nests and one for all others: a frame holds only what its own
// kind needs.

impl MessageWriter {
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
                self.number(18);
                self.bytes(&opaque.encoded);
                self.value(&opaque.view, depth)
            }
            other => self.leaf(other),
        }
    }

    fn values(&mut self, tag: u64, values: &[Value], depth: usize) -> Result<(), PlanError> {
        self.number(tag);
        self.number(values.len() as u64);
        values.iter().try_for_each(|value| self.value(value, depth))
    }

    fn pairs<'a>(
        &mut self,
        tag: u64,
        len: usize,
        mut pairs: impl Iterator<Item = (&'a Value, &'a Value)>,
        depth: usize,
    ) -> Result<(), PlanError> {
        self.number(tag);
        self.number(len as u64);
        pairs.try_for_each(|(key, value)| {
            self.value(key, depth)?;
            self.value(value, depth)
        })
    }

    fn object(&mut self, object: &Object, depth: usize) -> Result<(), PlanError> {
        self.number(17);
        let made_by = MADE_BY.iter().position(|known| *known == object.made_by);
        let made_by = made_by.ok_or_else(|| bad("an object that is made in an unknown way"))?;
        self.number(made_by as u64);
        self.global(&object.class);
        self.values(10, &object.args, depth)?;
        self.number(object.state.is_some().into());
        if let Some(state) = &object.state {
            self.value(state, depth)?;
        }
        self.values(10, &object.items, depth)?;
        let entries = object.entries.iter().map(|(key, value)| (key, value));
        self.pairs(12, object.entries.len(), entries, depth)
    }

    fn leaf(&mut self, value: &Value) -> Result<(), PlanError> {
        match value {
            Value::Bool(b) => self.number(1 + u64::from(*b)),
            Value::Int(n) => {
                self.number(3);
                self.0.extend_from_slice(&n.to_le_bytes());
            }
            Value::BigInt(n) => {
                self.number(4);
                self.bytes(n.to_le_bytes());
            }
            Value::Float(x) => {
                self.number(5);
                self.0.extend_from_slice(&x.to_le_bytes());
            }
            Value::Complex(re, im) => {
                self.number(6);
                self.0.extend_from_slice(&re.to_le_bytes());
                self.0.extend_from_slice(&im.to_le_bytes());
            }
            Value::Str(text) => {
                self.number(7);
                self.text(text);
            }
            Value::Bytes(bytes) => {
                self.number(8);
                self.bytes(bytes);
            }
            Value::ByteArray(bytes) => {
                self.number(9);
                self.bytes(bytes);
            }
            Value::Tensor(tensor) => {
                self.number(15);
                let bytes = tensor.to_vec().filter(|_| !tensor.is_sharded());
                let bytes = bytes.ok_or_else(|| bad("a value holds a tensor that is not whole"))?;
                self.dtype(tensor.dtype());
                self.dims(tensor.shape());
                self.bytes(&bytes);
            }
            Value::Global(global) => {
                self.number(16);
                self.global(global);
            }
            // `None` itself: what nests is not sent here.
            _ => self.number(0),
        }
        Ok(())
    }

    fn global(&mut self, global: &Global) {
        self.text(&global.module);
        self.text(&global.name);
    }
}

impl MessageReader<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, PlanError> {
        let depth = deeper(depth)?;
        match self.number()? {
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
        (0..self.count()?).map(|_| self.value(depth)).collect()
    }

    fn dict(&mut self, depth: usize) -> Result<Value, PlanError> {
        Ok(Value::Dict(self.pairs(depth)?.into_iter().collect()))
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(Value, Value)>, PlanError> {
        (0..self.count()?).map(|_| Ok((self.value(depth)?, self.value(depth)?))).collect()
    }

    fn object(&mut self, depth: usize) -> Result<Value, PlanError> {
        let made_by = usize::try_from(self.number()?).ok().and_then(|at| MADE_BY.get(at).copied());
        let made_by = made_by.ok_or_else(|| bad("an object that is made in an unknown way"))?;
        let class = self.global()?;
        let mut object = Box::new(Object::new(class, self.tagged(10, depth)?));
        object.made_by = made_by;
        object.state = self.option(|input| input.value(depth))?;
        object.items = self.tagged(10, depth)?;
        if self.number()? != 12 {
            return Err(bad("an object without entries"));
        }
        object.entries = self.pairs(depth)?;
        Ok(Value::Object(object))
    }

    fn tagged(&mut self, tag: u64, depth: usize) -> Result<Vec<Value>, PlanError> {
        if self.number()? != tag {
            return Err(bad("an object without a list"));
        }
        self.values(depth)
    }

    fn opaque(&mut self, depth: usize) -> Result<Value, PlanError> {
        let encoded = Bytes::copy_from_slice(self.bytes()?);
        Ok(Value::Opaque(Arc::new(Opaque { encoded, view: self.value(depth)? })))
    }

    fn leaf(&mut self, tag: u64) -> Result<Value, PlanError> {
        Ok(match tag {
            0 => Value::None,
            1 => Value::Bool(false),
            2 => Value::Bool(true),
            3 => Value::Int(i64::from_le_bytes(self.array()?)),
            4 => Value::BigInt(BigInt::from_le_bytes(self.bytes()?.to_vec())),
            5 => Value::Float(f64::from_le_bytes(self.array()?)),
            6 => {
                let (re, im) = (self.array()?, self.array()?);
                Value::Complex(f64::from_le_bytes(re), f64::from_le_bytes(im))
            }
            7 => Value::Str(self.text()?.into()),
            8 => Value::Bytes(Bytes::copy_from_slice(self.bytes()?)),
            9 => Value::ByteArray(Bytes::copy_from_slice(self.bytes()?)),
            15 => {
                let (dtype, shape) = (self.dtype()?, self.dims()?);
                Value::Tensor(Tensor::replicated(dtype, shape, self.bytes()?.to_vec())?)
            }
            16 => Value::Global(self.global()?),
            other => return Err(bad(format!("unknown kind of value {other}"))),
        })
    }

    fn global(&mut self) -> Result<Global, PlanError> {
        let (module, name) = (self.text()?, self.text()?);
        Ok(Global::new(module, name))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PlanError> {
        let (array, rest) = self.0.split_first_chunk().ok_or_else(|| bad("it ends too early"))?;
        self.0 = rest;
        Ok(*array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::value::Dict;

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
