//! The parts of two tensors that are compared at once.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future;

use crate::element::compare::{Compared, Comparer, Tolerance};
use crate::error::JobError;
use crate::read::runs::boxes;
use crate::read::tensor_read::TensorReader;

/// The elements of one segment, in two tensors of one shape.
pub(super) struct Segment {
    /// The position of the pair.
    pair: usize,
    elements: Range<u64>,
    a: Arc<TensorReader>,
    b: Arc<TensorReader>,
}

/// The segments of two tensors, in order.
pub(super) struct Segments {
    pub(super) pair: usize,
    pub(super) a: Arc<TensorReader>,
    pub(super) b: Arc<TensorReader>,
    pub(super) next: u64,
    /// The end of the last one.
    pub(super) end: u64,
    pub(super) step: u64,
}

impl Iterator for Segments {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        if self.next >= self.end {
            return None;
        }
        let elements = self.next..self.end.min(self.next.saturating_add(self.step));
        self.next = elements.end;
        let (a, b) = (Arc::clone(&self.a), Arc::clone(&self.b));
        Some(Segment { pair: self.pair, elements, a, b })
    }
}

/// Compares the elements of a segment. Returns the pair, the first element, the differences, and
/// the bytes read.
pub(super) async fn compare_segment(
    segment: Segment,
    tolerance: Option<Tolerance>,
) -> Result<(usize, u64, Compared, u64), JobError> {
    let (a, b) = (segment.a.tensor()?, segment.b.tensor()?);
    let cut = boxes(&a.shape, segment.elements.clone());
    let (x, y) = future::try_join(segment.a.read(&cut), segment.b.read(&cut)).await?;
    let read = (x.len() as u64).saturating_add(y.len() as u64);
    let compared = Comparer::new(a.dtype, b.dtype, tolerance)
        .map_or_else(Compared::default, |mut comparer| comparer.compare(&x, &y));
    Ok((segment.pair, segment.elements.start, compared, read))
}
