//! The plans and names that a saver keeps from earlier saves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_core::plan::WritePlan;
use dcp_planner::PlanCache;

/// Plans to remember: a trainer has one or two kinds of save.
const PLANS_KEPT: usize = 2;

/// Plans of earlier saves.
#[derive(Debug)]
pub(crate) struct Memory {
    /// On the coordinator: plans with their places, by all that they depend on.
    pub(crate) plans: PlanCache,
    /// This rank's part of the last save.
    mine: Mutex<Option<Remembered>>,
    /// Hashes of the names that only one rank has, sorted; see [`small_values`](crate::small_values).
    own_names: Mutex<Option<Arc<[u64]>>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    pub(crate) fingerprint: u128,
    /// The id of the coordinator's plan that it is a part of.
    pub(crate) plan_id: u64,
    pub(crate) plan: Arc<WritePlan>,
}

impl Memory {
    /// This rank's part of the last save, if that was of the same structure.
    pub(crate) fn recall(&self, fingerprint: u128) -> Option<Remembered> {
        self.mine().clone().filter(|last| last.fingerprint == fingerprint)
    }

    /// This rank's part of the last save.
    pub(crate) fn last(&self) -> Option<Remembered> {
        self.mine().clone()
    }

    pub(crate) fn keep(&self, mine: Remembered) {
        *self.mine() = Some(mine);
    }

    /// The names that only one rank has, once ranks have compared them.
    pub(crate) fn own_names(&self) -> Option<Arc<[u64]>> {
        self.own_names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn keep_own_names(&self, names: Vec<u64>) {
        *self.own_names.lock().unwrap_or_else(PoisonError::into_inner) = Some(names.into());
    }

    fn mine(&self) -> MutexGuard<'_, Option<Remembered>> {
        self.mine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            plans: PlanCache::new(PLANS_KEPT),
            mine: Mutex::default(),
            own_names: Mutex::default(),
        }
    }
}
