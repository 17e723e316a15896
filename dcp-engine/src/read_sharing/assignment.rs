//! The coordinator's messages that assign reads and sends to the ranks of an exchange.

use bytes::Bytes;
use dcp_core::plan::LoadPlan;
use dcp_core::{PlanError, Rank};

use super::cost_model::Needs;

/// The part of an exchange's plan that all ranks need. It has a number for each rank, so it is broadcast,
/// and not a part of every assignment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// The number of messages that each rank sends.
    pub(crate) turns: Vec<u32>,
    /// The bytes of the load.
    pub(crate) needs: Needs,
    /// Whether any rank has something to read again.
    pub(crate) reads_again: bool,
}

/// The reads and sends of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// Items that the rank reads and sends; the leaf of an item is the number of its message.
    pub(crate) send: LoadPlan,
    /// Items that the rank reads for itself alone.
    pub(crate) keep: LoadPlan,
    /// Items that a measurement reads again, when another rank of the machine has read them.
    pub(crate) again: LoadPlan,
}

impl Schedule {
    pub(crate) fn to_wire(&self) -> Bytes {
        let Needs { most, first, sent, to_send, kept, spread } = self.needs;
        let numbers = [most, first, sent, to_send, kept, spread.into(), self.reads_again.into()];
        let mut out = Vec::with_capacity(8 * numbers.len() + 4 * self.turns.len() + 1);
        out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        out.extend(self.turns.iter().flat_map(|turns| turns.to_le_bytes()));
        out.into()
    }

    pub(crate) fn from_wire(bytes: &[u8], world_size: u32) -> Result<Self, PlanError> {
        let (numbers, rest) = bytes.split_first_chunk::<56>().ok_or_else(bad)?;
        let numbers = numbers.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number));
        let numbers: Vec<u64> = numbers.collect();
        let [most, first, sent, to_send, kept, spread, reads_again] = *numbers else {
            return Err(bad());
        };
        let (turns, []) = rest.as_chunks::<4>() else { return Err(bad()) };
        if turns.len() != world_size as usize {
            return Err(bad());
        }
        Ok(Self {
            turns: turns.iter().map(|turns| u32::from_le_bytes(*turns)).collect(),
            needs: Needs { most, first, sent, to_send, kept, spread: spread != 0 },
            reads_again: reads_again != 0,
        })
    }

    /// The number of messages that `rank` sends.
    pub(crate) fn turns_of(&self, rank: Rank) -> u32 {
        self.turns.get(rank as usize).copied().unwrap_or(0)
    }
}

impl Assignment {
    pub(crate) fn to_wire(&self) -> Bytes {
        let mut out = Vec::new();
        for column in [&self.send, &self.keep, &self.again].map(LoadPlan::to_wire) {
            out.extend_from_slice(&(column.len() as u64).to_le_bytes());
            out.extend_from_slice(&column);
        }
        out.into()
    }

    pub(crate) fn from_wire(mut bytes: &[u8]) -> Result<Self, PlanError> {
        let mut column = || {
            let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
            let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| bad())?;
            let (column, rest) = rest.split_at_checked(len).ok_or_else(bad)?;
            bytes = rest;
            LoadPlan::from_wire(column)
        };
        Ok(Self { send: column()?, keep: column()?, again: column()? })
    }
}

fn bad() -> PlanError {
    PlanError::message(
        "the assignment of reads",
        "it ends too early, or has another number of ranks",
    )
}
