//! Sends the parts of a file, several at a time.

use std::pin::pin;

use dcp_core::storage::{PartFuture, Upload};
use dcp_core::{CheckpointError, Payload, StorageError};
use futures_util::FutureExt as _;
use futures_util::future::{Either, select};
use futures_util::stream::{self, FuturesUnordered, StreamExt};

use super::parts::Parts;

/// The length of each part, and of the parts in flight together.
#[derive(Clone, Copy)]
pub(super) struct PartLens {
    pub(super) part_bytes: u64,
    pub(super) in_flight: u64,
}

/// The parts that are being written.
#[derive(Default)]
struct InFlight {
    parts: FuturesUnordered<futures_util::future::Map<PartFuture, WithLen>>,
    bytes: u64,
}

type Written = (u64, Result<(), StorageError>);
type WithLen = Box<dyn FnOnce(Result<(), StorageError>) -> Written + Send>;

impl InFlight {
    fn push(&mut self, len: u64, part: PartFuture) {
        self.bytes += len;
        let with_len: WithLen = Box::new(move |written| (len, written));
        self.parts.push(part.map(with_len));
    }

    /// Whether a part of `len` bytes may be written as well, and the one after it be made.
    fn has_room(&self, len: u64, lens: PartLens) -> bool {
        self.parts.is_empty() || self.bytes + len + lens.part_bytes <= lens.in_flight
    }

    /// The length of the next part that is written.
    async fn next(&mut self) -> Option<Result<u64, StorageError>> {
        let (len, written) = self.parts.next().await?;
        self.bytes -= len;
        Some(written.map(|()| len))
    }
}

/// Uploads all parts, several at a time, and fills the next one meanwhile.
pub(super) async fn send(
    upload: &mut dyn Upload,
    parts: &mut Parts,
    lens: PartLens,
    sending_part: &mut (dyn FnMut(&Payload) + Send),
    report: &(dyn Fn(u64) + Send + Sync),
) -> Result<u64, CheckpointError> {
    let mut in_flight = InFlight::default();
    let mut sent = 0;
    let mut note = |len: u64| {
        report(len);
        sent += len;
    };
    let outcome = send_all(upload, parts, lens, sending_part, &mut in_flight, &mut note).await;
    // Not dropped after a failure: the storage may be writing them, from lent memory.
    while in_flight.next().await.is_some() {}
    outcome.map(|()| sent)
}

async fn send_all(
    upload: &mut dyn Upload,
    parts: &mut Parts,
    lens: PartLens,
    sending_part: &mut (dyn FnMut(&Payload) + Send),
    in_flight: &mut InFlight,
    written: &mut (dyn FnMut(u64) + Send),
) -> Result<(), CheckpointError> {
    let making = stream::try_unfold(parts, |parts| async move {
        let part = parts.next(lens.part_bytes).await?;
        Ok::<_, CheckpointError>(part.map(|part| (part, parts)))
    });
    let mut making = pin!(making.fuse());
    let mut ready: Option<Payload> = None;
    loop {
        if let Some(part) = ready.take_if(|part| in_flight.has_room(part.len(), lens)) {
            sending_part(&part);
            in_flight.push(part.len(), upload.put_part(part));
        }
        if ready.is_some() || making.is_done() {
            match in_flight.next().await {
                Some(len) => written(len?),
                None if ready.is_none() => return Ok(()),
                None => {}
            }
            continue;
        }
        if in_flight.parts.is_empty() {
            ready = making.next().await.transpose()?;
            continue;
        }
        match select(pin!(in_flight.next()), making.next()).await {
            Either::Left((Some(len), _)) => written(len?),
            Either::Left((None, _)) => {}
            Either::Right((made, _)) => ready = made.transpose()?,
        }
    }
}
