//! Global plans of earlier saves, for saves of the same state in the same layout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dcp_core::{GlobalPlan, SavePlan};

/// Keeps the plans of the last few saves.
///
/// In a steady state every rank sends the coordinator only [`SavePlan::fingerprint`] and the
/// coordinator looks here. A plan is found only when the fingerprint of every rank is that of the
/// cached save, so everything that planning depends on is unchanged: names, paths, element types,
/// shapes, places and object lengths. (PyTorch 2.15 compares less, decides rank by rank, and
/// stores stale element types.)
///
/// `scope` tells apart what fingerprints do not: it names the group, the planner with its options,
/// and anything else that the plan depends on.
#[derive(Debug)]
pub struct PlanCache {
    capacity: usize,
    clock: AtomicU64,
    plans: DashMap<CacheKey, Slot>,
}

type CacheKey = (Arc<str>, Arc<[u128]>);

#[derive(Debug)]
struct Slot {
    plan: Arc<CachedPlan>,
    last_used: AtomicU64,
}

/// What a coordinator needs to save again without hearing the ranks' plans.
#[derive(Clone, Debug, Default)]
pub struct CachedPlan {
    /// Every rank's offer, in rank order.
    pub locals: Vec<SavePlan>,
    /// What was made of them, before any placement.
    pub global: GlobalPlan,
}

impl PlanCache {
    /// A cache of at most `capacity` saves; with 0 nothing is kept.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, clock: AtomicU64::new(0), plans: DashMap::new() }
    }

    /// The plan of a save with these fingerprints, in rank order.
    #[must_use]
    pub fn get(&self, scope: &str, fingerprints: &[u128]) -> Option<Arc<CachedPlan>> {
        let slot = self.plans.get(&(Arc::from(scope), Arc::from(fingerprints)))?;
        slot.last_used.store(self.tick(), Ordering::Relaxed);
        Some(Arc::clone(&slot.plan))
    }

    /// Keeps a plan under the fingerprints of its offers, and forgets the one that was not used
    /// for longest where there is no room.
    pub fn insert(&self, scope: &str, plan: CachedPlan) -> Arc<CachedPlan> {
        let plan = Arc::new(plan);
        if self.capacity == 0 {
            return plan;
        }
        let fingerprints = plan.locals.iter().map(SavePlan::fingerprint).collect();
        let slot = Slot { plan: Arc::clone(&plan), last_used: AtomicU64::new(self.tick()) };
        self.plans.insert((scope.into(), fingerprints), slot);
        while self.plans.len() > self.capacity {
            // Ticks are distinct, so the order of iteration does not matter.
            let oldest = self
                .plans
                .iter()
                .min_by_key(|slot| slot.last_used.load(Ordering::Relaxed))
                .map(|slot| slot.key().clone());
            let Some(oldest) = oldest else { break };
            self.plans.remove(&oldest);
        }
        plan
    }

    /// Saves in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Forgets everything, such as after a failed save.
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
