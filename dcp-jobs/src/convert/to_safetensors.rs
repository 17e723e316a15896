//! Writes a checkpoint as one safetensors file.

use std::sync::Arc;

use dcp_formats::safetensors::{self, RAW, RawTypes, SafetensorsItem};
use indexmap::IndexMap;

use crate::convert::safetensors_items::Outgoing;
use crate::error::JobError;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::source::Source;
use crate::write::stored_data_source::CheckpointData;
use crate::write::target::Target;
use crate::write::written::ConversionReport;

/// Writes every tensor of a checkpoint, under its FQN, to one safetensors file, in segments. The
/// file gets its name when it is complete and every stored chunk matches its checksum.
///
/// # Errors
///
/// When the target exists, the checkpoint is inconsistent or damaged, or a storage fails. No file
/// is created then.
pub async fn to_safetensors(
    source: &Source,
    target: &Target,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    target.check().await?;
    let source = CheckedSource::new(source, options);
    let outgoing = Outgoing::gather(&source).await?;
    let mut header = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
    header.extend(outgoing.header());
    let mut raw = RawTypes::default();
    let items = outgoing.tensors.iter().map(|tensor| {
        let (dtype, shape) = raw.stored_as(&tensor.fqn, tensor.dtype, &tensor.shape);
        SafetensorsItem { name: Arc::clone(&tensor.fqn), dtype, shape }
    });
    let items: Vec<_> = items.collect();
    if !raw.is_empty() {
        header.insert(RAW.to_owned(), raw.to_json());
    }
    let report = outgoing.report;
    if options.dry_run {
        let byte_len = safetensors::encode_header(&items, &header)?.byte_len;
        let report = report.with_files([(target.key().to_string(), byte_len)]);
        return Ok(report.planned(&*source.metadata().await?));
    }
    options.start(outgoing.byte_len);
    let data = Arc::new(CheckpointData::new(&source, outgoing.parts, options));
    let file = target.safetensors(&items, &header, data).await?;
    let byte_len = file.publish(source).await?;
    Ok(report.with_files([(target.key().to_string(), byte_len)]))
}
