//! Reads of ranks that share: each sends in its turns, and all receive.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::Phase;
use dcp_core::{CheckpointError, Rank};

use super::decision::{Request, Shared, Way};
use super::parallel_reader::ParallelReader;
use super::read_ahead::ReadAhead;
use super::receiver::Receiver;
use super::unshared_reads::read_kept;
use super::{Exchange, ReadSharing};

impl ParallelReader {
    /// Decides how this rank reads, and reads so.
    pub(super) async fn read_together(
        &self,
        request: &Request<'_>,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        if self.sharing == ReadSharing::Never {
            return self.read_alone(request, sink).await;
        }
        let earlier = match self.way().clone() {
            Some(Way::Shared(shared)) => Some(shared),
            _ => None,
        };
        let (way, mut report) = self.decide(request, earlier.as_ref()).await?;
        report += match way {
            Way::Alone => self.read_alone(request, sink).await?,
            Way::Shared(shared) => self.read_shared(request, &shared, sink).await?,
        };
        Ok(report)
    }

    /// Reads all that this rank needs.
    async fn read_alone(
        &self,
        Request { group, metadata, plan }: &Request<'_>,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let read = self.inner.read(metadata, plan, Arc::clone(sink)).await;
        group.all_succeed(Phase::Read, read).await
    }

    /// Sends and receives what ranks share, then reads what this rank alone needs.
    async fn read_shared(
        &self,
        Request { group, metadata, plan }: &Request<'_>,
        Shared { sharers, schedule, assignment, .. }: &Shared,
        sink: &Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let (plan, rest) = sharers.split(self.collective.rank(), plan);
        let mut taker = Receiver::new(metadata, &plan, sink);
        let mut ahead = ReadAhead::new(&self.inner, metadata, &assignment.send);
        let rounds = schedule.turns.iter().copied().max().unwrap_or(0);
        for round in 0..rounds {
            let sends = |rank: Rank| round < schedule.turns_of(rank);
            match self.exchange {
                Exchange::Broadcast => {
                    for root in (0..self.collective.world_size()).filter(|rank| sends(*rank)) {
                        let mine = match root == self.collective.rank() {
                            true => Some(ahead.next(&mut report).await),
                            false => None,
                        };
                        taker.take(&group.broadcast(Phase::Read, root, mine).await?);
                    }
                }
                Exchange::GatherRounds => {
                    let mine = match sends(self.collective.rank()) {
                        true => ahead.next(&mut report).await,
                        false => Ok(Bytes::new()),
                    };
                    let all = group.exchange(Phase::Read, mine).await?;
                    all.iter().filter(|bytes| !bytes.is_empty()).for_each(|all| taker.take(all));
                }
            }
        }
        let source = (&self.inner, *metadata);
        let (keep, message_bytes) = (&assignment.keep, self.message_bytes());
        let kept = read_kept(source, keep, message_bytes, &mut taker, &mut report).await;
        // A rank that failed to store a message receives the others, so that no rank hangs.
        let outcome = match kept.and_then(|()| taker.finish(&mut report)) {
            Ok(()) if !rest.items.is_empty() => {
                self.inner.read(metadata, &rest, Arc::clone(sink)).await.map(|cost| report += cost)
            }
            other => other,
        };
        group.all_succeed(Phase::Read, outcome).await?;
        Ok(report)
    }
}
