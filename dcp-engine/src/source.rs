//! The bytes of a state dict, item by item.

use std::collections::HashMap;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_cast::CastReport;
use dcp_core::checkpoint::DataSource;
use dcp_core::plan::SavePlan;
use dcp_core::{CheckpointError, Payload, PlanError, Region, Tensor, TensorView};

use crate::cast::{Cast, SEGMENT, report};
use crate::event::{CheckpointEvent, Observers};

/// A [`DataSource`] over host tensors and encoded objects, without a copy of contiguous data.
#[derive(Debug)]
pub(crate) struct StateSource {
    items: Vec<(Box<str>, Data)>,
    casts: Vec<Cast>,
    observers: Observers,
}

#[derive(Debug)]
enum Data {
    View(TensorView),
    Cast(TensorView, Cast),
    Object(Bytes),
}

/// One leaf's data.
#[derive(Clone, Debug)]
pub(crate) enum Leaf {
    /// A tensor, and what it is saved as where that is another dtype.
    Tensor(Tensor, Option<Cast>),
    Object(Bytes),
}

impl StateSource {
    /// Finds the data of every item of `plan` in `leaves`, by FQN and region. A planner may have
    /// divided a shard: an item may be any part of one.
    pub(crate) fn new(
        plan: &SavePlan,
        leaves: &HashMap<&str, Leaf>,
        observers: Observers,
    ) -> Result<Self, CheckpointError> {
        let items = plan
            .items()
            .map(|item| {
                let fqn = &*item.key.fqn;
                let unsupported = |problem: &str| PlanError::Unsupported {
                    fqn: fqn.to_owned(),
                    problem: problem.to_owned(),
                };
                let data = match leaves.get(fqn) {
                    Some(Leaf::Object(bytes)) if !item.is_tensor() => Data::Object(bytes.clone()),
                    Some(Leaf::Tensor(tensor, cast)) if item.is_tensor() => {
                        let region = Region::new(item.offsets, item.sizes)
                            .map_err(|error| unsupported(&error.to_string()))?;
                        let view = find(tensor, &region).ok_or_else(|| {
                            unsupported("the planner asks for a part that this rank does not hold")
                        })??;
                        match cast {
                            Some(cast) => Data::Cast(view, cast.clone()),
                            None => Data::View(view),
                        }
                    }
                    _ => return Err(unsupported("the planner made it up").into()),
                };
                Ok((fqn.into(), data))
            })
            .collect::<Result<_, CheckpointError>>()?;
        let casts = leaves.values().filter_map(|leaf| match leaf {
            Leaf::Tensor(_, cast) => cast.clone(),
            Leaf::Object(_) => None,
        });
        Ok(Self { items, casts: casts.collect(), observers })
    }

    /// What was cast so far, and what that lost.
    pub(crate) fn cast_report(&self) -> CastReport {
        let mut report = report(self.casts.iter());
        report.tensors.sort_unstable_keys();
        report
    }
}

fn find(tensor: &Tensor, region: &Region) -> Option<Result<TensorView, PlanError>> {
    let exact = tensor.shards().iter().find(|shard| shard.region() == region);
    let shard = exact.or_else(|| tensor.shards().iter().find(|s| s.region().contains(region)))?;
    let inner = region.relative_to(shard.region().offsets())?;
    Some(shard.view().narrow(&inner))
}

#[async_trait]
impl DataSource for StateSource {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        let (fqn, data) = self.items.get(item).ok_or_else(|| PlanError::Wire {
            problem: format!("item {item} of a plan of {}", self.items.len()),
        })?;
        let lent = |view: &TensorView| {
            let failed = |source| CheckpointError::Memory { fqn: fqn.to_string(), source };
            view.payload().map_err(failed)
        };
        let payload = match data {
            Data::Cast(view, cast) => {
                let range = byte_range.start..byte_range.end.min(cast.byte_len(view));
                let payload = cast.bytes(&lent(view)?, range);
                self.observers.send(&CheckpointEvent::Progress { bytes: payload.len() });
                return Ok(payload);
            }
            Data::Object(bytes) => Payload::from(bytes.clone()),
            Data::View(view) => lent(view)?,
        };
        let whole = byte_range.start == 0 && byte_range.end == payload.len();
        let payload = if whole { payload } else { payload.slice(byte_range) };
        self.observers.send(&CheckpointEvent::Progress { bytes: payload.len() });
        Ok(payload)
    }

    fn segment_bytes(&self) -> u64 {
        // What is cast takes memory; all else is there anyway.
        if self.casts.is_empty() { u64::MAX } else { SEGMENT }
    }
}
