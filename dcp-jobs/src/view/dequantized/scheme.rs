//! Refuses quantized models whose scheme is not read.

use dcp_core::storage::StorageExt;
use dcp_core::{CheckpointError, FormatError, Key, StorageError, StorageErrorKind};
use dcp_formats::hf::QuantError;

use crate::cast::exact_tensors;
use crate::error::JobError;
use crate::source::Source;

use super::Dequantized;

/// The maximum size of a model's configuration, in bytes.
const CONFIG_MAX: u64 = 16 << 20;

/// Refuses a model of which nothing becomes plain numbers, or not all.
pub(super) fn refuse_unread(
    view: &Dequantized,
    unwraps: bool,
    method: Option<&str>,
) -> Result<(), JobError> {
    const READ: &str = "8-bit floats with weight_scale_inv, MXFP4 with _blocks and _scales, and classes \
                        of torchao become plain numbers";
    const REMEDY: &str = "leave the option out to keep the weights as they are, or save them as plain \
                          numbers with the library that quantized them";
    let exact = exact_tensors(&view.metadata);
    let of = method.map_or_else(String::new, |method| format!(" of {method}"));
    if let Some(scales) = exact.scales() {
        let problem = format!(
            "has scales of a quantization{of} that `Conversion::dequantize` does not read: {READ}; {REMEDY}"
        );
        return Err(JobError::not_storable(scales, problem));
    }
    let mut tensors =
        view.metadata.iter().filter_map(|(fqn, entry)| Some((fqn, entry.as_tensor()?)));
    if let Some((fqn, tensor)) = tensors.find(|(_, tensor)| tensor.dtype.is_quantized()) {
        let dtype = tensor.dtype;
        let problem = format!(
            "is {dtype} of PyTorch, which `Conversion::dequantize` does not read: {READ}; {REMEDY}"
        );
        return Err(JobError::not_storable(fqn.to_string(), problem));
    }
    if unwraps || view.entries.iter().any(|shown| shown.weight.is_some()) {
        return Ok(());
    }
    let problem = match method {
        Some(method) => format!("does not read the quantization {method}: {READ}; {REMEDY}"),
        None => format!("finds nothing quantized: {READ}"),
    };
    Err(JobError::invalid_option("`Conversion::dequantize`", problem))
}

/// Makes an error about blocks one of the option that gives their size.
pub(super) fn of_block_size(error: QuantError) -> JobError {
    match error {
        QuantError::BlockSize(error) => {
            let problem = format!("{}, in rows and columns such as 128x128", error.problem());
            JobError::invalid_option("`DequantizeOptions::block`", problem)
        }
        error => FormatError::from(error).into(),
    }
}

/// The name of the model's configuration.
pub(super) const CONFIG: &str = "config.json";

/// The content of the model's configuration, if it has one.
pub(super) async fn config_of(source: &Source) -> Result<Option<Vec<u8>>, CheckpointError> {
    let key = Key::new(CONFIG).map_err(StorageError::from)?;
    let byte_len = match source.storage.stat(&key).await {
        Ok(meta) => meta.byte_len.min(CONFIG_MAX),
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some(source.storage.read_range(&key, 0..byte_len).await?.to_vec()))
}
