//! Messages between the ranks of a save.

use std::time::Duration;

use dcp_cast::CastCounts;
use dcp_core::checkpoint::WriteReport;
use dcp_core::error::{PlanSubject, RanksProblem};
use dcp_core::wire::{MessageReader, MessageWriter, PlanRequest, PlanSummary};
use dcp_core::{PlanError, Rank};

use crate::packed::{self, Packed, packed};
use crate::small_values::{self, Compared, Digest, Hashed};
use crate::summary::{FileTime, WriteTimes};

/// The first message of a rank to the coordinator: its structure, and the plan that it remembers.
#[derive(Debug, PartialEq)]
pub(crate) struct Offer {
    /// The number of this save among those of its saver.
    pub(crate) sequence: u64,
    pub(crate) summary: PlanSummary,
    pub(crate) remembers: Option<u64>,
    pub(crate) values: Digest,
}

/// The answer of the coordinator; with `compare`, reports have the hashes of single small values.
#[derive(Debug, PartialEq)]
pub(crate) enum Decision {
    /// Every rank repeats its last write plan, under the names of this generation.
    Repeat { generation: u64, compare: bool },
    /// Every rank sends what is requested of its plan, which becomes a part of this one.
    Plan { plan_id: u64, request: PlanRequest, compare: bool },
}

#[derive(Debug, PartialEq)]
pub(crate) struct Totals {
    pub(crate) entries: u64,
    pub(crate) bytes_written: u64,
    pub(crate) files: u64,
    pub(crate) reused_plan: bool,
    pub(crate) write_times: WriteTimes,
    pub(crate) cast: CastCounts,
    /// Of small values, where their hashes were requested.
    pub(crate) compared: Option<Compared>,
}

/// The report of a rank's write, with its duration.
#[derive(Debug, PartialEq)]
pub(crate) struct RankReport {
    /// Without the durations of its files.
    pub(crate) report: WriteReport,
    pub(crate) cast: CastCounts,
    pub(crate) duration: Duration,
    pub(crate) slowest_file: Option<FileTime>,
    /// The hashes of single small values, where they were requested.
    pub(crate) values: Vec<Hashed>,
}

impl RankReport {
    pub(crate) fn new(report: WriteReport, cast: CastCounts, duration: Duration) -> Self {
        let slowest_file = FileTime::slowest(&report);
        Self { report, cast, duration, slowest_file, values: Vec::new() }
    }

    pub(crate) fn with_values(self, values: Vec<Hashed>) -> Self {
        Self { values, ..self }
    }

    /// Bytes in data files.
    pub(crate) fn bytes(&self) -> u64 {
        self.report.files.iter().map(|(_, byte_len)| byte_len).sum()
    }
}

packed!(Offer Decision Totals RankReport);

impl Packed for Offer {
    const MAGIC: [u8; 4] = *b"dof3";

    fn pack(&self, out: &mut MessageWriter) {
        out.number(self.sequence);
        out.bytes(&self.summary.fingerprint.to_le_bytes());
        out.bytes(&self.summary.outline.to_le_bytes());
        out.bytes(self.remembers.map(u64::to_le_bytes).as_ref().map_or(&[], |id| id));
        self.values.write_to(out);
    }

    fn unpack(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let sequence = input.number()?;
        let fingerprint = u128::from_le_bytes(packed::array(input)?);
        let outline = u64::from_le_bytes(packed::array(input)?);
        let remembers = match input.clone().bytes()? {
            [] => input.bytes().map(|_| None)?,
            _ => Some(u64::from_le_bytes(packed::array(input)?)),
        };
        let summary = PlanSummary { fingerprint, outline };
        Ok(Self { sequence, summary, remembers, values: Digest::read_from(input)? })
    }
}

impl Packed for Decision {
    const MAGIC: [u8; 4] = *b"dde3";

    fn pack(&self, out: &mut MessageWriter) {
        match self {
            Self::Repeat { generation, compare } => {
                out.numbers(&[1, u64::from(*compare), *generation]);
            }
            Self::Plan { plan_id, request, compare } => {
                out.numbers(&[0, u64::from(*compare), *plan_id]);
                request.write_to(out);
            }
        }
    }

    fn unpack(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let (repeats, compare) = (packed::flag(input)?, packed::flag(input)?);
        let number = input.number()?;
        Ok(match repeats {
            true => Self::Repeat { generation: number, compare },
            false => {
                let request = PlanRequest::read_from(input)?;
                Self::Plan { plan_id: number, request, compare }
            }
        })
    }
}

impl Packed for Totals {
    const MAGIC: [u8; 4] = *b"dto2";

    fn pack(&self, out: &mut MessageWriter) {
        let Self { entries, bytes_written, files, reused_plan, write_times, cast, compared } = self;
        out.numbers(&[*entries, *bytes_written, *files, u64::from(*reused_plan)]);
        out.number(write_times.slowest_rank.into());
        packed::put_duration(out, write_times.slowest);
        out.number(write_times.slowest_bytes);
        packed::put_duration(out, write_times.mean);
        packed::put_file(out, write_times.slowest_file.as_ref());
        cast.write_to(out);
        out.number(compared.is_some().into());
        if let Some(compared) = compared {
            compared.write_to(out);
        }
    }

    fn unpack(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let (entries, bytes_written, files) = (input.number()?, input.number()?, input.number()?);
        let reused_plan = packed::flag(input)?;
        let slowest_rank = Rank::try_from(input.number()?).unwrap_or(Rank::MAX);
        let (slowest, slowest_bytes) = (packed::duration(input)?, input.number()?);
        let (mean, slowest_file) = (packed::duration(input)?, packed::file(input)?);
        let write_times = WriteTimes { slowest_rank, slowest, slowest_bytes, mean, slowest_file };
        let cast = CastCounts::read_from(input)?;
        let compared = packed::flag(input)?.then(|| Compared::read_from(input)).transpose()?;
        Ok(Self { entries, bytes_written, files, reused_plan, write_times, cast, compared })
    }
}

impl Packed for RankReport {
    const MAGIC: [u8; 4] = *b"drr4";

    fn pack(&self, out: &mut MessageWriter) {
        self.report.write_to(out);
        self.cast.write_to(out);
        packed::put_duration(out, self.duration);
        packed::put_file(out, self.slowest_file.as_ref());
        small_values::put_hashes(out, &self.values);
    }

    fn unpack(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let (report, cast) = (WriteReport::read_from(input)?, CastCounts::read_from(input)?);
        let duration = packed::duration(input)?;
        let slowest_file = packed::file(input)?;
        let values = small_values::hashes(input)?;
        Ok(Self { report, cast, duration, slowest_file, values })
    }
}

/// A hash of everything that a plan depends on.
pub(crate) fn plan_id(key: &[u128]) -> u64 {
    key.iter().flat_map(|part| part.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Refuses to mix saves: ranks whose calls got out of step would write parts of different ones.
pub(crate) fn same_save(offers: &[Offer]) -> Result<(), PlanError> {
    let first = offers.first().map_or(0, |offer| offer.sequence);
    let Some(rank) = offers.iter().position(|offer| offer.sequence != first) else { return Ok(()) };
    let numbered = |offer: &Offer| format!("save number {}", offer.sequence + 1);
    Err(PlanError::Ranks(RanksProblem::Disagreement {
        subject: PlanSubject::State,
        left: numbered(&offers[0]),
        left_rank: 0,
        right: numbered(&offers[rank]),
        right_rank: Rank::try_from(rank).unwrap_or(Rank::MAX),
    }))
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use dcp_core::Key;
    use proptest::prelude::*;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::summary::DifferingValue;

    fn sent<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: &T) -> usize {
        let mut bytes = Vec::new();
        ciborium::into_writer(message, &mut bytes).unwrap();
        assert_eq!(ciborium::from_reader::<T, _>(&*bytes).unwrap(), *message);
        for at in 0..bytes.len() {
            // Damage is an error or another message.
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                let _ = ciborium::from_reader::<T, _>(&*damaged);
            }
            assert!(ciborium::from_reader::<T, _>(&bytes[..at]).is_err());
        }
        bytes.len()
    }

    fn times() -> impl Strategy<Value = Option<FileTime>> {
        let file = ("[a-z_.0-9]{0,20}", any::<u32>(), any::<u64>(), any::<Duration>());
        let file =
            file.prop_map(|(file, rank, bytes, duration)| FileTime { rank, file, bytes, duration });
        prop::option::of(file)
    }

    fn cast() -> impl Strategy<Value = CastCounts> {
        (any::<[u64; 5]>(), 0.0..1e9).prop_map(|(counts, max_relative_error)| CastCounts {
            elements: counts[0],
            out_of_range: counts[1],
            underflowed: counts[2],
            became_nan: counts[3],
            inexact: counts[4],
            max_relative_error,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn messages_arrive_as_they_were_sent(
            numbers in any::<[u64; 6]>(),
            remembers in any::<Option<u64>>(),
            byte_lens in prop::collection::vec(any::<u64>(), 0..3),
            (cast, slowest_file, duration) in (cast(), times(), any::<Duration>()),
        ) {
            let [sequence, high, low, entries, bytes_written, files] = numbers;
            let summary = PlanSummary { fingerprint: u128::from(high) << 64 | 5, outline: low };
            let [n0, n1, v0, v1, v2, ..] = files.to_le_bytes();
            let values = Digest { names: [n0, n1], values: [v0, v1, v2] };
            let offer = Offer { sequence, summary, remembers, values };
            prop_assert!(sent(&offer) <= 59);
            sent(&Decision::Repeat { generation: high, compare: low % 2 == 0 });
            let request = PlanRequest::of(&[summary, summary]);
            sent(&Decision::Plan { plan_id: low, request, compare: high % 2 == 0 });
            let write_times = WriteTimes {
                slowest_rank: 7,
                slowest: duration,
                slowest_bytes: low,
                mean: duration,
                slowest_file: slowest_file.clone(),
            };
            let one = DifferingValue { fqn: "rng".into(), ranks: vec![1, Rank::MAX] };
            let compared = (low % 2 == 0).then(|| Compared { differing: vec![one], own: vec![high] });
            let reused_plan = true;
            sent(&Totals { entries, bytes_written, files, reused_plan, write_times, cast, compared });
            let named = |(rank, len)| (Key::new(format!("__{rank}_0.distcp")).unwrap(), len);
            let report = WriteReport::new((0..).zip(byte_lens).map(named).collect());
            let values = vec![(low, high); files as usize % 3];
            sent(&RankReport { report, cast, duration, slowest_file, values });
        }
    }
}
