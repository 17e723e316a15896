//! Rebuilds the nested dicts and lists of flat items.

use std::sync::Arc;

use dcp_core::PlanError;
use dcp_core::error::StateProblem;
use dcp_core::path::PathItem;
use indexmap::IndexMap;

use super::write::TorchSaveItem;

/// The maximum nesting depth; the planner's flattening has the same limit.
const DEPTH_MAX: usize = 512;
/// The number of missing list elements that may be filled with `None`: PyTorch leaves such gaps
/// where a list contained empty dicts.
const PADDING_MAX: u64 = 65_536;

/// A container, or the position of an item.
#[derive(Debug)]
pub(super) enum Tree {
    Item(usize),
    Dict(IndexMap<Arc<str>, Tree>),
    /// `None` for missing elements.
    List(Vec<Option<Tree>>),
}

impl Tree {
    /// Builds the dict that contains all items at their paths, in order of first use. An item
    /// without a path is an entry under its name.
    pub(super) fn grow(items: &[TorchSaveItem]) -> Result<Self, PlanError> {
        let mut root = Self::Dict(IndexMap::new());
        let mut padding = PADDING_MAX;
        for (position, item) in items.iter().enumerate() {
            let whole;
            let path: &[PathItem] = match &item.path {
                Some(path) => path,
                None => {
                    whole = [PathItem::Key(Arc::clone(&item.name))];
                    &whole
                }
            };
            let refuse = |problem: &str| {
                StateProblem::PathConflict { problem: problem.to_owned() }.of(item.name.to_string())
            };
            if path.len() > DEPTH_MAX {
                return Err(StateProblem::TooDeep { limit: DEPTH_MAX }.of(item.name.to_string()));
            }
            if !matches!(path.first(), Some(PathItem::Key(_))) {
                return Err(refuse("its path does not begin with a key"));
            }
            let mut place = &mut root;
            for (step, next) in path.iter().zip(path.iter().skip(1).map(Some).chain([None])) {
                let new = || match next {
                    Some(PathItem::Key(_)) => Self::Dict(IndexMap::new()),
                    Some(PathItem::Index(_)) => Self::List(Vec::new()),
                    None => Self::Item(position),
                };
                let vacant;
                (place, vacant) = place.entry(step, new, &mut padding).ok_or_else(|| {
                    refuse("a step leads through a value that is not a container of that kind")
                })?;
                if next.is_none() && !vacant {
                    return Err(refuse("something else has the same place"));
                }
            }
        }
        Ok(root)
    }

    /// The place of a step, filled with `new` if it was empty, and whether it was.
    fn entry(
        &mut self,
        step: &PathItem,
        new: impl FnOnce() -> Self,
        padding: &mut u64,
    ) -> Option<(&mut Self, bool)> {
        match (self, step) {
            (Self::Dict(entries), PathItem::Key(key)) => {
                let vacant = !entries.contains_key(key);
                Some((entries.entry(Arc::clone(key)).or_insert_with(new), vacant))
            }
            (Self::List(items), PathItem::Index(index)) => {
                let at = usize::try_from(*index).ok()?;
                if let Some(gap) = at.checked_sub(items.len()) {
                    *padding = padding.checked_sub(gap as u64)?;
                    items.resize_with(at + 1, || None);
                }
                let slot = items.get_mut(at)?;
                let vacant = slot.is_none();
                Some((slot.get_or_insert_with(new), vacant))
            }
            _ => None,
        }
    }
}
