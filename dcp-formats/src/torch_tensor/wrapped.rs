//! Tensors of subclasses, which consist of several tensors in a file.

use std::sync::Arc;

use dcp_core::metadata::WrappedTensor;
use dcp_core::{Dims, FormatError};

use super::blob::{PICKLE_LEN_MAX, small_record};
use super::read::uints;
use crate::pickle::{Limits, NodeId, Pickle};
use crate::torch_zip::{ArchiveIndex, Halt, ParseStep, Sparse};

/// The minimum size of an archive of one plain tensor, without its elements.
const OVERHEAD_MIN: u64 = 512;

/// The dtype and shape that PyTorch (2.15) reports for a node that creates a tensor of a subclass
/// without its own storage: `torch.Tensor._make_wrapper_subclass`, whose parts are its attributes.
/// `None` for other nodes.
pub(crate) fn wrapped(pickle: &Pickle<'_>, id: NodeId) -> Option<WrappedTensor> {
    let object = pickle.object(id)?;
    match (pickle.global_name(object.class)?, pickle.tuple(object.args)) {
        (("torch._utils", "_rebuild_parameter"), [inner, ..]) => {
            let inner_object = pickle.object(*inner)?;
            let inner_class = pickle.global_name(inner_object.class)?;
            (inner_class.1 != "_rebuild_parameter").then(|| wrapped(pickle, *inner))?
        }
        (("torch._tensor", "_rebuild_from_type_v2"), [function, class, args, _state]) => {
            let function = pickle.global_name(*function)?;
            (function == ("torch._utils", "_rebuild_wrapper_subclass")).then_some(())?;
            let [_, dtype, sizes, ..] = pickle.tuple(*args) else { return None };
            let ("torch", dtype) = pickle.global_name(*dtype)? else { return None };
            let (module, name) = pickle.global_name(*class)?;
            let shape: Dims = uints(pickle, *sizes)?.into_iter().collect();
            let class: Arc<str> = format!("{module}.{name}").into();
            Some(WrappedTensor::new(class, dtype.parse().ok()?, shape))
        }
        _ => None,
    }
}

/// Whether an archive is too short for a plain tensor with `elements` bytes of elements, so that it
/// contains something else.
pub(crate) fn is_too_short(byte_len: u64, elements: u64) -> bool {
    byte_len < elements.saturating_add(OVERHEAD_MIN)
}

/// The tensor in an archive, if it is of a subclass.
pub(crate) fn wrapped_in(
    blob: &Sparse<'_>,
) -> Result<ParseStep<Option<WrappedTensor>>, FormatError> {
    let read = || -> Result<_, Halt> {
        let index = ArchiveIndex::read(blob)?;
        let pickle = small_record(blob, index.require("data.pkl")?, PICKLE_LEN_MAX)?;
        let pickle = Pickle::parse(&pickle, &Limits::DEFAULT)?;
        Ok(wrapped(&pickle, pickle.root()))
    };
    ParseStep::from_halting(read())
}
