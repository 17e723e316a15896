//! The messages that a rank sends, of which the next one is read while the others talk.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::ReadReport;
use dcp_core::plan::LoadPlan;
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader};
use tokio::task::JoinHandle;

use super::exchange_message::Message;
use crate::metadata_lookup::out_of_step;

type Reading = JoinHandle<Result<(Bytes, ReadReport), CheckpointError>>;

/// The messages of this rank.
pub(crate) struct ReadAhead {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    waiting: VecDeque<Message>,
    reading: Option<Reading>,
    /// The error because of which there are no messages.
    problem: Option<CheckpointError>,
}

impl ReadAhead {
    /// Starts to read the first message of `send`.
    pub(crate) fn new(
        reader: &Arc<dyn StorageReader>,
        metadata: &Arc<CheckpointMetadata>,
        send: &LoadPlan,
    ) -> Self {
        let (waiting, problem) = match Message::all_of(send, metadata) {
            Ok(messages) => (messages, None),
            Err(error) => (VecDeque::new(), Some(error)),
        };
        let (reader, metadata) = (Arc::clone(reader), Arc::clone(metadata));
        let mut ahead = Self { reader, metadata, waiting, reading: None, problem };
        ahead.begin();
        ahead
    }

    fn begin(&mut self) {
        self.reading = self.waiting.pop_front().map(|message| {
            let (reader, metadata) = (Arc::clone(&self.reader), Arc::clone(&self.metadata));
            tokio::spawn(async move { message.read(&reader, &metadata).await })
        });
    }

    /// The next message; starts to read the one after it.
    pub(crate) async fn next(&mut self, report: &mut ReadReport) -> Result<Bytes, CheckpointError> {
        if let Some(problem) = self.problem.take() {
            return Err(problem);
        }
        let reading = self.reading.as_mut();
        let reading =
            reading.ok_or_else(|| out_of_step("this rank has no message left to send"))?;
        let (bytes, cost) = reading.await.map_err(CheckpointError::application)??;
        *report += ReadReport::new(0, cost.bytes_read);
        self.begin();
        Ok(bytes)
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        if let Some(reading) = &self.reading {
            reading.abort();
        }
    }
}
