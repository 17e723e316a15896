//! The stored items of a checkpoint, in file order.

use std::sync::Arc;

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::{Entry, Placement};

/// A chunk or object, and its placement.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) fqn: Arc<str>,
    /// The position of the entry.
    pub(crate) entry: usize,
    /// The position of the chunk; `None` for an object.
    pub(crate) chunk: Option<u32>,
    pub(crate) placement: Placement,
}

impl Placed {
    /// The end of its bytes in the file.
    pub(crate) fn end(&self) -> u64 {
        self.placement.byte_offset.saturating_add(self.placement.byte_len)
    }
}

/// All items with a placement, by file and offset.
pub(crate) fn placed_items(metadata: &CheckpointMetadata) -> Vec<Placed> {
    let mut items = Vec::new();
    for (index, (fqn, entry)) in metadata.iter().enumerate() {
        let mut push = |chunk, placement: Option<Placement>| {
            if let Some(placement) = placement {
                items.push(Placed { fqn: Arc::clone(fqn), entry: index, chunk, placement });
            }
        };
        match entry {
            Entry::Tensor(tensor) => {
                for (at, chunk) in (0_u32..).zip(tensor.chunks.iter()) {
                    push(Some(at), chunk.placement);
                }
            }
            Entry::Object(object) => push(None, object.placement),
            _ => {}
        }
    }
    items.sort_by_key(|item| (item.placement.file, item.placement.byte_offset));
    items
}

/// The items that claim bytes of others, each with a sentence about that. Identical ranges may be shared; no data is
/// lost by it.
pub(crate) fn shared_bytes(items: &[Placed]) -> Vec<(&Placed, String)> {
    let mut sorted: Vec<&Placed> = items.iter().filter(|i| i.placement.byte_len > 0).collect();
    sorted.sort_by_key(|item| (item.placement.file, item.placement.byte_offset));
    let (mut shared, mut furthest) = (Vec::new(), None::<&Placed>);
    for item in sorted {
        let before = furthest.filter(|before| before.placement.file == item.placement.file);
        if let Some(before) = before
            && before.end() > item.placement.byte_offset
            && before.placement != item.placement
        {
            let message = format!(
                "its bytes {}..{} are also claimed by {:?} ({}..{})",
                item.placement.byte_offset,
                item.end(),
                before.fqn,
                before.placement.byte_offset,
                before.end()
            );
            shared.push((item, message));
        }
        if before.is_none_or(|before| before.end() < item.end()) {
            furthest = Some(item);
        }
    }
    shared
}
