//! Python objects as `torch.save` stores them: archives of a pickle and the storages of its
//! tensors.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::path::PathItem;
use dcp_core::text::beginning;
use dcp_core::value::{Global, MadeBy, Object, Opaque};
use dcp_core::{FormatError, Tensor, Value};

use crate::pickle::{
    Converted, Converter, ForeignName, Hook, Limits, NodeId, Pickle, TensorSink, Trust, Writer,
    not_alone,
};
use crate::torch_tensor::{
    ByteOrder, Quantizer, TensorLayout, byte_order, small_record, storage_record,
};
use crate::torch_zip::{ArchiveEncoder, ArchiveIndex, Halt, RecordSet, Sparse};

/// The maximum size of an inflated record; PyTorch stores records without compression.
const INFLATED_MAX: u64 = 1 << 30;
/// The number of bytes by which tensors with strides of 0 may exceed twice the archive, in all.
const EXPANDED_MAX: u64 = 16 << 20;

/// Decodes the object of a `torch.save` archive.
///
/// Plain data, including tensors in it, becomes plain values. An object with anything else
/// (instances of classes, shared or cyclic containers, tensors that share a storage, names that
/// Python imports and discards) becomes one [`Value::Opaque`], which [`encode_object`] writes
/// unchanged.
///
/// # Errors
///
/// When the archive or the pickle is damaged, or a record's CRC differs.
pub fn decode_object(blob: &Bytes) -> Result<Value, FormatError> {
    let converted = read(blob)?;
    if converted.faithful {
        return Ok(converted.value);
    }
    let opaque = Opaque { encoded: blob.clone(), view: converted.value };
    Ok(Value::Opaque(Arc::new(opaque)))
}

/// Encodes a value as `torch.save` of PyTorch 2.15 does, byte for byte but for the serialization
/// id, if Python's objects are shared as [`Writer`] documents.
///
/// # Errors
///
/// When the value contains an opaque value within other data, a tensor that is not fully in memory,
/// or a value that [`Writer::value`] cannot write.
pub fn encode_object(value: &Value) -> Result<Bytes, FormatError> {
    if let Value::Opaque(opaque) = value {
        return Ok(opaque.encoded.clone());
    }
    let mut writer = Writer::new();
    let mut storages = Storages::default();
    writer.value(value, &mut storages)?;
    let slices: Vec<&[u8]> = storages.0.iter().map(|bytes| &**bytes).collect();
    ArchiveEncoder::encode(RecordSet::default(), writer.finish()?, &slices)
}

#[derive(Default)]
struct Storages(Vec<Vec<u8>>);

impl TensorSink for Storages {
    fn tensor(&mut self, writer: &mut Writer, tensor: &Tensor) -> Result<(), FormatError> {
        let bad = |problem: &str| FormatError::new("tensor in an object", problem);
        if tensor.dtype().is_quantized() {
            return Err(bad("a quantized tensor needs its scale, which is not known here"));
        }
        let bytes =
            tensor.to_vec().ok_or_else(|| bad("not all of the tensor is in host memory"))?;
        TensorLayout::contiguous(tensor.dtype(), tensor.shape().clone())?
            .with_storage_key(self.0.len().to_string())
            .write(writer);
        self.0.push(bytes);
        Ok(())
    }

    fn opaque(&mut self, _: &mut Writer, opaque: &Opaque) -> Result<(), FormatError> {
        Err(not_alone(opaque))
    }
}

fn read(blob: &Bytes) -> Result<Converted, Halt> {
    let sparse = Sparse::whole(blob);
    let index = ArchiveIndex::read(&sparse)?;
    let pickle = small_record(&sparse, index.require("data.pkl")?, INFLATED_MAX)?;
    let pickle = Pickle::parse(&pickle, &Limits::DEFAULT)?;
    let byte_order = byte_order(&sparse, &index)?;
    let mut tensors = Tensors::new(byte_order, blob.len() as u64, |layout| {
        let record = storage_record(&sparse, &index, layout)?;
        let kept = sparse.need("a storage", record.data.clone())?;
        Ok(record.decode(kept, INFLATED_MAX)?)
    });
    let converted =
        Converter::new(&pickle, &Limits::DEFAULT, &mut tensors).convert(pickle.root())?;
    let faithful = converted.faithful && !pickle.has_foreign_names();
    Ok(Converted { faithful, ..converted })
}

/// The names that Python imports when it loads a value from an archive of [`encode_object`], and
/// that are not known to be harmless.
///
/// # Errors
///
/// When it holds an object whose stored archive or pickle is damaged.
pub fn foreign_names(value: &Value) -> Result<Vec<ForeignName>, FormatError> {
    let mut found = Vec::new();
    let mut open = vec![(value, Vec::new())];
    while let Some((value, path)) = open.pop() {
        let below = |item| path.iter().cloned().chain([item]).collect::<Vec<PathItem>>();
        let mut name = |global: &Global| {
            // Names without a module are parts that were left out, or built from other parts.
            if !global.module.is_empty() {
                let path = Some(joined(&path));
                found.extend(ForeignName::new(&global.module, &global.name, path));
            }
        };
        match value {
            Value::Global(global) => name(global),
            Value::Opaque(opaque) => {
                let names = foreign_names_in(&opaque.encoded)?;
                found.extend(names.into_iter().map(|mut name| {
                    let inner = name.path.take();
                    name.path = inner.map(|inner| match (path.is_empty(), inner.is_empty()) {
                        (true, _) => inner,
                        (false, true) => joined(&path),
                        (false, false) => format!("{}.{inner}", joined(&path)),
                    });
                    name
                }));
            }
            Value::Object(object)
                if object.made_by == MadeBy::New
                    && object.args.is_empty()
                    && Trust::of_instances(&object.class.module, &object.class.name)
                        == Trust::Harmless =>
            {
                let parts = object.state.iter().chain(&object.items);
                open.extend(parts.map(|part| (part, path.clone())));
                let pairs = object.entries.iter().flat_map(|(key, item)| [key, item]);
                open.extend(pairs.map(|part| (part, path.clone())));
            }
            Value::Object(object) => {
                name(&object.class);
                let parts = object.args.iter().chain(&object.state).chain(&object.items);
                open.extend(parts.map(|part| (part, path.clone())));
                let pairs = object.entries.iter().flat_map(|(key, item)| [key, item]);
                open.extend(pairs.map(|part| (part, path.clone())));
            }
            Value::List(items)
            | Value::Tuple(items)
            | Value::Set(items)
            | Value::FrozenSet(items) => {
                let items = (0..).zip(items).filter(|(_, item)| may_name(item));
                open.extend(items.map(|(at, item)| (item, below(PathItem::Index(at)))));
            }
            Value::Dict(dict) => {
                for (key, item) in dict.iter() {
                    open.extend(may_name(key).then(|| (key, path.clone())));
                    if !may_name(item) {
                        continue;
                    }
                    let step = match key {
                        Value::Str(key) => PathItem::Key(Arc::clone(key)),
                        Value::Int(key) => PathItem::Key(key.to_string().into()),
                        _ => PathItem::Key("?".into()),
                    };
                    open.push((item, below(step)));
                }
            }
            _ => {}
        }
    }
    found.sort_by(|a, b| (&a.path, &a.module, &a.name).cmp(&(&b.path, &b.module, &b.name)));
    Ok(found)
}

/// Whether a value is of a kind that can contain names.
fn may_name(value: &Value) -> bool {
    matches!(
        value,
        Value::Global(_)
            | Value::Opaque(_)
            | Value::Object(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::Set(_)
            | Value::FrozenSet(_)
            | Value::Dict(_)
    )
}

/// The maximum length of a stored path, in bytes.
const PATH_MAX: usize = 256;

fn joined(path: &[PathItem]) -> String {
    let mut joined = String::new();
    for (at, step) in path.iter().enumerate() {
        if at > 0 {
            joined.push('.');
        }
        match step {
            PathItem::Key(key) => {
                joined.push_str(beginning(key, PATH_MAX));
            }
            PathItem::Index(at) => joined.push_str(&at.to_string()),
        }
        if joined.len() > PATH_MAX {
            joined.truncate(beginning(&joined, PATH_MAX).len());
            joined.push('…');
            break;
        }
    }
    joined
}

/// Like [`foreign_names`], for an object in its archive.
fn foreign_names_in(archive: &Bytes) -> Result<Vec<ForeignName>, FormatError> {
    let names = || -> Result<_, Halt> {
        let sparse = Sparse::whole(archive);
        let index = ArchiveIndex::read(&sparse)?;
        let pickle = small_record(&sparse, index.require("data.pkl")?, INFLATED_MAX)?;
        Ok(Pickle::parse(&pickle, &Limits::DEFAULT)?.foreign_names())
    };
    Ok(names()?)
}

/// Reads the storages of tensors in a pickle.
pub(crate) struct Tensors<'a> {
    byte_order: ByteOrder,
    /// The number of bytes that further tensors may occupy.
    budget: u64,
    /// Loads the whole storage of a tensor.
    load: Box<Load<'a>>,
    storages: HashMap<Box<str>, Cow<'a, [u8]>>,
}

type Load<'a> = dyn FnMut(&TensorLayout) -> Result<Cow<'a, [u8]>, Halt> + 'a;

impl<'a> Tensors<'a> {
    /// Reads tensors whose storages, which `load` returns, have `byte_len` bytes in all.
    pub(crate) fn new(
        byte_order: ByteOrder,
        byte_len: u64,
        load: impl FnMut(&TensorLayout) -> Result<Cow<'a, [u8]>, Halt> + 'a,
    ) -> Self {
        let budget = byte_len.saturating_mul(2).saturating_add(EXPANDED_MAX);
        Self { byte_order, budget, load: Box::new(load), storages: HashMap::new() }
    }

    /// A quantized tensor as the call that rebuilds it: its stored integers, and the scheme's name,
    /// scale, zero point and axis.
    fn quantized(&mut self, stored: Tensor, quantizer: &Quantizer) -> Result<Value, Halt> {
        let name = |scheme: &str| Value::Global(Global::new("torch", scheme));
        let how = match quantizer {
            Quantizer::PerTensor { scale, zero_point } => {
                vec![name("per_tensor_affine"), Value::Float(*scale), Value::Int(*zero_point)]
            }
            Quantizer::PerChannel { scales, zero_points, axis, float_zero_points } => {
                let scheme = match float_zero_points {
                    true => "per_channel_affine_float_qparams",
                    false => "per_channel_affine",
                };
                let axis = Value::Int(i64::try_from(*axis).unwrap_or(i64::MAX));
                let scales = Value::Tensor(self.tensor(scales)?.0);
                let zero_points = Value::Tensor(self.tensor(zero_points)?.0);
                vec![name(scheme), scales, zero_points, axis]
            }
        };
        let class = Global::new("torch._utils", "_rebuild_qtensor");
        let args = vec![Value::Tensor(stored), Value::Tuple(how)];
        let mut object = Object::new(class, args);
        object.made_by = MadeBy::Unknown;
        Ok(Value::Object(Box::new(object)))
    }

    /// Reads a tensor. Also returns whether it is the first of its storage.
    fn tensor(&mut self, layout: &TensorLayout) -> Result<(Tensor, bool), Halt> {
        let key = &layout.storage().key;
        let fresh = !self.storages.contains_key(key);
        if fresh {
            let storage = (self.load)(layout)?;
            self.storages.insert(key.clone(), storage);
        }
        let storage = self.storages.get(key).map(|bytes| &**bytes).unwrap_or_default();
        let elements = layout.gather(storage, self.byte_order, self.budget)?;
        self.budget = self.budget.saturating_sub(elements.len() as u64);
        let tensor = Tensor::replicated(layout.dtype(), layout.sizes().clone(), elements)
            .map_err(|error| FormatError::new("tensor in an object", error.to_string()))?;
        Ok((tensor, fresh))
    }
}

impl Hook for Tensors<'_> {
    fn object(
        &mut self,
        pickle: &Pickle<'_>,
        id: NodeId,
    ) -> Result<Option<Converted>, FormatError> {
        let Some(layout) = TensorLayout::from_node(pickle, id)? else { return Ok(None) };
        // Packed dtypes have fewer bytes than elements; tensors that are too large stay unread.
        let elements = layout.sizes().checked_volume().unwrap_or(u64::MAX);
        let unpacked = elements.checked_mul(layout.dtype().size() as u64);
        if unpacked != Some(layout.byte_len()) || layout.byte_len() > self.budget {
            return Ok(None);
        }
        let (tensor, fresh) = self.tensor(&layout)?;
        if let Some(quantizer) = layout.quantizer() {
            let value = self.quantized(tensor, quantizer)?;
            return Ok(Some(Converted { value, faithful: false }));
        }
        let whole = layout.byte_len() == layout.storage().byte_len;
        let plain = layout.contiguous_range().is_some()
            && !layout.requires_grad()
            && !layout.is_parameter()
            && !layout.has_python_state()
            && &*layout.storage().location == "cpu";
        let faithful = fresh && whole && plain && self.byte_order == ByteOrder::Little;
        Ok(Some(Converted { value: Value::Tensor(tensor), faithful }))
    }
}
