//! Whether ranks share their reads, and how; and the model by which a load decides.
//!
//! Each rank of a load has two lengths: the most bytes that one rank needs, and the bytes that any
//! of them needs, each counted once. With `n` ranks, of which the slowest reads `r` bytes per second
//! while all read, and receives `x` bytes per second while all send one after the other:
//!
//! | way | expected seconds |
//! |---|---|
//! | each rank reads what it needs | `most / r` |
//! | ranks share | the longer of `once / n / r` and `once / x`, since they overlap |
//!
//! Both speeds are measured in the load itself, with bytes that take a small part of it. The model
//! counts no latency: it is in the speeds, whose requests are of the lengths that the load makes. It has
//! only integers, so ranks on different processors get the same result from the same messages.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How ranks exchange the data that they have read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exchange {
    /// One rank after the other sends one message to all, in turns (Megatron-Core's `broadcast`,
    /// which lets a rank send all it has before the next one begins).
    #[default]
    Broadcast,
    /// Every rank sends one message to every rank, in rounds (Megatron-Core's `gather_rounds`, where a
    /// round has one tensor of each rank, however large; here it has so many bytes).
    GatherRounds,
}

/// Whether the ranks of a group share their reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadSharing {
    /// What several ranks need is read by one of them, and sent to the others.
    #[default]
    Always,
    /// Each load measures how fast ranks read and exchange, and takes the way that is expected to be
    /// faster by a tenth. It reads 8 to 16 MiB per rank for that, and only where sharing could save
    /// 256 MiB per rank; smaller loads are not shared.
    Auto,
    /// Every rank reads what it needs.
    Never,
}

/// The bytes that a load is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// The most that one rank needs.
    pub(crate) most: u64,
    /// What any rank needs, each byte once.
    pub(crate) once: u64,
}

/// Bytes per second of one rank, while all ranks do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Speeds {
    pub(crate) read: u64,
    pub(crate) exchange: u64,
}

/// A load that saves less is not worth a measurement.
const WORTH: u64 = 256 << 20;

impl Needs {
    /// Whether sharing could save so much that the speeds are measured.
    pub(crate) fn are_worth_measuring(self, world_size: u32) -> bool {
        let share = self.once / u64::from(world_size.max(1));
        self.most.saturating_sub(share) >= WORTH
    }

    /// Whether sharing is expected to be faster by a tenth, given the speeds of all ranks.
    pub(crate) fn should_share(self, speeds: &[Speeds]) -> bool {
        let slowest = |speed: fn(&Speeds) -> u64| speeds.iter().map(speed).min().unwrap_or(0);
        let (read, exchange) = (slowest(|speeds| speeds.read), slowest(|speeds| speeds.exchange));
        let share = self.once.div_ceil(speeds.len().max(1) as u64);
        let alone = nanoseconds(self.most, read);
        let shared = nanoseconds(share, read).max(nanoseconds(self.once, exchange));
        shared.saturating_mul(10) <= alone.saturating_mul(9)
    }
}

fn nanoseconds(bytes: u64, per_second: u64) -> u128 {
    u128::from(bytes) * 1_000_000_000 / u128::from(per_second.max(1))
}

/// The speed at which `bytes` took so long.
pub(crate) fn speed(bytes: u64, time: Duration) -> u64 {
    let per_second = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// Eight replicas of a gibibyte.
    const REPLICAS: Needs = Needs { most: 1024 * MIB, once: 1024 * MIB };

    fn ranks(read: u64, exchange: u64) -> Vec<Speeds> {
        vec![Speeds { read: read * MIB, exchange: exchange * MIB }; 8]
    }

    #[test]
    fn replicas_share_where_exchanging_is_faster_than_reading() {
        assert!(REPLICAS.should_share(&ranks(100, 1000)));
        assert!(!REPLICAS.should_share(&ranks(1000, 100)));
        // A tenth faster, and a little less than that.
        assert!(REPLICAS.should_share(&ranks(899, 1000)));
        assert!(!REPLICAS.should_share(&ranks(901, 1000)));
    }

    #[test]
    fn ranks_with_parts_of_their_own_do_not_share() {
        let sharded = Needs { most: 128 * MIB, once: 1024 * MIB };
        assert!(!sharded.are_worth_measuring(8));
        assert!(!sharded.should_share(&ranks(100, u64::MAX / MIB)));
    }

    #[test]
    fn the_slowest_rank_decides() {
        let mut speeds = ranks(100, 1000);
        speeds[5].exchange = 50 * MIB;
        assert!(!REPLICAS.should_share(&speeds));
        speeds[3].read = 10 * MIB;
        assert!(REPLICAS.should_share(&speeds));
    }

    #[test]
    fn only_large_loads_are_measured() {
        assert!(REPLICAS.are_worth_measuring(8));
        assert!(!Needs { most: 200 * MIB, once: 200 * MIB }.are_worth_measuring(8));
        assert!(!REPLICAS.are_worth_measuring(1));
    }

    #[test]
    fn extreme_speeds_divide_by_no_zero() {
        assert!(REPLICAS.should_share(&ranks(0, 1)));
        assert!(!REPLICAS.should_share(&[]));
        assert_eq!(speed(7, Duration::ZERO), 7_000_000_000);
        assert_eq!(speed(u64::MAX, Duration::from_nanos(1)), u64::MAX);
        assert_eq!(speed(MIB, Duration::from_secs(2)), MIB / 2);
    }
}
