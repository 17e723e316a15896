//! A planner of saves as a plug-in: replicas are spread over nodes.
//!
//! The default planner gives every rank about equally many bytes. Where the ranks of a node share one
//! network card, nodes with fewer ranks that hold replicas should get no less than the others: this
//! planner balances nodes first, and the ranks of a node second.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

use dcp_core::PlanError;
use dcp_core::plan::{GlobalPlan, PlanContext, SavePlan, SelectedItem, StateIndex, WriteItem};
use dcp_core::planner::SavePlanner;
use dcp_planner::DefaultSavePlanner;

/// Chooses, of the ranks that hold a replica, one on the node with the fewest bytes.
///
/// Ranks are numbered node by node, as torchrun, Slurm and mpirun number them.
#[derive(Debug)]
pub struct NodePlanner {
    ranks_per_node: NonZeroU32,
    inner: DefaultSavePlanner,
}

/// What replicas of one chunk or object have in common.
type Content<'a> = (&'a str, &'a [u64], &'a [u64]);

/// A rank, and the position of an item in its plan.
type Holder = (usize, u32);

fn content<'a>(item: &WriteItem<'a>) -> Content<'a> {
    (&item.key.fqn, item.offsets, item.sizes)
}

/// Bytes that ranks and nodes write so far.
#[derive(Debug)]
struct Load {
    ranks_per_node: usize,
    by_rank: Vec<u64>,
    by_node: BTreeMap<usize, u64>,
}

impl Load {
    fn add(&mut self, rank: usize, bytes: u64) {
        if let Some(load) = self.by_rank.get_mut(rank) {
            *load = load.saturating_add(bytes);
        }
        let node = self.by_node.entry(rank / self.ranks_per_node).or_default();
        *node = node.saturating_add(bytes);
    }

    /// What decides between ranks: the bytes of the node, then those of the rank, then its number.
    fn of(&self, rank: usize) -> (u64, u64, usize) {
        let node = self.by_node.get(&(rank / self.ranks_per_node)).copied().unwrap_or(0);
        (node, self.by_rank.get(rank).copied().unwrap_or(0), rank)
    }
}

impl NodePlanner {
    /// A planner for nodes of so many ranks; the last node may have fewer.
    #[must_use]
    pub fn new(ranks_per_node: NonZeroU32) -> Self {
        Self { ranks_per_node, inner: DefaultSavePlanner::new() }
    }

    /// Gives each selected item to one of its holders.
    fn spread(&self, locals: &[SavePlan], plan: GlobalPlan) -> GlobalPlan {
        let mut holders: BTreeMap<Content<'_>, Vec<Holder>> = BTreeMap::new();
        for (rank, local) in locals.iter().enumerate() {
            for (position, item) in (0_u32..).zip(local.items()) {
                holders.entry(content(&item)).or_default().push((rank, position));
            }
        }
        let mut load = Load {
            ranks_per_node: self.ranks_per_node.get() as usize,
            by_rank: vec![0; locals.len()],
            by_node: BTreeMap::new(),
        };
        let mut selections = vec![Vec::new(); plan.selections.len()];
        let mut shared = Vec::new();
        for (rank, selected) in plan.selections.iter().enumerate() {
            for item in selected {
                let planned = locals.get(rank).and_then(|local| local.item(item.item as usize));
                let bytes = planned.as_ref().map_or(0, |planned| planned.byte_len);
                let known = planned.as_ref().and_then(|planned| holders.get(&content(planned)));
                match known.map(Vec::as_slice) {
                    Some(several @ [_, _, ..]) => {
                        shared.push((Reverse(bytes), item.entry, item.chunk, several));
                    }
                    _ => {
                        load.add(rank, bytes);
                        selections[rank].push(*item);
                    }
                }
            }
        }
        // The largest first: small ones then fill the gaps.
        shared.sort_unstable_by_key(|(bytes, entry, chunk, _)| (*bytes, *entry, *chunk));
        for (Reverse(bytes), entry, chunk, holders) in shared {
            let Some((rank, item)) = holders.iter().copied().min_by_key(|(rank, _)| load.of(*rank))
            else {
                continue;
            };
            load.add(rank, bytes);
            selections[rank].push(SelectedItem { item, entry, chunk });
        }
        selections.iter_mut().for_each(|selected| selected.sort_unstable_by_key(|s| s.item));
        GlobalPlan { selections, ..plan }
    }
}

impl SavePlanner for NodePlanner {
    fn local_plan(&self, state: &StateIndex, context: &PlanContext) -> Result<SavePlan, PlanError> {
        self.inner.local_plan(state, context)
    }

    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        Ok(self.spread(locals, self.inner.global_plan(locals)?))
    }
}
