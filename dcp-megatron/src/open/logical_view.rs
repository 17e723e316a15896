//! Presents a checkpoint's tensors in their logical shapes, and its common state as one object.

use std::sync::Arc;

use dcp_core::Value;
use dcp_core::error::error_chain;
use dcp_core::metadata::Entry;
use dcp_formats::dcp::DcpReader;
use dcp_jobs::Source;
use dcp_jobs::view::Assembled;

use crate::disk::common_state::{COMMON_OBJECT, COMMON_STATE};
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronOpenOptions, StoredFormat};
use crate::open::flattened;
use crate::open::flattened::Cells;

/// The view of `raw`, the checkpoint of PyTorch, with the common state `common`. What is not
/// stored flattened keeps its place, so its checksums are compared and its chunks copied.
pub(crate) async fn view(
    raw: &Source,
    format: &StoredFormat,
    common: Value,
    options: &MegatronOpenOptions,
    damage: &mut Vec<String>,
) -> Result<Source, MegatronError> {
    let metadata = raw.metadata().await?;
    let shapes = match raw.extension::<DcpReader>() {
        Some(reader) => reader.original_shapes().await?,
        None => Arc::default(),
    };
    let mut view = Assembled::builder(std::slice::from_ref(raw), &options.job).await?;
    view.format(format!("megatron_{}", format.name()));
    view.object(COMMON_STATE, None, common)?;
    let mut cells = Cells::default();
    let plugged = matches!(format, StoredFormat::Plugged { .. });
    for (at, (fqn, entry)) in metadata.iter().enumerate() {
        // A plug-in's reader may be a view of this kind itself.
        if &**fqn == COMMON_OBJECT || plugged && &**fqn == COMMON_STATE {
            continue;
        }
        if let Entry::Tensor(tensor) = entry
            && let Some(original) = shapes.get(fqn)
        {
            let shown =
                flattened::pieces(fqn, at, tensor, original, &mut cells).and_then(|pieces| {
                    let (dtype, shape) = (tensor.dtype, original.clone());
                    Ok(view.tensor(fqn.clone(), None, dtype, shape, pieces)?)
                });
            match shown {
                Ok(()) => continue,
                Err(error) if options.tolerant => damage.push(error_chain(&error)),
                Err(error) => return Err(error),
            }
        }
        view.pass(fqn.clone(), None, 0, at)?;
    }
    Ok(view.finish()?)
}
