//! Checks that a planner's plans describe the state they were made from.
//!
//! A planner divides and selects. The dtypes, shapes and lengths in its plans determine how bytes
//! are stored and read, so callers of a planner compare them with the state before anything is
//! written.

mod coverage;

use std::collections::HashMap;
use std::ptr;
use std::sync::Arc;

use crate::error::{PlanError, PlanMaker, PlanProblem, PlannerProblem};
use crate::plans::metadata::Entry;
use crate::plans::plan::{
    GlobalPlan, LeafKind, PlanKey, SavePlan, StateIndex, StateLeaf, TensorSpec,
};
use crate::state::path::StatePath;
use crate::tensors::region::Region;

impl SavePlan {
    /// Compares every item with its leaf: the path, dtype and shape of the tensor, the region, which must be
    /// within one that this rank holds, and the length of an object. Records what the state holds
    /// and no item offers in [`unoffered`](Self::unoffered).
    ///
    /// # Errors
    ///
    /// [`PlannerProblem::Untrue`] with the name and `planner` for the first item that differs.
    pub fn check_against(&mut self, state: &StateIndex, planner: &str) -> Result<(), PlanError> {
        self.is_true_to(state, planner)?;
        self.unoffered = Arc::new(coverage::unoffered(self, state));
        Ok(())
    }

    fn is_true_to(&self, state: &StateIndex, planner: &str) -> Result<(), PlanError> {
        let leaves: HashMap<&str, &StateLeaf> =
            state.leaves.iter().map(|leaf| (&*leaf.fqn, leaf)).collect();
        let mut compared: *const PlanKey = ptr::null();
        for index in 0..self.len() {
            let Some(item) = self.item(index) else {
                return Err(PlanError::no_item(index as u64, self.len() as u64));
            };
            let fqn = &*item.key.fqn;
            let untrue = |planned: String, held: String| PlanError::Planner {
                planner: planner.to_owned(),
                fqn: fqn.to_owned(),
                problem: PlannerProblem::Untrue { planned, held },
            };
            let leaf = leaves.get(fqn);
            // Without its path, a value of a nested state dict is read as one at the root.
            if let Some(leaf) = leaf.filter(|_| !ptr::eq(compared, item.key))
                && leaf.path != item.key.path
            {
                let shown = |path: &Option<StatePath>| match path {
                    Some(path) => format!("at {path:?}"),
                    None => "without a path".to_owned(),
                };
                return Err(untrue(shown(&item.key.path), shown(&leaf.path)));
            }
            compared = item.key;
            let spec = item.key.tensor.as_ref();
            let length = format!("an object of {} bytes", item.byte_len);
            match (leaf.map(|leaf| &leaf.kind), spec) {
                (Some(LeafKind::Tensor { dtype, shape, regions, .. }), Some(spec)) => {
                    if spec.dtype != *dtype || spec.shape != *shape {
                        return Err(untrue(shown(spec), format!("{dtype} {shape}")));
                    }
                    let region = Region::new(item.offsets, item.sizes);
                    let held = |region: &Region| regions.iter().any(|mine| mine.contains(region));
                    if !region.as_ref().is_ok_and(held) {
                        let planned = region.map_or_else(|e| e.to_string(), |r| r.to_string());
                        let held = match &**regions {
                            [] => "not on this rank".to_owned(),
                            [one] => one.to_string(),
                            more => format!("one of {} other regions", more.len()),
                        };
                        return Err(untrue(planned, held));
                    }
                }
                (Some(LeafKind::Object { byte_len }), None) if item.byte_len == *byte_len => {}
                (Some(LeafKind::Object { byte_len }), spec) => {
                    let planned = spec.map_or(length, shown);
                    return Err(untrue(planned, format!("an object of {byte_len} bytes")));
                }
                (Some(LeafKind::Tensor { dtype, shape, .. }), None) => {
                    return Err(untrue(length, format!("{dtype} {shape}")));
                }
                (None, spec) => {
                    return Err(untrue(spec.map_or(length, shown), "not in the state".into()));
                }
            }
        }
        Ok(())
    }
}

impl GlobalPlan {
    /// Compares the index with the items selected from the ranks' plans: name, dtype, shape and
    /// region of each. One item writes every chunk of the index. No two chunks overlap, everything
    /// that ranks hold is stored, and with more than one rank every tensor is stored whole.
    ///
    /// # Errors
    ///
    /// [`PlannerProblem::Untrue`] with the name and `planner` for the first one that differs,
    /// [`PlannerProblem::Repeated`] and [`PlannerProblem::Lost`] for the first that is stored twice
    /// or not at all.
    pub fn check_against(&self, locals: &[SavePlan], planner: &str) -> Result<(), PlanError> {
        let metadata = &self.metadata;
        let (expected, found) = (locals.len(), self.selections.len());
        if expected != found {
            let made_by = PlanMaker::Planner(Some(planner.to_owned()));
            return Err(PlanError::Plan(PlanProblem::Count { made_by, expected, found }));
        }
        let chunks = |entry: &Entry| entry.as_tensor().map_or(1, |tensor| tensor.chunks.len());
        let mut written: Vec<Vec<bool>> =
            metadata.iter().map(|(_, entry)| vec![false; chunks(entry)]).collect();
        // The key of each entry that was compared last. Ranks mostly share a table of keys.
        let mut compared: Vec<*const PlanKey> = vec![ptr::null(); metadata.len()];
        for (local, selected) in locals.iter().zip(&self.selections) {
            for selected in selected {
                let (number, items) = (u64::from(selected.item), local.len() as u64);
                let item = local.item(selected.item as usize);
                let item = item.ok_or(PlanError::no_item(number, items))?;
                let entry = metadata.at(selected.entry as usize);
                let missing = || PlanError::no_entry(selected.entry.into(), None);
                let (fqn, entry) = entry.ok_or_else(missing)?;
                let untrue = |planned: String, held: String| PlanError::Planner {
                    planner: planner.to_owned(),
                    fqn: item.key.fqn.to_string(),
                    problem: PlannerProblem::Untrue { planned, held },
                };
                let compared = &mut compared[selected.entry as usize];
                if !ptr::eq(*compared, item.key) {
                    is_entry_of(fqn, entry, item.key)
                        .map_err(|(planned, held)| untrue(planned, held))?;
                    *compared = item.key;
                }
                if let Entry::Tensor(tensor) = entry {
                    let chunk = tensor.chunks.get(selected.chunk as usize);
                    if chunk.is_none_or(|c| (c.offsets, c.sizes) != (item.offsets, item.sizes)) {
                        let chunk = chunk.map_or_else(String::new, |c| {
                            format!("{:?} from {:?}", c.sizes, c.offsets)
                        });
                        let held = format!("{:?} from {:?}", item.sizes, item.offsets);
                        return Err(untrue(format!("a chunk {chunk}"), held));
                    }
                }
                let slot = written
                    .get_mut(selected.entry as usize)
                    .and_then(|slots| slots.get_mut(selected.chunk as usize));
                match slot {
                    Some(slot) if !*slot => *slot = true,
                    _ => return Err(untrue("written twice".into(), "to be written once".into())),
                }
            }
        }
        let lost = metadata.iter().zip(&written).find(|(_, slots)| slots.contains(&false));
        match lost {
            None => coverage::check(self, locals, planner),
            Some(((fqn, _), _)) => Err(PlanError::Planner {
                planner: planner.to_owned(),
                fqn: fqn.to_string(),
                problem: PlannerProblem::Untrue {
                    planned: "in the index".into(),
                    held: "not written whole by any rank".into(),
                },
            }),
        }
    }
}

/// Whether an entry of the index has the name, the dtype and the shape of a key. If not, what is planned
/// and what is held.
fn is_entry_of(fqn: &str, entry: &Entry, key: &PlanKey) -> Result<(), (String, String)> {
    if *fqn != *key.fqn {
        return Err((format!("a part of {fqn:?}"), "under its own name".into()));
    }
    match (entry, &key.tensor) {
        (Entry::Tensor(tensor), Some(spec)) => {
            if tensor.dtype != spec.dtype || tensor.shape != spec.shape {
                return Err((format!("{} {}", tensor.dtype, tensor.shape), shown(spec)));
            }
            Ok(())
        }
        (Entry::Object(_), None) => Ok(()),
        _ => Err(("another kind of entry".into(), "what was offered".into())),
    }
}

fn shown(spec: &TensorSpec) -> String {
    format!("{} {}", spec.dtype, spec.shape)
}
