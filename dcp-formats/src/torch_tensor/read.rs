//! Reads tensors from pickles.

use dcp_core::{DType, Dims, FormatError};

use super::layout::{Quantizer, StorageRef, TensorLayout, bad};
use super::storage_class::StorageClass;
use super::wrapped::wrapped;
use crate::pickle::{Limits, Node, NodeId, Pickle};

/// The maximum nesting of tensors: a parameter contains a tensor, a quantizer its scales.
const NESTING_MAX: usize = 4;

impl TensorLayout {
    /// The tensor of a `data.pkl`.
    ///
    /// # Errors
    ///
    /// When the pickle is damaged, contains anything but one tensor, or the tensor exceeds its
    /// storage.
    pub fn from_pickle(pickle: &[u8]) -> Result<Self, FormatError> {
        let pickle = Pickle::parse(pickle, &Limits::DEFAULT)?;
        Self::from_node(&pickle, pickle.root())?.ok_or_else(|| {
            if let Some(tensor) = wrapped(&pickle, pickle.root()) {
                return bad(format!(
                    "it holds a tensor of the class {}, which consists of several tensors; \
                     `Keys::exclude` leaves it out",
                    tensor.class
                ));
            }
            let found = match pickle.object(pickle.root()) {
                Some(object) => match pickle.global_name(object.class) {
                    Some((module, name)) => format!("an object of {module}.{name}"),
                    None => "an object".into(),
                },
                None => "plain data".into(),
            };
            bad(format!("it holds {found} where a tensor should be"))
        })
    }

    /// The tensor of a node; `None` unless the node calls one of PyTorch's functions that rebuild
    /// strided tensors.
    ///
    /// # Errors
    ///
    /// When the arguments of such a call are invalid.
    pub fn from_node(pickle: &Pickle<'_>, id: NodeId) -> Result<Option<Self>, FormatError> {
        tensor(pickle, id, NESTING_MAX)
    }
}

fn tensor(
    pickle: &Pickle<'_>,
    id: NodeId,
    nesting: usize,
) -> Result<Option<TensorLayout>, FormatError> {
    let Some(nesting) = nesting.checked_sub(1) else {
        return Err(bad("tensors are nested in each other"));
    };
    let Some(object) = pickle.object(id) else { return Ok(None) };
    let plain = object.state.is_none()
        && pickle.object_items(object).is_empty()
        && pickle.object_entries(object).is_empty();
    match plain {
        true => rebuilt(pickle, object.class, pickle.tuple(object.args), nesting),
        false => Ok(None),
    }
}

/// The result of calling one of PyTorch's functions.
fn rebuilt(
    pickle: &Pickle<'_>,
    function: NodeId,
    args: &[NodeId],
    nesting: usize,
) -> Result<Option<TensorLayout>, FormatError> {
    let function = match (pickle.global_name(function), args) {
        // A tensor with attributes or of a subclass: the wrapped function, and its result.
        (Some(("torch._tensor", "_rebuild_from_type_v2")), [inner, _class, args, _state]) => {
            let Some(nesting) = nesting.checked_sub(1) else {
                return Err(bad("tensors are nested in each other"));
            };
            let layout = rebuilt(pickle, *inner, pickle.tuple(*args), nesting)?;
            return Ok(layout.map(|layout| TensorLayout { python_state: true, ..layout }));
        }
        (Some(("torch._utils", function)), _) => function,
        _ => return Ok(None),
    };
    // A dtype of a later PyTorch: unreadable, but not damaged.
    if function == "_rebuild_tensor_v3"
        && let Some(dtype) = args.get(6)
        && let Some(("torch", name)) = pickle.global_name(*dtype)
        && name.parse::<DType>().is_err()
    {
        return Ok(None);
    }
    let malformed = || bad(format!("the arguments of {function} make no sense"));
    let read = match (function, args) {
        ("_rebuild_tensor", args @ [_, _, _, _]) => strided(pickle, args, None),
        ("_rebuild_tensor_v2", [args @ .., grad, _hooks]) if args.len() == 4 => {
            strided(pickle, args, None).and_then(|layout| with_grad(pickle, layout, *grad))
        }
        ("_rebuild_tensor_v2", [args @ .., grad, _hooks, bits]) if args.len() == 4 => {
            strided(pickle, args, None)
                .and_then(|layout| with_grad(pickle, layout, *grad))
                .and_then(|layout| with_math_bits(pickle, layout, *bits))
        }
        ("_rebuild_tensor_v3", [args @ .., grad, _hooks, dtype]) if args.len() == 4 => {
            strided(pickle, args, Some(*dtype)).and_then(|layout| with_grad(pickle, layout, *grad))
        }
        ("_rebuild_tensor_v3", [args @ .., grad, _hooks, dtype, bits]) if args.len() == 4 => {
            strided(pickle, args, Some(*dtype))
                .and_then(|layout| with_grad(pickle, layout, *grad))
                .and_then(|layout| with_math_bits(pickle, layout, *bits))
        }
        ("_rebuild_qtensor", [args @ .., params, grad, _hooks]) if args.len() == 4 => {
            let layout =
                strided(pickle, args, None).and_then(|layout| with_grad(pickle, layout, *grad));
            let quantizer = quantizer(pickle, *params, nesting)?;
            layout
                .zip(quantizer)
                .map(|(layout, quantizer)| TensorLayout { quantizer: Some(quantizer), ..layout })
        }
        ("_rebuild_parameter", [inner, grad, _hooks]) => {
            let Some(layout) = tensor(pickle, *inner, nesting)? else { return Ok(None) };
            with_grad(pickle, layout, *grad)
                .map(|layout| TensorLayout { parameter: true, ..layout })
        }
        ("_rebuild_parameter_with_state", [inner, grad, _hooks, _state]) => {
            let Some(layout) = tensor(pickle, *inner, nesting)? else { return Ok(None) };
            with_grad(pickle, layout, *grad).map(|layout| TensorLayout {
                parameter: true,
                python_state: true,
                ..layout
            })
        }
        ("_rebuild_device_tensor_from_cpu_tensor", [inner, _dtype, _device, grad]) => {
            let Some(layout) = tensor(pickle, *inner, nesting)? else { return Ok(None) };
            with_grad(pickle, layout, *grad)
                .map(|layout| TensorLayout { python_state: true, ..layout })
        }
        (
            "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_qtensor"
            | "_rebuild_parameter",
            _,
        ) => None,
        _ => return Ok(None),
    };
    let layout = read.ok_or_else(malformed)?.checked()?;
    if layout.dtype.is_quantized() != layout.quantizer.is_some() {
        return Err(malformed());
    }
    Ok(Some(layout))
}

/// A tensor of storage, offset, sizes and strides. `dtype` replaces the storage's.
fn strided(pickle: &Pickle<'_>, args: &[NodeId], dtype: Option<NodeId>) -> Option<TensorLayout> {
    let [storage, offset, sizes, strides] = args else { return None };
    let (class, storage, view_offset) = storage_ref(pickle, *storage)?;
    let dtype = match (dtype, class) {
        (Some(id), _) => match pickle.global_name(id)? {
            ("torch", name) => name.parse::<DType>().ok()?,
            _ => return None,
        },
        (None, StorageClass::Typed(dtype)) => dtype,
        // Only `_rebuild_tensor_v3` takes storages without a dtype; others are read as bytes.
        (None, StorageClass::Untyped) => DType::UInt8,
    };
    Some(TensorLayout {
        dtype,
        sizes: uints(pickle, *sizes)?.into_iter().collect::<Dims>(),
        strides: uints(pickle, *strides)?,
        storage_offset: uint(pickle, *offset)?.checked_add(view_offset)?,
        storage,
        requires_grad: false,
        parameter: false,
        python_state: false,
        conj: false,
        neg: false,
        quantizer: None,
    })
}

/// A storage, and the offset of the view from which the tensor counts, in elements.
fn storage_ref(pickle: &Pickle<'_>, id: NodeId) -> Option<(StorageClass, StorageRef, u64)> {
    let Node::Persistent(pid) = *pickle.node(id) else { return None };
    let [tag, class, key, location, numel, view @ ..] = pickle.tuple(pid) else { return None };
    (pickle.str(*tag)? == "storage").then_some(())?;
    // Files from before the zip format may restrict the storage to a part of it here.
    let view_offset = match view {
        [] => 0,
        [view] => match pickle.tuple(*view) {
            [] => matches!(pickle.node(*view), Node::None).then_some(0)?,
            [_key, offset, _size] => uint(pickle, *offset)?,
            _ => return None,
        },
        _ => return None,
    };
    let (module, name) = pickle.global_name(*class)?;
    let class = StorageClass::from_global(module, name)?;
    let byte_len = uint(pickle, *numel)?.checked_mul(class.element_size())?;
    let (key, location) = (pickle.str(*key)?.into(), pickle.str(*location)?.into());
    Some((class, StorageRef { key, byte_len, location }, view_offset))
}

/// The storage of a persistent node, and the size of its elements in bytes.
pub(crate) fn stored(pickle: &Pickle<'_>, id: NodeId) -> Option<(StorageRef, u64)> {
    storage_ref(pickle, id).map(|(class, storage, _)| (storage, class.element_size()))
}

/// Whether a node calls one of PyTorch's functions that create tensors of any kind.
pub(crate) fn makes_tensor(pickle: &Pickle<'_>, id: NodeId) -> bool {
    match pickle.object(id).and_then(|object| pickle.global_name(object.class)) {
        Some(("torch._utils", function)) => function.starts_with("_rebuild_"),
        Some(("torch._tensor", function)) => function == "_rebuild_from_type_v2",
        _ => false,
    }
}

fn with_grad(pickle: &Pickle<'_>, layout: TensorLayout, grad: NodeId) -> Option<TensorLayout> {
    match pickle.node(grad) {
        Node::Bool(requires_grad) => Some(TensorLayout { requires_grad: *requires_grad, ..layout }),
        _ => None,
    }
}

/// `{"conj": True}`, `{"neg": True}`: views that PyTorch stores lazily.
fn with_math_bits(
    pickle: &Pickle<'_>,
    mut layout: TensorLayout,
    bits: NodeId,
) -> Option<TensorLayout> {
    let entries = match pickle.node(bits) {
        Node::None => return Some(layout),
        Node::Dict(entries) => *entries,
        _ => return None,
    };
    for (key, value) in pickle.entries(entries) {
        let Node::Bool(value) = *pickle.node(value) else { return None };
        match pickle.str(key)? {
            "conj" => layout.conj = value,
            "neg" => layout.neg = value,
            _ => return None,
        }
    }
    Some(layout)
}

fn quantizer(
    pickle: &Pickle<'_>,
    params: NodeId,
    nesting: usize,
) -> Result<Option<Quantizer>, FormatError> {
    let [scheme, params @ ..] = pickle.tuple(params) else { return Ok(None) };
    let Some(("torch", scheme)) = pickle.global_name(*scheme) else { return Ok(None) };
    Ok(match (scheme, params) {
        ("per_tensor_affine", [scale, zero_point]) => pickle
            .float(*scale)
            .zip(pickle.int(*zero_point))
            .map(|(scale, zero_point)| Quantizer::PerTensor { scale, zero_point }),
        (
            "per_channel_affine" | "per_channel_affine_float_qparams",
            [scales, zero_points, axis],
        ) => {
            let scales = tensor(pickle, *scales, nesting)?;
            let zero_points = tensor(pickle, *zero_points, nesting)?;
            scales.zip(zero_points).zip(uint(pickle, *axis)).map(|((scales, zero_points), axis)| {
                Quantizer::PerChannel {
                    scales: Box::new(scales),
                    zero_points: Box::new(zero_points),
                    axis,
                    float_zero_points: scheme == "per_channel_affine_float_qparams",
                }
            })
        }
        _ => None,
    })
}

fn uint(pickle: &Pickle<'_>, id: NodeId) -> Option<u64> {
    u64::try_from(pickle.int(id)?).ok()
}

/// The numbers of a tuple or of a `torch.Size`.
pub(super) fn uints(pickle: &Pickle<'_>, id: NodeId) -> Option<Vec<u64>> {
    let tuple = match pickle.object(id) {
        Some(object) if pickle.global_name(object.class) == Some(("torch", "Size")) => {
            *pickle.tuple(object.args).first()?
        }
        _ => id,
    };
    matches!(pickle.node(tuple), Node::Tuple(_)).then_some(())?;
    pickle.tuple(tuple).iter().map(|id| uint(pickle, *id)).collect()
}
