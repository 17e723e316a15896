//! Python objects as `torch.save` stores them: archives of a pickle and, where the object holds
//! tensors, their storages.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{FormatError, Global, MadeBy, Object, Opaque, PathItem, Tensor, Value, beginning};

use crate::pickle::{
    Converted, Converter, ForeignName, Hook, Limits, NodeId, Pickle, TensorSink, Trust, Writer,
    not_alone,
};
use crate::torch_tensor::{
    ByteOrder, Quantizer, TensorLayout, byte_order, small_record, storage_record,
};
use crate::torch_zip::{ArchiveEncoder, ArchiveIndex, Halt, RecordSet, Sparse};

/// A deflated record may grow to this; PyTorch's own are stored.
const INFLATED_MAX: u64 = 1 << 30;
/// Tensors with strides of 0 may together be larger than the archive by this much.
const EXPANDED_MAX: u64 = 16 << 20;

/// The object in an archive of `torch.save`.
///
/// Plain data becomes plain values, tensors in it included. Whatever else it holds (objects of
/// classes, shared or cyclic containers, tensors that share a storage, names that Python would
/// import only to throw them away) makes the whole a [`Value::Opaque`], which [`encode_object`]
/// writes back unchanged.
///
/// # Errors
///
/// When archive or pickle are damaged, or a record's CRC differs.
pub fn decode_object(blob: &Bytes) -> Result<Value, FormatError> {
    let converted = read(blob)?;
    if converted.faithful {
        return Ok(converted.value);
    }
    let opaque = Opaque { encoded: blob.clone(), view: converted.value };
    Ok(Value::Opaque(Arc::new(opaque)))
}

/// The archive that `torch.save` of PyTorch 2.15 makes of a value, byte for byte except for the
/// serialization id, where Python's objects are shared as [`Writer`] says.
///
/// # Errors
///
/// When the value holds an opaque value inside of other data, a tensor that is not all here, or
/// what [`Writer::value`] cannot write.
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
        let bytes = tensor.to_vec().ok_or_else(|| bad("not all of the tensor is here"))?;
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

/// The names in a value that Python would import where it is loaded from an archive of
/// [`encode_object`], and that are not known to be harmless.
///
/// # Errors
///
/// When it holds an object whose kept archive or pickle is damaged.
pub fn foreign_names(value: &Value) -> Result<Vec<ForeignName>, FormatError> {
    let mut found = Vec::new();
    let mut open = vec![(value, Vec::new())];
    while let Some((value, path)) = open.pop() {
        let below = |item| path.iter().cloned().chain([item]).collect::<Vec<PathItem>>();
        let mut name = |global: &Global| {
            // What has no module stands for a part that was left out, or made by other parts.
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

/// Whether a value is of a kind that names can be in.
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

/// The most of a path that is kept, in bytes.
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

/// The same of an object in its archive.
fn foreign_names_in(archive: &Bytes) -> Result<Vec<ForeignName>, FormatError> {
    let names = || -> Result<_, Halt> {
        let sparse = Sparse::whole(archive);
        let index = ArchiveIndex::read(&sparse)?;
        let pickle = small_record(&sparse, index.require("data.pkl")?, INFLATED_MAX)?;
        Ok(Pickle::parse(&pickle, &Limits::DEFAULT)?.foreign_names())
    };
    Ok(names()?)
}

/// Gives tensors in a pickle the bytes of their storages.
pub(crate) struct Tensors<'a> {
    byte_order: ByteOrder,
    /// Bytes that tensors may still take.
    budget: u64,
    /// Brings the whole storage of a tensor.
    load: Box<Load<'a>>,
    storages: HashMap<Box<str>, Cow<'a, [u8]>>,
}

type Load<'a> = dyn FnMut(&TensorLayout) -> Result<Cow<'a, [u8]>, Halt> + 'a;

impl<'a> Tensors<'a> {
    /// For tensors whose storages have `byte_len` bytes together, and which `load` brings.
    pub(crate) fn new(
        byte_order: ByteOrder,
        byte_len: u64,
        load: impl FnMut(&TensorLayout) -> Result<Cow<'a, [u8]>, Halt> + 'a,
    ) -> Self {
        let budget = byte_len.saturating_mul(2).saturating_add(EXPANDED_MAX);
        Self { byte_order, budget, load: Box::new(load), storages: HashMap::new() }
    }

    /// A quantized tensor as a call of the function that makes one, of its stored numbers and of
    /// what turns them into real ones: the scheme's name, scale, zero point and axis.
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

    /// The tensor, and whether no other tensor had this storage before.
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
        // Packed types have fewer bytes than a tensor of their shape; too large ones stay parts.
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
