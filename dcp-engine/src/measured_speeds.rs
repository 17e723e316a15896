//! Measures how fast the ranks of a group read and exchange.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use dcp_core::checkpoint::ReadReport;
use dcp_core::error::Phase;
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader};

use crate::exchange_message::{Piece, Wanted};
use crate::group::Group;
use crate::planned::tensor_dtype;
use crate::read_sharing::{Exchange, Speeds, speed};

/// Bytes that a rank reads, and at most one message more.
const READ: u64 = 8 << 20;
/// Bytes that all ranks send together.
const SENT: usize = 4 << 20;
/// The longest message.
const MESSAGE_MAX: usize = 1 << 20;
/// The shortest message.
const MESSAGE_MIN: usize = 64 << 10;

/// The speeds of all ranks, the same list on each, and what this rank read for it. Each reads a
/// part of `send`, which is different on every rank: what one reads shall be in no cache for another.
pub(crate) async fn measure(
    group: &Group,
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    send: &LoadPlan,
    exchange: Exchange,
) -> Result<(Vec<Speeds>, ReadReport), CheckpointError> {
    let read = read_some(reader, metadata, send).await;
    // All have read, so none waits for another in what follows.
    let (reads, cost) = group.all_gather_with(Phase::Read, read).await?;
    let exchanged = exchange_some(group, exchange).await?;
    let exchanges = group.all_gather_results(Phase::Read, Ok(exchanged)).await?;
    let speeds = reads.into_iter().zip(exchanges);
    Ok((speeds.map(|(read, exchange)| Speeds { read, exchange }).collect(), cost))
}

/// Reads in one call of the reader, which has as many requests in flight as in a load.
async fn read_some(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    send: &LoadPlan,
) -> Result<(u64, ReadReport), CheckpointError> {
    let mut wanted = Wanted::default();
    for item in &send.items {
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
        if wanted.byte_len() >= READ {
            break;
        }
        let dtype = tensor_dtype(metadata, item.entry)?;
        wanted.push(Piece::tensor(item.entry, *chunk, region.clone()), dtype);
    }
    if wanted.is_empty() {
        // It has nothing to read, so it delays no one.
        return Ok((u64::MAX, ReadReport::default()));
    }
    let byte_len = wanted.byte_len();
    let start = Instant::now();
    let (_, cost) = wanted.read(reader, metadata).await?;
    Ok((speed(byte_len, start.elapsed()), ReadReport::new(0, cost.bytes_read)))
}

/// Sends messages as a shared load does, and copies them as into tensors.
async fn exchange_some(group: &Group, exchange: Exchange) -> Result<u64, CheckpointError> {
    let context = group.context();
    let ranks = context.world_size;
    let len = (SENT / ranks.max(1) as usize).clamp(MESSAGE_MIN, MESSAGE_MAX);
    let message = Bytes::from(vec![0; len]);
    let start = Instant::now();
    match exchange {
        Exchange::Broadcast => {
            for root in 0..ranks {
                let mine = (root == context.rank).then(|| Ok(message.clone()));
                let bytes = group.broadcast(Phase::Read, root, mine).await?;
                black_box(bytes.to_vec());
            }
        }
        Exchange::GatherRounds => {
            for bytes in group.exchange(Phase::Read, Ok(message)).await? {
                black_box(bytes.to_vec());
            }
        }
    }
    Ok(speed(len as u64 * u64::from(ranks), start.elapsed()))
}
