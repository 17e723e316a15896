//! The machine of a rank: ranks of one machine may share what it keeps in memory.

use std::collections::HashMap;
use std::sync::OnceLock;

use dcp_core::Rank;
use dcp_core::digest::fnv1a_64;

/// A name of the machine on which this process runs; `None` where the system gives none.
///
/// It is a hash of Linux's boot id, which all containers of a machine have in common, as they have its
/// page cache. Equal names do not prove that there is a common cache (machines that were started from
/// one snapshot have the same, and a mount may have a cache of its own), so what it is worth is measured.
pub(crate) fn machine() -> Option<u64> {
    static MACHINE: OnceLock<Option<u64>> = OnceLock::new();
    *MACHINE.get_or_init(|| {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
        (!boot.is_empty()).then(|| fnv1a_64(boot))
    })
}

/// The first rank on the machine of each rank. One without a name is on a machine of its own.
pub(crate) fn machines(names: impl IntoIterator<Item = Option<u64>>) -> Vec<Rank> {
    let mut firsts = HashMap::new();
    let first = |(rank, name): (Rank, Option<u64>)| match name {
        Some(name) => *firsts.entry(name).or_insert(rank),
        None => rank,
    };
    (0..).zip(names).map(first).collect()
}

/// For each rank the next one on its machine of which `has` is true, around to the first; none for
/// a rank without such a neighbor.
pub(crate) fn neighbors(machines: &[Rank], has: impl Fn(Rank) -> bool) -> Vec<Option<Rank>> {
    let mut ranks_of: HashMap<Rank, Vec<Rank>> = HashMap::new();
    for (rank, machine) in (0..).zip(machines).filter(|(rank, _)| has(*rank)) {
        ranks_of.entry(*machine).or_default().push(rank);
    }
    let next = |(rank, machine): (Rank, &Rank)| {
        let ranks = ranks_of.get(machine)?;
        let after = ranks.get(ranks.partition_point(|other| *other <= rank));
        after.or_else(|| ranks.first()).copied().filter(|other| *other != rank)
    };
    (0..).zip(machines).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_one_name_are_on_one_machine() {
        assert_eq!(machines([Some(7), Some(9), Some(7), Some(9)]), [0, 1, 0, 1]);
        assert_eq!(machines([None, Some(3), None, Some(3)]), [0, 1, 2, 1]);
        assert_eq!(machines([]), []);
        assert_eq!(machine(), machine());
        assert!(machine().is_some() || !cfg!(target_os = "linux"));
    }

    #[test]
    fn each_rank_has_the_next_one_of_its_machine_as_neighbor() {
        let machines = [0, 1, 0, 1, 0, 5];
        let all = [Some(2), Some(3), Some(4), Some(1), Some(0), None];
        assert_eq!(neighbors(&machines, |_| true), all);
        // Ranks without anything are no neighbors, and have some.
        let some = [Some(2), Some(3), None, None, Some(2), None];
        assert_eq!(neighbors(&machines, |rank| rank == 2 || rank == 3), some);
        assert_eq!(neighbors(&machines, |_| false), [None; 6]);
    }
}
