//! Measures how fast the ranks of a group read and exchange.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::ReadReport;
use dcp_core::error::Phase;
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader};
use tokio::time::Instant;

use super::Exchange;
use super::cost_model::{Speeds, speed};
use super::exchange_message::{Piece, Wanted};
use crate::group::Group;
use crate::metadata_lookup::tensor_dtype;

/// Bytes that a rank reads, and at most one message more.
const READ: u64 = 8 << 20;
/// Bytes that a rank reads again, and at most one message more.
const AGAIN: u64 = 4 << 20;
/// Bytes that all ranks send together.
const SENT: usize = 4 << 20;
/// The longest message.
const MESSAGE_MAX: usize = 1 << 20;
/// The shortest message.
const MESSAGE_MIN: usize = 64 << 10;
/// The most ranks that send to all in turns: those of a large group would take turns for seconds.
const SENDERS_MAX: u32 = 16;

/// The speeds of all ranks, the same list on each, and what this rank read for it.
///
/// Each rank reads a part of what it would send, which is different on every rank: what one reads shall
/// be in no cache for another. When all have read, each reads what a neighbor on its machine has
/// read, `again`, and not its own part, which may be in a cache that no other rank uses. Either all
/// ranks have an `again` or none has.
pub(crate) async fn measure(
    group: &Group,
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    send: &LoadPlan,
    again: Option<&LoadPlan>,
    exchange: Exchange,
) -> Result<(Vec<Speeds>, ReadReport), CheckpointError> {
    let mine = async || read(reader, metadata, &leading(send, metadata, READ)?).await;
    // All have read, so none waits for another in what follows.
    let (reads, mut cost) = group.all_gather_with(Phase::Read, mine().await).await?;
    let mut agains = vec![None; reads.len()];
    if let Some(again) = again {
        let again = read(reader, metadata, again).await;
        let (speeds, more) = group.all_gather_with(Phase::Read, again).await?;
        agains = speeds;
        cost += more;
    }
    let exchanged = exchange_some(group, exchange).await?;
    let exchanges = group.all_gather_results(Phase::Read, Ok(exchanged)).await?;
    let speeds = reads.into_iter().zip(agains).zip(exchanges);
    let speeds = speeds.map(|((read, again), exchange)| {
        // One that has nothing to read delays no other.
        Speeds { read: read.unwrap_or(u64::MAX), again, exchange }
    });
    Ok((speeds.collect(), cost))
}

/// The first tensors that a rank reads to send them, about `bytes` of them.
fn leading(
    send: &LoadPlan,
    metadata: &CheckpointMetadata,
    bytes: u64,
) -> Result<LoadPlan, CheckpointError> {
    let (mut leading, mut byte_len) = (LoadPlan::default(), 0_u64);
    for item in &send.items {
        let ReadKind::Tensor { region, .. } = &item.kind else { continue };
        if byte_len >= bytes {
            break;
        }
        let size = tensor_dtype(metadata, item.entry)?.size() as u64;
        byte_len = byte_len.saturating_add(region.volume().saturating_mul(size));
        leading.items.push(item.clone());
    }
    Ok(leading)
}

/// Returns the first tensors of `send`, which neighbors of the rank that sends it read again.
pub(crate) fn read_again(
    send: &LoadPlan,
    metadata: &CheckpointMetadata,
) -> Result<LoadPlan, CheckpointError> {
    leading(send, metadata, AGAIN)
}

/// Reads tensors in one call of the reader, which has as many requests in flight as in a load. The
/// speed; none without anything to read.
async fn read(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    plan: &LoadPlan,
) -> Result<(Option<u64>, ReadReport), CheckpointError> {
    let mut wanted = Wanted::default();
    for item in &plan.items {
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else { continue };
        let dtype = tensor_dtype(metadata, item.entry)?;
        wanted.push(Piece::tensor(item.entry, *chunk, region.clone()), dtype);
    }
    if wanted.is_empty() {
        return Ok((None, ReadReport::default()));
    }
    let byte_len = wanted.byte_len();
    let start = Instant::now();
    let (_, cost) = wanted.read(reader, metadata).await?;
    Ok((Some(speed(byte_len, start.elapsed())), ReadReport::new(0, cost.bytes_read)))
}

/// Sends messages as a shared load does, and copies them as into tensors.
async fn exchange_some(group: &Group, exchange: Exchange) -> Result<u64, CheckpointError> {
    let context = group.context();
    let ranks = context.world_size;
    let senders = match exchange {
        Exchange::Broadcast => ranks.clamp(1, SENDERS_MAX),
        Exchange::GatherRounds => ranks.max(1),
    };
    let len = (SENT / senders as usize).clamp(MESSAGE_MIN, MESSAGE_MAX);
    let message = Bytes::from(vec![0; len]);
    let (mut sent, start) = (0, Instant::now());
    match exchange {
        Exchange::Broadcast => {
            // Of all machines.
            let every = ranks.div_ceil(senders).max(1) as usize;
            for root in (0..ranks).step_by(every) {
                let mine = (root == context.rank).then(|| Ok(message.clone()));
                let bytes = group.broadcast(Phase::Read, root, mine).await?;
                black_box(bytes.to_vec());
                sent += len as u64;
            }
        }
        Exchange::GatherRounds => {
            for bytes in group.exchange(Phase::Read, Ok(message)).await? {
                black_box(bytes.to_vec());
                sent += len as u64;
            }
        }
    }
    Ok(speed(sent, start.elapsed()))
}
