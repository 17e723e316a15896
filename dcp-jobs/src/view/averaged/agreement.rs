//! The keys, shapes and dtypes that checkpoints must have in common to be averaged.

use dcp_core::CheckpointError;
use dcp_core::metadata::Entry;
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::cast::{ExactTensors, exact_tensors, is_averaged};
use crate::error::JobError;
use crate::view::equality::{Input, difference};

/// Messages about keys that some input lacks or has in another shape.
pub(super) fn mismatches(inputs: &[Input]) -> Vec<String> {
    let mut problems = Vec::new();
    let Some((first, others)) = inputs.split_first() else { return problems };
    for (number, other) in (2..).zip(others) {
        for (fqn, entry) in first.metadata.iter() {
            match (entry, other.get(fqn)) {
                (_, None) => problems.push(format!("{fqn:?} is missing in checkpoint {number}")),
                (Entry::Tensor(a), Some((_, Entry::Tensor(b)))) => {
                    let mixed = a.dtype.is_complex() != b.dtype.is_complex()
                        || is_averaged(a.dtype) != is_averaged(b.dtype);
                    if a.shape != b.shape || mixed {
                        problems.push(format!(
                            "{fqn:?} is {} {} in checkpoint 1 and {} {} in checkpoint {number}",
                            a.dtype, a.shape, b.dtype, b.shape
                        ));
                    }
                }
                (Entry::Object(_), Some((_, Entry::Object(_)))) => {}
                _ => problems.push(format!(
                    "{fqn:?} is a tensor in one and an object in the other of checkpoints 1 and \
                     {number}"
                )),
            }
        }
        let unknown = other.metadata.iter().filter(|(fqn, _)| first.get(fqn).is_none());
        problems.extend(
            unknown.map(|(fqn, _)| {
                format!("{fqn:?} of checkpoint {number} is missing in checkpoint 1")
            }),
        );
    }
    problems
}

/// Compares the entries without a mean.
pub(super) async fn refuse_different(
    inputs: &[Input],
    quantized: &Quantized,
    parallelism: usize,
) -> Result<(), JobError> {
    let Some((first, others)) = inputs.split_first() else { return Ok(()) };
    let has_mean = |fqn: &str, entry: &Entry| {
        entry.as_tensor().is_some_and(|tensor| is_averaged(tensor.dtype)) && !quantized.has(fqn)
    };
    let fqns = first.metadata.iter().filter(|(fqn, entry)| !has_mean(fqn, entry));
    let fqns = fqns.map(|(fqn, _)| fqn);
    let pairs =
        fqns.flat_map(|fqn| (2..).zip(others).map(move |(number, other)| (fqn, number, other)));
    let checks: Vec<_> = pairs
        .map(|(fqn, number, other)| async move {
            let how = difference(first, other, fqn).await?;
            let why = match quantized.has(fqn) {
                true => {
                    "; a quantized weight has no average: `Conversion::dequantize` makes plain numbers first"
                }
                false => "",
            };
            let differ = |how| format!("{fqn:?} of checkpoints 1 and {number}: {how}{why}");
            Ok::<_, CheckpointError>(how.map(differ))
        })
        .collect();
    let found: Vec<_> = stream::iter(checks).buffered(parallelism.max(1)).try_collect().await?;
    let problems: Vec<String> = found.into_iter().flatten().collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(JobError::Disagreement { problems, structure: false })
    }
}

/// The packed weights of all inputs, and what belongs to them. The mean of codes times the mean of scales
/// is not the mean of their products.
pub(super) struct Quantized(Vec<ExactTensors>);

impl Quantized {
    pub(super) fn of(inputs: &[Input]) -> Self {
        Self(inputs.iter().map(|input| exact_tensors(&input.metadata)).collect())
    }

    pub(super) fn has(&self, fqn: &str) -> bool {
        self.0.iter().any(|exact| exact.is_quantized(fqn))
    }
}
