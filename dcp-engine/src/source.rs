//! The bytes of a state dict, item by item.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_cast::CastReport;
use dcp_core::checkpoint::DataSource;
use dcp_core::error::PlanProblem;
use dcp_core::plan::SavePlan;
use dcp_core::storage::OwnThreads;
use dcp_core::tensor::ShardData;
use dcp_core::{CheckpointError, Payload, PlanError, Region, Tensor, TensorView};

use crate::cast::{Cast, SEGMENT, report};
use crate::device::{DeviceElements, piece_bytes};
use crate::event::{CheckpointEvent, Observers};

/// A [`DataSource`] over tensors and encoded objects, without a copy of contiguous data in host
/// memory.
#[derive(Debug)]
pub(crate) struct StateSource {
    items: Vec<(Box<str>, Data)>,
    casts: Vec<Cast>,
    segment_bytes: u64,
    piece_bytes: u64,
    observers: Observers,
}

#[derive(Debug)]
enum Data {
    Tensor(Elements, Option<Cast>),
    Object(Bytes),
}

/// The elements of an item.
#[derive(Debug)]
enum Elements {
    Host(TensorView),
    Device(DeviceElements),
}

/// One leaf's data.
#[derive(Clone, Debug)]
pub(crate) enum Leaf {
    /// A tensor, and its cast where it is saved in another dtype.
    Tensor(Tensor, Option<Cast>),
    Object(Bytes),
}

impl StateSource {
    /// Finds the data of every item of `plan` in `leaves`, by FQN and region. A planner may have
    /// divided a shard: an item may be any part of one. Elements on devices are copied through
    /// `staging_bytes` of host memory.
    pub(crate) fn new(
        plan: &SavePlan,
        leaves: &HashMap<&str, Leaf>,
        staging_bytes: u64,
        observers: Observers,
    ) -> Result<Self, CheckpointError> {
        let piece_bytes = piece_bytes(staging_bytes);
        let mut segment_bytes = u64::MAX;
        let items = plan
            .items()
            .map(|item| {
                let fqn = &*item.key.fqn;
                let not_held = |part: String| {
                    PlanError::Plan(PlanProblem::NotHeld { fqn: fqn.to_owned(), part })
                };
                let data = match leaves.get(fqn) {
                    Some(Leaf::Object(bytes)) if !item.is_tensor() => Data::Object(bytes.clone()),
                    Some(Leaf::Tensor(tensor, cast)) if item.is_tensor() => {
                        let region = Region::new(item.offsets, item.sizes)
                            .map_err(|error| PlanError::from(error).with_fqn(fqn))?;
                        let elements = find(tensor, &region, piece_bytes)
                            .ok_or_else(|| not_held(format!("region {region}")))??;
                        // Host memory is there anyway; what is cast or copied takes more of it.
                        match (&elements, cast) {
                            (Elements::Device(_), _) => {
                                segment_bytes = segment_bytes.min(piece_bytes);
                            }
                            (_, Some(_)) => segment_bytes = segment_bytes.min(SEGMENT),
                            (Elements::Host(_), None) => {}
                        }
                        Data::Tensor(elements, cast.clone())
                    }
                    _ => return Err(not_held("the whole".to_owned()).into()),
                };
                Ok((fqn.into(), data))
            })
            .collect::<Result<_, CheckpointError>>()?;
        let casts = leaves.values().filter_map(|leaf| match leaf {
            Leaf::Tensor(_, cast) => cast.clone(),
            Leaf::Object(_) => None,
        });
        let casts = casts.collect();
        Ok(Self { items, casts, segment_bytes, piece_bytes, observers })
    }

    /// The casts so far, and their losses.
    pub(crate) fn cast_report(&self) -> CastReport {
        let mut report = report(self.casts.iter());
        report.tensors.sort_unstable_keys();
        report
    }
}

fn find(tensor: &Tensor, region: &Region, piece_bytes: u64) -> Option<Result<Elements, PlanError>> {
    let exact = tensor.shards().iter().find(|shard| shard.region() == region);
    let shard = exact.or_else(|| tensor.shards().iter().find(|s| s.region().contains(region)))?;
    let inner = region.relative_to(shard.region().offsets())?;
    Some(match shard.data() {
        ShardData::Host(view) => view.narrow(&inner).map(Elements::Host).map_err(PlanError::from),
        ShardData::Device(memory) => Ok(Elements::Device(DeviceElements::new(
            Arc::clone(memory),
            shard.dtype(),
            &inner,
            shard.region().sizes(),
            piece_bytes,
        ))),
        _ => return None,
    })
}

impl Elements {
    fn byte_len(&self) -> u64 {
        match self {
            Self::Host(view) => view.byte_len(),
            Self::Device(elements) => elements.byte_len(),
        }
    }

    async fn read(&self, fqn: &str, range: Range<u64>) -> Result<Payload, CheckpointError> {
        match self {
            Self::Device(elements) => Ok(elements.read(fqn, range).await?.into()),
            Self::Host(view) => {
                let failed = |source| CheckpointError::Memory { fqn: fqn.to_owned(), source };
                let payload = view.payload().map_err(failed)?;
                let whole = range.start == 0 && range.end == payload.len();
                Ok(if whole { payload } else { payload.slice(range) })
            }
        }
    }
}

#[async_trait]
impl DataSource for StateSource {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        let (fqn, data) =
            self.items.get(item).ok_or(PlanError::no_item(item as u64, self.items.len() as u64))?;
        let payload = match data {
            Data::Object(bytes) => Payload::from(bytes.clone()).slice(byte_range),
            Data::Tensor(elements, None) => elements.read(fqn, byte_range).await?,
            Data::Tensor(elements, Some(cast)) => {
                let end = byte_range.end.min(cast.byte_len(elements.byte_len()));
                let most = match elements {
                    Elements::Host(_) => u64::MAX,
                    Elements::Device(_) => self.piece_bytes,
                };
                let mut made = Vec::new();
                for part in cast.parts(byte_range.start..end, most) {
                    let source = elements.read(fqn, cast.source_of(&part)).await?;
                    made.extend_from_slice(cast.cast(&source.to_bytes(), part).pieces());
                }
                made.into()
            }
        };
        self.observers.send(&CheckpointEvent::Progress { bytes: payload.len() });
        Ok(payload)
    }

    fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}
