//! Distributes shards over the ranks of a group, for writing or reading.
//!
//! Most ranks of a group hold the same shards, so each different list is merged only once, and the
//! holders of a shard are the ranks of the lists that have it. Shards are shared out in the order of
//! key and offset: the result does not depend on the order in which a rank lists its shards.
//! Invariant: a shard has at most one owner, and a rank that lists it twice owns the first of both.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::error::{PlanSubject, RanksProblem};
use dcp_core::plan::SavePlan;
use dcp_core::{Dims, PlanError, Rank};
use dcp_planner::{Holdings, RankSet, ShareRule};

use super::inventory::Inventory;
use crate::error::{MegatronError, PlanRefusal};

/// The operation that a distribution is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Purpose {
    /// A save: shards whose main replica is in another group are that group's affair
    /// (Megatron-Core: `ignore_groups=False`).
    #[default]
    Save,
    /// A load: every shard that any rank of the group requests is read in the group, those with a
    /// main replica in it first (`ignore_groups=True`).
    Load,
}

/// The shards that each rank of a group writes or reads: for each rank, by the positions in its
/// [`Inventory`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    owned: Vec<Vec<bool>>,
}

/// Gives every shard of a group to one of the ranks that hold it.
///
/// `group` is what each rank holds, in the order of ranks in the group. A shard is identified by its key
/// and offset, as in Megatron-Core. With [`ShareRule::Megatron`] the result is what Megatron-Core
/// 0.7 and later arrive at. Nothing depends on the order in which a rank lists its shards. A shard
/// that a rank lists twice counts once.
///
/// # Errors
///
/// When ranks disagree about the size of a shard, and for a save when there are several main
/// replicas of one: what the others hold would not be stored.
pub fn distribute(
    group: &[Inventory],
    rule: ShareRule,
    purpose: Purpose,
) -> Result<Distribution, MegatronError> {
    let mut different: Vec<&SavePlan> = Vec::new();
    let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
    let ranks: Vec<(usize, &[bool])> = group
        .iter()
        .map(|inventory| {
            let at = *known.entry(inventory.shards.to_wire().to_vec()).or_insert_with(|| {
                different.push(&inventory.shards);
                different.len() - 1
            });
            (at, &*inventory.main)
        })
        .collect();
    Ok(distribute_different(&different, &ranks, rule, purpose)?)
}

impl Distribution {
    pub(super) fn from_owned(owned: Vec<Vec<bool>>) -> Self {
        Self { owned }
    }

    /// By rank.
    pub(super) fn all(&self) -> &[Vec<bool>] {
        &self.owned
    }

    /// For each shard of `rank`, in the order of its inventory, whether it writes it, or reads it
    /// for the others. Nothing for a rank outside of the group.
    #[must_use]
    pub fn owned(&self, rank: Rank) -> &[bool] {
        self.owned.get(rank as usize).map_or(&[], |owned| owned)
    }
}

/// A shard of any rank.
#[derive(Debug)]
struct Shard {
    key: Arc<str>,
    offset: Dims,
    byte_len: u64,
    /// The indices of the different lists that have it, ascending.
    lists: Vec<u32>,
    /// A rank with the main replica.
    main: Option<Rank>,
}

/// Distributes shards as [`distribute`] does, from the different lists of shards, and for each rank
/// the list that it holds and which shards of it are main replicas.
pub(super) fn distribute_different(
    lists: &[&SavePlan],
    ranks: &[(usize, &[bool])],
    rule: ShareRule,
    purpose: Purpose,
) -> Result<Distribution, PlanError> {
    let (mut shards, rows) = merge(lists, ranks, purpose)?;
    let mut order: Vec<usize> = (0..shards.len()).collect();
    order.retain(|&at| shards[at].main.is_some() || purpose == Purpose::Load);
    // Shards count in the order of their names.
    order.sort_unstable_by(|&left, &right| {
        let (left, right) = (&shards[left], &shards[right]);
        let (mine, other) = (left.byte_len > 0, right.byte_len > 0);
        (&left.key, &left.offset[..], mine).cmp(&(&right.key, &right.offset[..], other))
    });

    let world_size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    let mut holdings = Holdings::new(world_size);
    let mut known: HashMap<Vec<u32>, Option<RankSet>> = HashMap::new();
    for &at in &order {
        let shard = &mut shards[at];
        let lists = std::mem::take(&mut shard.lists);
        let holders = known.entry(lists).or_insert_with_key(|lists| {
            let holds = |list: usize| lists.iter().any(|known| *known as usize == list);
            let all = (0..world_size).zip(ranks).filter(|(_, (list, _))| holds(*list));
            holdings.holders(all.map(|(rank, _)| rank))
        });
        let no_rank = || PlanError::out_of_step("no rank has the shard");
        holdings.push(holders.ok_or_else(no_rank)?, shard.byte_len, shard.main.is_none());
    }
    let shares = holdings.share_out(rule);

    let mut owners: Vec<Option<Rank>> = vec![None; shards.len()];
    for (piece, at) in order.into_iter().enumerate() {
        owners[at] = shares.owner(piece);
    }
    let owned = (0..world_size)
        .zip(ranks)
        .map(|(rank, (list, _))| {
            let rows = rows.get(*list).map_or(&[][..], |rows| rows);
            // What a rank lists twice it does once.
            rows.iter().map(|(shard, first)| *first && owners[*shard] == Some(rank)).collect()
        })
        .collect();
    Ok(Distribution { owned })
}

/// All shards, and for each row of each list which shard it is, and whether it is the first of
/// that list.
type Merged = (Vec<Shard>, Vec<Vec<(usize, bool)>>);

fn merge(
    lists: &[&SavePlan],
    ranks: &[(usize, &[bool])],
    purpose: Purpose,
) -> Result<Merged, PlanError> {
    let mut shards: Vec<Shard> = Vec::new();
    let mut known: HashMap<(&str, &[u64], bool), usize> = HashMap::new();
    let mut all_rows = Vec::with_capacity(lists.len());
    for (list, number) in lists.iter().zip(0_u32..) {
        let mut rows = Vec::with_capacity(list.len());
        for at in 0..list.len() {
            let Some(item) = list.item(at) else { continue };
            // An empty shard may lie where another one begins; it is not that one.
            let id = (&*item.key.fqn, item.offsets, item.byte_len == 0);
            let shard = *known.entry(id).or_insert_with(|| {
                shards.push(Shard {
                    key: Arc::clone(&item.key.fqn),
                    offset: item.offsets.into(),
                    byte_len: item.byte_len,
                    lists: Vec::new(),
                    main: None,
                });
                shards.len() - 1
            });
            let known = &mut shards[shard];
            if known.byte_len != item.byte_len {
                let rank_of = |list: u32| {
                    let rank = ranks.iter().position(|(its, _)| *its == list as usize);
                    Rank::try_from(rank.unwrap_or(0)).unwrap_or(Rank::MAX)
                };
                let bytes = |len: u64| format!("{len} bytes long at {:?}", known.offset);
                return Err(PlanError::Ranks(RanksProblem::Disagreement {
                    subject: PlanSubject::Entry(known.key.to_string()),
                    left: bytes(known.byte_len),
                    left_rank: rank_of(known.lists.first().copied().unwrap_or(0)),
                    right: bytes(item.byte_len),
                    right_rank: rank_of(number),
                }));
            }
            let first = known.lists.last() != Some(&number);
            if first {
                known.lists.push(number);
            }
            rows.push((shard, first));
        }
        all_rows.push(rows);
    }
    for ((list, main), rank) in ranks.iter().zip(0..) {
        let rows = all_rows.get(*list).map_or(&[][..], |rows| rows);
        for ((shard, _), _) in rows.iter().zip(*main).filter(|(_, main)| **main) {
            let shard = &mut shards[*shard];
            let before = shard.main.replace(rank);
            if let Some(first) = before.filter(|_| purpose == Purpose::Save && shard.byte_len > 0) {
                return Err(PlanRefusal::MainReplica {
                    key: shard.key.to_string(),
                    offset: format!("{:?}", shard.offset),
                    first,
                    second: rank,
                }
                .into());
            }
        }
    }
    Ok((shards, all_rows))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dcp_core::plan::{PlanKey, TensorSpec};
    use dcp_core::{DType, Region};
    use proptest::prelude::*;

    use super::*;

    /// A rank's shards: key, offset and length of a box of a one-dimensional tensor, and whether
    /// it is the main replica.
    fn inventory(shards: &[(String, u64, u64, bool)]) -> Inventory {
        let mut inventory = Inventory::default();
        for (key, offset, len, main) in shards {
            let spec = TensorSpec { dtype: DType::UInt8, shape: [1000].into(), sharded: true };
            let key = PlanKey { fqn: key.as_str().into(), path: None, tensor: Some(spec) };
            let key = inventory.shards.push_key(key);
            let region = Region::new([*offset], [*len]).unwrap();
            inventory.shards.push_chunk(key, &region).unwrap();
            inventory.main.push(*main);
        }
        inventory
    }

    #[test]
    fn an_empty_shard_is_not_the_one_that_begins_where_it_lies() {
        let shards = |lens: &[u64], main: bool| {
            let all = lens.iter().map(|len| ("k".to_owned(), 100, *len, main));
            inventory(&all.collect::<Vec<_>>())
        };
        for purpose in [Purpose::Save, Purpose::Load] {
            for rule in [ShareRule::Balanced, ShareRule::Megatron] {
                let group = [shards(&[0], true), shards(&[10, 0], true), shards(&[10], false)];
                let distribution = distribute(&group, rule, purpose).unwrap();
                let owned = |rank| distribution.owned(rank).to_vec();
                let (first, second, third) = (owned(0), owned(1), owned(2));
                assert_eq!(usize::from(first[0]) + usize::from(second[1]), 1);
                assert_eq!(usize::from(second[0]) + usize::from(third[0]), 1);
            }
        }
        let group = [shards(&[9], true), shards(&[10], true)];
        let error = distribute(&group, ShareRule::Balanced, Purpose::Save).unwrap_err();
        assert!(error.to_string().contains("100"), "{error}");
    }

    type Owners = BTreeMap<(String, u64), Vec<usize>>;

    /// The owner of each shard.
    fn owners(
        ranks: &[Vec<(String, u64, u64, bool)>],
        rule: ShareRule,
        purpose: Purpose,
    ) -> Owners {
        let group: Vec<_> = ranks.iter().map(|shards| inventory(shards)).collect();
        let distribution = distribute(&group, rule, purpose).unwrap();
        let mut owners = Owners::new();
        for (rank, shards) in ranks.iter().enumerate() {
            let owned = distribution.owned(rank as Rank);
            assert_eq!(owned.len(), shards.len());
            for ((key, offset, ..), owned) in shards.iter().zip(owned) {
                let all = owners.entry((key.clone(), *offset)).or_default();
                all.extend(owned.then_some(rank));
            }
        }
        owners
    }

    fn group() -> impl Strategy<Value = Vec<Vec<(String, u64, u64, bool)>>> {
        let shard = (0_u64..6, 0_u64..4).prop_map(|(key, part)| {
            // The size follows from what it is.
            (format!("k{key}"), part * 100, 1 + (key * 37 + part * 11) % 90, false)
        });
        let rank = prop::collection::vec((shard, any::<bool>()), 0..16).prop_map(|shards| {
            shards.into_iter().map(|((key, at, len, _), main)| (key, at, len, main)).collect()
        });
        prop::collection::vec(rank, 1..6).prop_map(|mut ranks: Vec<Vec<_>>| {
            let mut claimed = std::collections::HashSet::new();
            for (key, at, _, main) in ranks.iter_mut().flatten() {
                *main = *main && claimed.insert((key.clone(), *at));
            }
            ranks
        })
    }

    proptest! {
        #[test]
        fn every_shard_has_exactly_one_owner_that_holds_it(ranks in group(), ours in any::<bool>()) {
            let rule = if ours { ShareRule::Balanced } else { ShareRule::Megatron };
            for purpose in [Purpose::Save, Purpose::Load] {
                for ((key, at), owners) in owners(&ranks, rule, purpose) {
                    let mut all = ranks.iter().flatten();
                    let main = all.any(|(k, o, _, main)| *main && (k, o) == (&key, &at));
                    let expected = usize::from(main || purpose == Purpose::Load);
                    prop_assert_eq!(owners.len(), expected, "{} at {}", key, at);
                }
            }
        }

        #[test]
        fn the_order_within_a_rank_does_not_matter(ranks in group()) {
            let mut turned = ranks.clone();
            turned.iter_mut().for_each(|shards| shards.reverse());
            for rule in [ShareRule::Megatron, ShareRule::Balanced] {
                let left = owners(&ranks, rule, Purpose::Load);
                prop_assert_eq!(left, owners(&turned, rule, Purpose::Load));
            }
        }
    }

    #[test]
    fn a_load_begins_with_what_the_group_answers_for() {
        let shard = |key: &str, len, main| (key.to_owned(), 0, len, main);
        // "b" is larger, but another group's.
        let rank = |main| vec![shard("a", 5, main), shard("b", 9, false), shard("c", 2, main)];
        let ranks = [rank(true), rank(false)];
        let loaded = owners(&ranks, ShareRule::Megatron, Purpose::Load);
        assert_eq!(loaded.into_values().collect::<Vec<_>>(), [[0], [1], [1]]);
        let saved = owners(&ranks, ShareRule::Megatron, Purpose::Save);
        assert_eq!(saved.into_values().map(|owners| owners.len()).collect::<Vec<_>>(), [1, 0, 1]);
    }

    #[test]
    fn main_replicas_that_are_there_twice_are_named() {
        let shards = |len: u64, mains: &[bool]| {
            let all = mains.iter().map(|main| ("x".to_owned(), 100, len, *main));
            inventory(&all.collect::<Vec<_>>())
        };
        let save = |group: &[Inventory]| distribute(group, ShareRule::Megatron, Purpose::Save);
        let error = save(&[shards(4, &[false]), shards(4, &[true]), shards(4, &[true])]);
        assert_eq!(
            error.unwrap_err().to_string(),
            "of the shard of \"x\" at [100] there must be one main replica, but \
             ranks 1 and 2 have it; give one of them another replica id"
        );
        let error = save(&[shards(4, &[true, true])]).unwrap_err().to_string();
        assert!(error.contains("rank 0 has it twice"), "{error}");
        assert!(save(&[shards(0, &[true]), shards(0, &[true])]).is_ok(), "nothing is lost");
        let group = [shards(4, &[true]), shards(4, &[true])];
        assert!(distribute(&group, ShareRule::Megatron, Purpose::Load).is_ok());
    }

    #[test]
    fn ranks_that_disagree_about_a_shard_are_named() {
        let group = [("x", 4), ("x", 4), ("x", 5)]
            .map(|(key, len)| inventory(&[(key.to_owned(), 100, len, true)]));
        let error = distribute(&group, ShareRule::Megatron, Purpose::Save).unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"x\" is 4 bytes long at [100] on rank 0 but 5 bytes long at [100] on rank 2"
        );
    }

    /// 4096 ranks in groups of 8 replicas hold 100 000 shards.
    #[test]
    fn thousands_of_ranks_share_what_they_hold() {
        let list = |replicas: u64| {
            let shards = (0..200).map(|at| {
                let len = 1 + at * 7919 % 900;
                (format!("decoder.layers.{at}.weight"), replicas, len, false)
            });
            inventory(&shards.collect::<Vec<_>>())
        };
        let lists: Vec<_> = (0..500).map(list).collect();
        let group: Vec<Inventory> = (0..4096)
            .map(|rank| {
                let mut mine = lists[rank / 8 % 500].clone();
                mine.main = vec![rank % 8 == 0 && rank / 8 < 500; 200];
                mine
            })
            .collect();
        let distribution = distribute(&group, ShareRule::Balanced, Purpose::Save).unwrap();
        let owned = |rank| distribution.owned(rank).iter().filter(|owned| **owned).count();
        assert_eq!((0..4096).map(owned).sum::<usize>(), 100_000);
    }
}
