//! The model by which a load decides whether its ranks share their reads.
//!
//! Measured are three speeds in bytes per second of the slowest rank: `r`, while all ranks read bytes
//! that no other has read; `q`, while all read again what another rank of their machine has read; and
//! `x`, while all receive and one after the other sends.
//!
//! | way | expected seconds |
//! |---|---|
//! | each rank reads what it needs | the longer of `first / r` and `most / q` |
//! | ranks share | the longer of `to_send / r` and `sent / x`, then `kept / r` |
//!
//! - `most` bytes are the most that one rank needs. A machine whose ranks need the same reads it from the
//!   storage once if it keeps it in memory, as the page cache does: of a byte that `j` ranks of one
//!   machine need, each is the first to read a `j`-th, and `first` bytes are the most of them that one
//!   rank has. The machine with `k` replicas so reads each byte at `k * r`. While one rank waits for the
//!   storage, others copy from memory, so the longer time counts, not the sum.
//! - Where nothing keeps what was read, as with an object store or direct I/O, `q` is `r`, and reading
//!   alone takes `most / r`. Nothing has to say which storages have a cache: the speeds show it. A rank that
//!   is alone on its machine has `first` of all that it needs.
//! - `sent` bytes are needed by more than one rank, each byte counted once; the rank that reads most
//!   of them reads `to_send`. Messages are read ahead, so reading and sending overlap. At the end each rank
//!   reads what it alone needs, at most `kept` bytes.
//! - A speed `q` below `r` is noise and counts as `r`: no byte is slower for having been read before.
//!
//! A measurement costs time, too. A load that sharing could shorten by less than reading 256 MiB takes
//! measures nothing. It is shared if ranks on several machines need the same and sharing sends at most
//! 512 MiB (two ranks that save 256 MiB each send that much). What that costs has a limit, and what thousands
//! of ranks cost a busy storage has none. The ranks of one machine are few, and most often
//! find in its page cache what one of them has read, so they read alone.
//!
//! The model counts no latency: it is in the speeds, whose requests are of the lengths that the load
//! makes. It has only integers, so ranks on different processors get the same result from the same
//! messages.

use std::collections::HashMap;
use std::time::Duration;

use dcp_core::Rank;
use serde::{Deserialize, Serialize};

/// The bytes that a load is about; the module documentation defines them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) most: u64,
    pub(crate) first: u64,
    pub(crate) sent: u64,
    pub(crate) to_send: u64,
    pub(crate) kept: u64,
    /// Whether ranks on several machines need the same.
    pub(crate) spread: bool,
}

/// Bytes per second of one rank, while all ranks do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Speeds {
    pub(crate) read: u64,
    /// Of bytes that another rank of the machine has read, where there is one.
    pub(crate) again: Option<u64>,
    pub(crate) exchange: u64,
}

/// A load that saves less is not worth a measurement.
const WORTH: u64 = 256 << 20;
/// Bytes that are sent without one.
const UNMEASURED: u64 = 2 * WORTH;
/// The highest ratio of the speeds at which a rank could receive and reads: 200 Gbit/s are so many times
/// the 1.5 GB/s that a storage gives each of many ranks.
const FASTER_AT_MOST: u64 = 16;

impl Needs {
    /// Whether sharing could save so much that the speeds are measured.
    pub(crate) fn are_worth_measuring(self) -> bool {
        self.most.saturating_sub(self.to_send).saturating_sub(self.kept) >= WORTH
    }

    /// Whether ranks share without a measurement.
    pub(crate) fn share_unmeasured(self) -> bool {
        self.spread && self.sent <= UNMEASURED
    }

    /// Whether ranks could share, by what is known without their speeds. What is sent goes to all
    /// ranks: of many groups of replicas, each rank receives what all of them need.
    pub(crate) fn could_share(self) -> bool {
        self.sent > 0 && self.sent <= self.most.saturating_mul(FASTER_AT_MOST)
    }

    /// Whether sharing is expected to be faster by a tenth, by the speeds of all ranks.
    pub(crate) fn should_share(self, speeds: &[Speeds]) -> bool {
        let slowest = |speed: fn(&Speeds) -> u64| speeds.iter().map(speed).min().unwrap_or(0);
        let (read, exchange) = (slowest(|speeds| speeds.read), slowest(|speeds| speeds.exchange));
        let again = speeds.iter().filter_map(|speeds| speeds.again).min();
        let again = again.unwrap_or(read).max(read);
        let alone = nanoseconds(self.first, read).max(nanoseconds(self.most, again));
        let exchanged = nanoseconds(self.to_send, read).max(nanoseconds(self.sent, exchange));
        let shared = exchanged.saturating_add(nanoseconds(self.kept, read));
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

/// Adds up the bytes that each rank needs.
#[derive(Debug)]
pub(crate) struct Needed<'a> {
    /// The machine of each rank.
    machines: &'a [u32],
    /// Of each rank: the bytes that it needs, and those that it is the first to read.
    ranks: Vec<(u64, u64)>,
    spread: bool,
}

impl<'a> Needed<'a> {
    pub(crate) fn new(machines: &'a [u32]) -> Self {
        Self { machines, ranks: vec![(0, 0); machines.len()], spread: false }
    }

    /// `bytes` that each of these ranks needs.
    pub(crate) fn add(&mut self, bytes: u64, ranks: &[Rank]) {
        let machine = |rank: &Rank| self.machines.get(*rank as usize).copied();
        let mut neighbors: HashMap<Option<u32>, u64> = HashMap::new();
        for rank in ranks {
            *neighbors.entry(machine(rank)).or_default() += 1;
        }
        self.spread |= neighbors.len() > 1;
        for rank in ranks {
            let of_machine = neighbors.get(&machine(rank)).copied().unwrap_or(1);
            if let Some((needed, first)) = self.ranks.get_mut(*rank as usize) {
                *needed = needed.saturating_add(bytes);
                *first = first.saturating_add(bytes.div_ceil(of_machine));
            }
        }
    }

    /// The bytes of the load, of which `sent` are sent.
    pub(crate) fn needs(&self, sent: u64, to_send: u64, kept: u64) -> Needs {
        let most = |of: fn(&(u64, u64)) -> u64| self.ranks.iter().map(of).max().unwrap_or(0);
        let (first, spread) = (most(|rank| rank.1), self.spread);
        Needs { most: most(|rank| rank.0), first, sent, to_send, kept, spread }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Replicas of a gibibyte, so many on each of some machines.
    fn replicas(machines: u32, of_each: u32) -> Needs {
        let ranks: Vec<Rank> = (0..machines * of_each).collect();
        let places: Vec<u32> = ranks.iter().map(|rank| rank / of_each).collect();
        let mut needed = Needed::new(&places);
        needed.add(1024 * MIB, &ranks);
        needed.needs(1024 * MIB, 1024 * MIB / u64::from(machines * of_each), 0)
    }

    fn ranks(read: u64, again: Option<u64>, exchange: u64) -> Vec<Speeds> {
        let again = again.map(|again| again * MIB);
        vec![Speeds { read: read * MIB, again, exchange: exchange * MIB }; 8]
    }

    #[test]
    fn replicas_share_where_exchanging_is_faster_than_reading() {
        let needs = replicas(8, 1);
        assert!(needs.should_share(&ranks(100, None, 1000)));
        assert!(!needs.should_share(&ranks(1000, None, 100)));
        // A tenth faster, and a little less than that.
        assert!(needs.should_share(&ranks(899, None, 1000)));
        assert!(!needs.should_share(&ranks(901, None, 1000)));
    }

    /// Eight ranks on a disk that reads 1.9 GB/s and a memory that copies 6.4 GB/s: TCP to each other
    /// is slower than that memory, messages in one process are not.
    #[test]
    fn ranks_of_one_machine_read_a_cold_disk_once_either_way() {
        let needs = replicas(1, 8);
        assert_eq!((needs.most, needs.first), (1024 * MIB, 128 * MIB));
        assert!(!needs.should_share(&ranks(230, Some(780), 340)));
        assert!(needs.should_share(&ranks(230, Some(780), 1200)));
        // One would share over TCP if each had to read everything from the disk.
        assert!(needs.should_share(&ranks(230, None, 340)));
        // So slow a disk is all that either way waits for.
        assert!(!needs.should_share(&ranks(10, Some(780), 5000)));
    }

    #[test]
    fn ranks_of_one_machine_share_what_comes_from_an_object_store() {
        let needs = replicas(1, 8);
        assert!(needs.should_share(&ranks(50, Some(55), 400)));
        assert!(!needs.should_share(&ranks(500, Some(510), 400)));
        // Nothing is slower for having been read before.
        assert!(!needs.should_share(&ranks(500, Some(50), 400)));
    }

    #[test]
    fn each_machine_reads_once_what_its_ranks_read_alone() {
        let needs = replicas(2, 4);
        assert_eq!((needs.first, needs.to_send), (256 * MIB, 128 * MIB));
        // Alone: 1.1 s from the disk, 1.3 s from memory. Shared: 0.6 s from the disk, 3 s of TCP.
        assert!(!needs.should_share(&ranks(230, Some(780), 340)));
        // The disks are the limit, and together they read twice as fast.
        assert!(needs.should_share(&ranks(50, Some(780), 1000)));
        assert!(!needs.should_share(&ranks(50, Some(780), 220)));
    }

    #[test]
    fn ranks_need_different_bytes() {
        // Ranks 0 and 1 are neighbors, 2 is alone.
        let mut needed = Needed::new(&[0, 0, 2]);
        needed.add(100, &[0, 1, 2]);
        needed.add(50, &[1]);
        let most = |needed: &Needed| {
            let needs = needed.needs(0, 0, 0);
            (needs.most, needs.first)
        };
        assert_eq!(most(&needed), (150, 100));
        needed.add(7, &[0, 2]);
        assert_eq!(most(&needed), (150, 107));
        needed.add(301, &[0, 1]);
        assert_eq!(most(&needed), (451, 251));
        assert_eq!(most(&Needed::new(&[])), (0, 0));
    }

    #[test]
    fn ranks_with_parts_of_their_own_do_not_share() {
        let sharded =
            Needs { most: 128 * MIB, first: 128 * MIB, kept: 128 * MIB, ..Needs::default() };
        assert!(!sharded.are_worth_measuring());
        assert!(!sharded.should_share(&ranks(100, None, u64::MAX / MIB)));
    }

    /// A gibibyte that all need, and one more for each rank alone.
    #[test]
    fn what_ranks_keep_is_not_sent() {
        let common = replicas(8, 1);
        let (most, kept) = (2048 * MIB, 1024 * MIB);
        let needs = Needs { most, first: most, kept, ..common };
        assert!(needs.are_worth_measuring());
        // 20 s alone; 10 s at least for what is kept.
        assert!(needs.should_share(&ranks(100, None, 200)));
        assert!(!needs.should_share(&ranks(100, None, 120)));
    }

    #[test]
    fn the_slowest_rank_decides() {
        let needs = replicas(8, 1);
        let mut speeds = ranks(100, None, 1000);
        speeds[5].exchange = 50 * MIB;
        assert!(!needs.should_share(&speeds));
        speeds[3].read = 10 * MIB;
        assert!(needs.should_share(&speeds));
        // Ranks that have nothing to read again do not count.
        let needs = replicas(1, 8);
        let mut speeds = ranks(100, None, 200);
        speeds[2].again = Some(5000 * MIB);
        assert!(!needs.should_share(&speeds));
        speeds[4].again = Some(150 * MIB);
        assert!(needs.should_share(&speeds));
    }

    #[test]
    fn only_large_loads_are_measured() {
        assert!(replicas(8, 1).are_worth_measuring());
        assert!(replicas(1, 8).are_worth_measuring());
        let small =
            Needs { most: 200 * MIB, first: 200 * MIB, sent: 200 * MIB, ..Needs::default() };
        assert!(!small.are_worth_measuring());
        assert!(!replicas(1, 1).are_worth_measuring());
    }

    #[test]
    fn small_loads_are_shared_by_the_ranks_of_several_machines() {
        let small = |needs: Needs| Needs { sent: 512 * MIB, ..needs };
        assert!(small(replicas(8, 1)).share_unmeasured());
        assert!(small(replicas(2, 4)).share_unmeasured());
        assert!(!small(replicas(1, 8)).share_unmeasured());
        // Others that need something else make no difference, wherever they are.
        let mut needed = Needed::new(&[0, 0, 2]);
        needed.add(100, &[0, 1]);
        needed.add(100, &[2]);
        assert!(!needed.needs(100, 50, 100).share_unmeasured());
        needed.add(1, &[1, 2]);
        assert!(needed.needs(101, 50, 100).share_unmeasured());
        // One rank keeps so much that sharing saves nothing, and much would be sent.
        let lopsided = Needs { kept: 1024 * MIB, ..replicas(8, 1) };
        assert!(!lopsided.are_worth_measuring() && !lopsided.share_unmeasured());
    }

    #[test]
    fn what_is_sent_to_all_is_at_most_16_times_what_a_rank_needs() {
        let groups = |groups: u64| Needs { sent: groups * 1024 * MIB, ..replicas(8, 1) };
        assert!(groups(1).could_share() && groups(16).could_share());
        assert!(!groups(17).could_share());
        assert!(!groups(0).could_share());
    }

    #[test]
    fn extreme_speeds_divide_by_no_zero() {
        let needs = replicas(8, 1);
        assert!(needs.should_share(&ranks(0, None, 1)));
        assert!(!needs.should_share(&[]));
        assert_eq!(speed(7, Duration::ZERO), 7_000_000_000);
        assert_eq!(speed(u64::MAX, Duration::from_nanos(1)), u64::MAX);
        assert_eq!(speed(MIB, Duration::from_secs(2)), MIB / 2);
    }
}
