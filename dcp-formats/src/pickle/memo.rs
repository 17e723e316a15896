//! The memo of a pickle: values by number, in pages.

use super::arena::NodeId;

/// Entries per page. A page is allocated when its first entry is set, so that numbers whose values
/// nobody fetches take no memory.
const PAGE: usize = 512;

type Page = Box<[Option<NodeId>; PAGE]>;

/// Values by number.
#[derive(Debug, Default)]
pub(super) struct Memo {
    pages: Vec<Option<Page>>,
    allocated: usize,
    /// The count of numbers that are set, those of records included.
    len: usize,
    /// One more than the highest number that is set.
    end: usize,
}

impl Memo {
    /// Returns the count of numbers that are set, which is the number that `MEMOIZE` sets.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// One more than the highest number that is set.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    pub(super) fn get(&self, index: usize) -> Option<NodeId> {
        *self.pages.get(index / PAGE)?.as_ref()?.get(index % PAGE)?
    }

    pub(super) fn set(&mut self, index: usize, id: NodeId) {
        let at = index / PAGE;
        if at >= self.pages.len() {
            self.pages.resize_with(at + 1, || None);
        }
        let Some(page) = self.pages.get_mut(at) else { return };
        let page = page.get_or_insert_with(|| {
            self.allocated += 1;
            Box::new([None; PAGE])
        });
        if let Some(slot) = page.get_mut(index % PAGE)
            && slot.replace(id).is_none()
        {
            self.len += 1;
        }
        self.end = self.end.max(index + 1);
    }

    /// Counts all numbers below `end` as set, although the values of some are not kept.
    pub(super) fn skip_to(&mut self, end: usize) {
        (self.len, self.end) = (end, end);
    }

    /// Bytes in use.
    pub(super) fn memory(&self) -> usize {
        self.allocated * size_of::<[Option<NodeId>; PAGE]>() + size_of_val(&*self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_far_apart_take_one_page_each() {
        let mut memo = Memo::default();
        let id = NodeId::from_index(7);
        for index in [0, 3, 100_000] {
            memo.set(index, id.unwrap());
        }
        assert_eq!(
            [0, 1, 3, 99_999, 100_000].map(|at| memo.get(at).is_some()),
            [true, false, true, false, true]
        );
        assert_eq!((memo.len(), memo.end()), (3, 100_001));
        memo.set(3, id.unwrap());
        assert_eq!(memo.len(), 3);
        assert!(memo.memory() < 3 * size_of::<Page>() * PAGE);
    }
}
