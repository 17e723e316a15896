//! Compares entries of different checkpoints for equality.

use std::sync::Arc;

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, Region};

use crate::element::value_difference::first_difference;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::read::objects::read_objects;
use crate::read::tensor_read::TensorReader;
use crate::source::Source;

use super::quantized::{archive, archived_value};
use super::scratch::{SCRATCH, invalid_region, pieces, unread};

/// A checkpoint and its index.
#[derive(Debug)]
pub(super) struct Input {
    pub(super) source: CheckedSource,
    pub(super) metadata: Arc<CheckpointMetadata>,
}

impl Input {
    pub(super) async fn open(source: &Source, job: &JobOptions) -> Result<Self, CheckpointError> {
        let source = CheckedSource::new(source, job);
        let metadata = source.metadata().await?;
        Ok(Self { source, metadata })
    }

    pub(super) fn get(&self, fqn: &str) -> Option<(usize, &Entry)> {
        let index = self.metadata.index_of(fqn)?;
        Some((index, self.metadata.at(index)?.1))
    }

    pub(super) fn tensor_entry(&self, fqn: &str) -> Option<&TensorEntry> {
        self.metadata.get(fqn)?.as_tensor()
    }

    /// A reader of the tensor `fqn`.
    pub(super) fn tensor(&self, fqn: &str) -> Result<TensorReader, CheckpointError> {
        let index = self
            .metadata
            .index_of(fqn)
            .ok_or_else(|| PlanError::Missing { fqns: vec![fqn.to_owned()] })?;
        let reader = Arc::clone(&self.source.reader);
        TensorReader::new(reader, Arc::clone(&self.metadata), index)
    }
}

/// Describes the difference of the two entries of one name; `None` when they are equal. Compares
/// tensors byte by byte, in bounded parts, and objects part by part as [`diff`](crate::diff::diff())
/// does. Quantized tensors are compared with their scales where one archive stores each.
pub(super) async fn difference(
    a: &Input,
    b: &Input,
    fqn: &str,
) -> Result<Option<String>, CheckpointError> {
    let (Some((at_a, in_a)), Some((at_b, in_b))) = (a.get(fqn), b.get(fqn)) else {
        return Ok(Some("it is in only one of them".to_owned()));
    };
    match (in_a, in_b) {
        (Entry::Tensor(x), Entry::Tensor(y)) => {
            if (x.dtype, &x.shape) != (y.dtype, &y.shape) {
                let (x, y) =
                    (format!("{} {}", x.dtype, x.shape), format!("{} {}", y.dtype, y.shape));
                return Ok(Some(format!("{x} in one, {y} in the other")));
            }
            if x.dtype.is_quantized() {
                return quantized_difference(a, b, fqn, (x, y)).await;
            }
            let region =
                Region::full(x.shape.clone()).map_err(|error| invalid_region(fqn, error))?;
            let (reader_a, reader_b) = (a.tensor(fqn)?, b.tensor(fqn)?);
            for piece in pieces(&region, x.dtype.size(), SCRATCH) {
                let piece = [piece.map_err(|error| invalid_region(fqn, error))?];
                if reader_a.read(&piece).await? != reader_b.read(&piece).await? {
                    return Ok(Some("their elements differ".to_owned()));
                }
            }
            Ok(None)
        }
        (Entry::Object(_), Entry::Object(_)) => {
            let x = read_objects(&a.source, &a.metadata, &[at_a]).await.remove(&at_a);
            let y = read_objects(&b.source, &b.metadata, &[at_b]).await.remove(&at_b);
            let missing = || unread(fqn);
            let (x, y) = (x.ok_or_else(missing)??, y.ok_or_else(missing)??);
            Ok(first_difference(&x, &y, None).map(|found| match &*found.path {
                "" => "their values differ".to_owned(),
                path => format!("their values differ at {path}"),
            }))
        }
        _ => Ok(Some("a tensor in one, an object in the other".to_owned())),
    }
}

/// Describes the difference of two quantized tensors, elements, scales and zero points.
async fn quantized_difference(
    a: &Input,
    b: &Input,
    fqn: &str,
    (x, y): (&TensorEntry, &TensorEntry),
) -> Result<Option<String>, CheckpointError> {
    let Some((at_x, at_y)) = archive(&a.metadata, x).zip(archive(&b.metadata, y)) else {
        let problem = "both are quantized, and one is not stored in one archive with its scales";
        return Ok(Some(problem.to_owned()));
    };
    let x = archived_value(&a.source, &a.metadata, fqn, at_x).await?;
    let y = archived_value(&b.source, &b.metadata, fqn, at_y).await?;
    let found = first_difference(&x, &y, None);
    Ok(found.map(|_| "their elements, scales or zero points differ".to_owned()))
}
