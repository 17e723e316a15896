//! Reads of items that only one rank of a group needs: that rank reads them for itself.

use std::sync::Arc;

use dcp_core::checkpoint::ReadReport;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader};

use super::exchange_message::{Collector, Piece, Wanted};
use super::receiver::Receiver;
use crate::disjoint::cut;
use crate::metadata_lookup::tensor_dtype;

/// Reads the items that only this rank needs.
pub(crate) async fn read_kept(
    (reader, metadata): (&Arc<dyn StorageReader>, &Arc<CheckpointMetadata>),
    keep: &LoadPlan,
    message_bytes: u64,
    taker: &mut Receiver<'_>,
    report: &mut ReadReport,
) -> Result<(), CheckpointError> {
    let mut direct = LoadPlan::default();
    let mut views = Vec::new();
    let mut rest = Vec::new();
    for item in &keep.items {
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
        match taker.place(item.entry, *chunk, region)? {
            Some(view) => {
                let leaf = u32::try_from(views.len()).unwrap_or(u32::MAX);
                views.push(view);
                direct.items.push(ReadItem { leaf, ..item.clone() });
            }
            // Two of this rank's items need it.
            None => rest.push(item),
        }
    }
    let objects = keep.items.iter().filter(|item| item.kind == ReadKind::Object);
    // Their leaves say which entry they are of.
    direct.items.extend(objects.map(|item| ReadItem { leaf: item.entry, ..item.clone() }));
    if !direct.items.is_empty() {
        let sink = Arc::new(Collector::new(views));
        let cost = reader.read(metadata, &direct, Arc::clone(&sink) as _).await?;
        *report += ReadReport::new(0, cost.bytes_read);
        for item in &direct.items {
            if let ReadKind::Tensor { chunk, region, .. } = &item.kind {
                taker.arrived(item.entry, *chunk, region)?;
            }
        }
        for (entry, value) in sink.take_objects() {
            taker.value(entry, value)?;
        }
    }
    for item in rest {
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
        let dtype = tensor_dtype(metadata, item.entry)?;
        for region in cut(region.clone(), (message_bytes / dtype.size() as u64).max(1)) {
            let mut wanted = Wanted::default();
            wanted.push(Piece::tensor(item.entry, *chunk, region), dtype);
            let (bytes, cost) = wanted.read(reader, metadata).await?;
            *report += ReadReport::new(0, cost.bytes_read);
            taker.take(&bytes);
        }
    }
    Ok(())
}
