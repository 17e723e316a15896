//! The losses of the averages of several ranks, together.

use std::sync::PoisonError;

use dcp_core::CheckpointError;
use dcp_core::wire::{MessageReader, MessageWriter};

use crate::cast::CastCounts;
use crate::group::JobGroup;

use super::Averaged;

const MAGIC: [u8; 4] = *b"dca1";

impl Averaged {
    /// Adds what the other ranks of a group have lost to what this one has, on rank 0.
    ///
    /// # Errors
    ///
    /// When a rank failed or was lost.
    pub async fn gather_counts(&self, group: &JobGroup) -> Result<(), CheckpointError> {
        let mut message = MessageWriter::new(MAGIC);
        {
            let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            counts.iter().for_each(|counts| counts.write_to(&mut message));
            let overflowed = self.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
            message.numbers(&overflowed);
        }
        let Some(all) = group.gather(message.finish()).await? else { return Ok(()) };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut overflowed = self.overflowed.lock().unwrap_or_else(PoisonError::into_inner);
        for message in all.iter().skip(1) {
            let mut message = MessageReader::new(message, MAGIC)?;
            for sum in counts.iter_mut() {
                sum.add(&CastCounts::read_from(&mut message)?);
            }
            for sum in overflowed.iter_mut() {
                *sum = sum.saturating_add(message.number()?);
            }
            message.finish()?;
        }
        Ok(())
    }
}
