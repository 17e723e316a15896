//! Reading on one rank for all.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::Phase;
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, Collective, Rank, Region, StorageReader};

use super::exchange_message::{Parcel, Piece, Wanted};
use super::receiver::Receiver;
use crate::disjoint::{cut, disjoint};
use crate::group::Group;
use crate::metadata_lookup::{check_chunk, out_of_step, tensor_dtype};

/// Bytes of tensor data in one message.
const SEGMENT: u64 = 4 << 20;
/// Objects to read, and send, at once.
const OBJECTS: usize = 64;

/// A reader for a group of which only one rank can, or should, read: it reads what any rank
/// needs, each byte once, and sends it to all, in segments of 4 MiB.
///
/// This is how a file of `torch.save` is loaded straight into a sharded state dict, as with
/// PyTorch's `BroadcastingTorchSaveReader`, but over any reader, with objects, and with plans that
/// differ from rank to rank. The index is read and sent once, too, so the other ranks plan from
/// what is found in the file (PyTorch's `DynamicMetaLoadPlanner`) and need not see it.
///
/// Every rank calls [`metadata`](StorageReader::metadata) and [`read`](StorageReader::read) as
/// often and in the same order as all others, as a [`Loader`](crate::Loader) in the same group
/// does, also with an empty plan. When reading fails, every rank gets the same error; when a rank
/// is lost, every call ends.
#[doc(alias = "BroadcastingTorchSaveReader")]
#[doc(alias = "DynamicMetaLoadPlanner")]
pub struct BroadcastReader {
    inner: Option<Arc<dyn StorageReader>>,
    collective: Arc<dyn Collective>,
    reading_rank: Rank,
    known: tokio::sync::OnceCell<Arc<CheckpointMetadata>>,
}

impl BroadcastReader {
    /// Reads on `reading_rank` with its `inner` reader and sends to all ranks of `collective`.
    /// The others need none; one that they bring is not used.
    #[must_use]
    pub fn new(
        inner: Option<Arc<dyn StorageReader>>,
        collective: Arc<dyn Collective>,
        reading_rank: Rank,
    ) -> Self {
        Self { inner, collective, reading_rank, known: tokio::sync::OnceCell::new() }
    }

    fn is_reading(&self) -> bool {
        self.collective.rank() == self.reading_rank
    }

    fn reader(&self) -> Result<&Arc<dyn StorageReader>, CheckpointError> {
        self.inner.as_ref().ok_or_else(|| out_of_step("the reading rank has no reader"))
    }

    fn group(&self) -> Result<Group, CheckpointError> {
        Group::new(Some(Arc::clone(&self.collective)), self.reading_rank)
    }

    async fn share_metadata(
        &self,
        group: &Group,
    ) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let mine = if self.is_reading() {
            Some(match self.reader() {
                Ok(reader) => reader.metadata().await,
                Err(error) => Err(error),
            })
        } else {
            None
        };
        spread_metadata(group, self.reading_rank, mine).await
    }

    async fn share_items(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let plans = group.gather(Phase::Read, plan.to_wire()).await?;
        let mut taker = Receiver::new(metadata, plan, sink);
        if let Some(plans) = plans {
            let sent = self.send_all(group, metadata, &plans, &mut taker, &mut report).await;
            if let Err(error) = sent {
                // The others wait for the next message: this is it.
                if matches!(error, CheckpointError::Lost { .. }) {
                    return Err(error);
                }
                let sent = group.broadcast(Phase::Read, self.reading_rank, Some(Err(error))).await;
                return Err(sent.err().unwrap_or_else(|| group.unanswered()));
            }
            group.broadcast(Phase::Read, self.reading_rank, Some(Ok(Parcel::end()))).await?;
        } else {
            loop {
                let bytes = group.broadcast(Phase::Read, self.reading_rank, None).await?;
                if Parcel::is_end(&bytes) {
                    break;
                }
                taker.take(&bytes);
            }
        }
        // A rank that failed to store a message receives the others, so that no rank hangs.
        group.all_gather_results(Phase::Read, taker.finish(&mut report)).await?;
        Ok(report)
    }

    /// Reads, on the reading rank, the parts that the plans of all ranks need, and sends them.
    async fn send_all(
        &self,
        group: &Group,
        metadata: &Arc<CheckpointMetadata>,
        plans: &[Bytes],
        taker: &mut Receiver<'_>,
        report: &mut ReadReport,
    ) -> Result<(), CheckpointError> {
        let reader = self.reader()?;
        let needs = Needs::of(metadata, plans)?;
        let mut wanted = Wanted::default();
        for ((entry, chunk), regions) in needs.chunks {
            let dtype = tensor_dtype(metadata, entry)?;
            for region in disjoint(regions) {
                for piece in cut(region, (SEGMENT / dtype.size() as u64).max(1)) {
                    if wanted.byte_len() + piece.volume() * dtype.size() as u64 > SEGMENT {
                        let full = std::mem::take(&mut wanted);
                        self.send(group, reader, metadata, full, taker, report).await?;
                    }
                    wanted.push(Piece::tensor(entry, chunk, piece), dtype);
                }
            }
        }
        if !wanted.is_empty() {
            self.send(group, reader, metadata, wanted, taker, report).await?;
        }
        for objects in needs.objects.chunks(OBJECTS) {
            let (bytes, cost) = Wanted::objects(objects, reader, metadata).await?;
            *report += ReadReport::new(0, cost.bytes_read);
            let bytes = group.broadcast(Phase::Read, self.reading_rank, Some(Ok(bytes))).await?;
            taker.take(&bytes);
        }
        Ok(())
    }

    async fn send(
        &self,
        group: &Group,
        reader: &Arc<dyn StorageReader>,
        metadata: &Arc<CheckpointMetadata>,
        wanted: Wanted,
        taker: &mut Receiver<'_>,
        report: &mut ReadReport,
    ) -> Result<(), CheckpointError> {
        let (bytes, cost) = wanted.read(reader, metadata).await?;
        *report += ReadReport::new(0, cost.bytes_read);
        let bytes = group.broadcast(Phase::Read, self.reading_rank, Some(Ok(bytes))).await?;
        taker.take(&bytes);
        Ok(())
    }
}

#[async_trait]
impl StorageReader for BroadcastReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let shared =
            || async { self.group()?.run(async |group| self.share_metadata(group).await).await };
        self.known.get_or_try_init(shared).await.cloned()
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let share = async |group: &Group| self.share_items(group, metadata, plan, &sink).await;
        self.group()?.run(share).await
    }
}

impl fmt::Debug for BroadcastReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BroadcastReader")
            .field("inner", &self.inner)
            .field("reading_rank", &self.reading_rank)
            .finish_non_exhaustive()
    }
}

/// Gives every rank the index that `root` has read, which alone passes `Some`.
pub(crate) async fn spread_metadata(
    group: &Group,
    root: Rank,
    mine: Option<Result<Arc<CheckpointMetadata>, CheckpointError>>,
) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
    let (sent, mine) = match mine {
        Some(Ok(metadata)) => (Some(Ok(metadata.to_wire())), Some(metadata)),
        Some(Err(error)) => (Some(Err(error)), None),
        None => (None, None),
    };
    let bytes = group.broadcast(Phase::Open, root, sent).await?;
    let metadata = match mine {
        Some(metadata) => Ok(metadata),
        None => CheckpointMetadata::from_wire(&bytes).map(Arc::new).map_err(Into::into),
    };
    group.all_succeed(Phase::Open, metadata).await
}

/// The chunks and objects that any rank needs.
#[derive(Debug, Default)]
struct Needs {
    /// Regions by entry and chunk, of all ranks.
    chunks: BTreeMap<(u32, u32), Vec<Region>>,
    /// Entries, each once, ascending.
    objects: Vec<u32>,
}

impl Needs {
    fn of(metadata: &CheckpointMetadata, plans: &[Bytes]) -> Result<Self, CheckpointError> {
        let mut needs = Self::default();
        for bytes in plans {
            for item in LoadPlan::from_wire(bytes)?.items {
                match item.kind {
                    ReadKind::Tensor { chunk, region, .. } if !region.is_empty() => {
                        check_chunk(metadata, item.entry, chunk, &region)?;
                        needs.chunks.entry((item.entry, chunk)).or_default().push(region);
                    }
                    ReadKind::Object => needs.objects.push(item.entry),
                    _ => {}
                }
            }
        }
        needs.objects.sort_unstable();
        needs.objects.dedup();
        Ok(needs)
    }
}
