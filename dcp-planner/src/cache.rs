//! Global plans of earlier saves, for saves of the same state in the same layout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dcp_core::plan::GlobalPlan;

/// Keeps the plans of the last few saves.
///
/// In a steady state every rank sends the coordinator only
/// [`SavePlan::fingerprint`](dcp_core::plan::SavePlan::fingerprint), and the coordinator looks
/// here. The
/// key is the fingerprint of every rank, in rank order, followed by whatever else the plan depends
/// on, such as the generation of file names. So a plan is found only when everything is as it was:
/// names, paths, element types, shapes, places and object lengths, on every rank. (PyTorch 2.15
/// compares less, decides rank by rank, and stores stale element types.)
#[derive(Debug)]
pub struct PlanCache {
    capacity: usize,
    clock: AtomicU64,
    plans: DashMap<Arc<[u128]>, Slot>,
}

#[derive(Debug)]
struct Slot {
    plan: Arc<GlobalPlan>,
    last_used: AtomicU64,
}

impl PlanCache {
    /// A cache of at most `capacity` saves; with 0 nothing is kept.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, clock: AtomicU64::new(0), plans: DashMap::new() }
    }

    /// The plan that was kept under exactly this key.
    #[must_use]
    pub fn get(&self, key: &[u128]) -> Option<Arc<GlobalPlan>> {
        let slot = self.plans.get(key)?;
        slot.last_used.store(self.tick(), Ordering::Relaxed);
        Some(Arc::clone(&slot.plan))
    }

    /// Keeps a plan, and forgets the one that was not used for longest where there is no room.
    pub fn insert(&self, key: impl Into<Arc<[u128]>>, plan: Arc<GlobalPlan>) {
        let slot = Slot { plan, last_used: AtomicU64::new(self.tick()) };
        self.plans.insert(key.into(), slot);
        while self.plans.len() > self.capacity {
            // Ticks are distinct, so the order of iteration does not matter.
            let oldest = self
                .plans
                .iter()
                .min_by_key(|slot| slot.last_used.load(Ordering::Relaxed))
                .map(|slot| Arc::clone(slot.key()));
            let Some(oldest) = oldest else { break };
            self.plans.remove(&oldest);
        }
    }

    /// All plans with their keys, the one used last first.
    #[must_use]
    pub fn entries(&self) -> Vec<(Arc<[u128]>, Arc<GlobalPlan>)> {
        let slots = self.plans.iter();
        let mut entries: Vec<_> = slots
            .map(|slot| {
                let last_used = slot.last_used.load(Ordering::Relaxed);
                (last_used, Arc::clone(slot.key()), Arc::clone(&slot.plan))
            })
            .collect();
        entries.sort_by_key(|(last_used, ..)| std::cmp::Reverse(*last_used));
        entries.into_iter().map(|(_, key, plan)| (key, plan)).collect()
    }

    /// Plans in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.plans.clear();
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

impl Default for PlanCache {
    /// Room for the saves of a few state dicts in turn.
    fn default() -> Self {
        Self::new(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_not_used_for_longest_is_forgotten() {
        let cache = PlanCache::new(2);
        let plan = || Arc::new(GlobalPlan::default());
        cache.insert([1, 1], plan());
        cache.insert([2, 2], plan());
        assert!(cache.get(&[1, 1]).is_some());
        cache.insert([3, 3], plan());
        assert_eq!(cache.len(), 2);
        assert!(cache.get(&[1, 1]).is_some() && cache.get(&[2, 2]).is_none());
        let keys = |cache: &PlanCache| cache.entries().into_iter().map(|e| e.0).collect::<Vec<_>>();
        assert_eq!(keys(&cache), [Arc::from([1, 1]), Arc::from([3, 3])]);
        assert!(cache.get(&[1]).is_none() && cache.get(&[1, 1, 1]).is_none());
        cache.clear();
        assert!(cache.is_empty());
        let none = PlanCache::new(0);
        none.insert([1], plan());
        assert!(none.is_empty());
    }
}
