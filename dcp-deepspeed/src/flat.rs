//! The arithmetic of flat buffers.
//!
//! ZeRO stores no parameter: it stores the elements of many, one after another, in a buffer that is cut into equal
//! parts, one for each rank. A parameter is a range of the whole buffer, so it is a few ranges of the files of ranks
//! ([`Flat::slice`]), and each of these is a few boxes of the parameter ([`boxes`]), which are read where they are.
//! Invariant: the boxes of all ranges of a parameter cover each of its elements once, in order. Nothing is
//! concatenated: a buffer may be larger than the memory of the machine.

use std::ops::Range;

use dcp_core::{Dims, Region};
use dcp_jobs::view::{Piece, PieceFrom};

/// A part of a buffer: a tensor of one axis in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The file, by its position among those that were opened.
    pub(crate) part: usize,
    /// The tensor in it.
    pub(crate) entry: usize,
    /// Its elements.
    pub(crate) len: u64,
}

/// Elements of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) part: usize,
    pub(crate) entry: usize,
    /// In the tensor of the file.
    pub(crate) range: Range<u64>,
}

impl Run {
    pub(crate) fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }
}

/// A buffer: segments, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flat {
    segments: Vec<Segment>,
}

impl Flat {
    pub(crate) fn new(segments: Vec<Segment>) -> Self {
        Self { segments }
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> u64 {
        self.segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.len))
    }

    /// The runs that are the elements `range`; `None` beyond the end.
    pub(crate) fn slice(&self, range: Range<u64>) -> Option<Vec<Run>> {
        let mut runs = Vec::new();
        let mut begin = 0_u64;
        for Segment { part, entry, len } in &self.segments {
            let end = begin.checked_add(*len)?;
            let (from, to) = (range.start.max(begin), range.end.min(end));
            if from < to {
                let range = from - begin..to - begin;
                runs.push(Run { part: *part, entry: *entry, range });
            }
            begin = end;
        }
        let found = runs.iter().map(Run::len).fold(0, u64::saturating_add);
        (range.start <= range.end && found == range.end - range.start).then_some(runs)
    }
}

/// The elements of one parameter of stage 3, which is cut into equal parts by itself: rank `r` has part `r`, and
/// the last parts are padded.
pub(crate) fn partition_len(elements: u64, ranks: u64) -> u64 {
    elements.div_ceil(ranks.max(1))
}

/// The pieces of a tensor of `shape` whose row-major elements are those of `runs`; `None` where there are fewer or
/// more.
pub(crate) fn pieces(shape: &Dims, runs: &[Run]) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut at = 0_u64;
    for run in runs {
        let end = at.checked_add(run.len())?;
        let mut start = run.range.start;
        for region in boxes(shape, at..end) {
            let from = Region::new([start], [region.volume()]).ok()?;
            start = start.checked_add(region.volume())?;
            let from = PieceFrom::Reshaped { part: run.part, entry: run.entry, region: from };
            pieces.push(Piece { region, from });
        }
        at = end;
    }
    (shape.checked_volume() == Some(at)).then_some(pieces)
}

/// The boxes that are exactly the row-major elements `range` of a tensor of `shape`, in order: at most two for each
/// axis. Elements beyond the end are left out.
fn boxes(shape: &Dims, range: Range<u64>) -> Vec<Region> {
    let total = shape.checked_volume().unwrap_or(0);
    let (mut at, end) = (range.start.min(total), range.end.min(total));
    let mut found = Vec::new();
    while at < end {
        // The outermost axis of which a whole slice begins here.
        let (mut axis, mut slice) = (shape.ndim(), 1_u64);
        while let Some(next) = axis.checked_sub(1) {
            let larger = slice.saturating_mul(shape.get(next).copied().unwrap_or(1));
            if !at.is_multiple_of(larger) || end - at < larger {
                break;
            }
            (axis, slice) = (next, larger);
        }
        let Some(last) = axis.checked_sub(1) else {
            found.extend(Region::full(shape.clone()));
            break;
        };
        let len = shape.get(last).copied().unwrap_or(1).max(1);
        let index = (at / slice) % len;
        let count = (len - index).min((end - at) / slice).max(1);
        let mut offsets = Dims::zeros(shape.ndim());
        let mut sizes = shape.clone();
        let mut rest = at / slice;
        for outer in (0..axis).rev() {
            let len = shape.get(outer).copied().unwrap_or(1).max(1);
            if let (Some(offset), Some(size)) = (offsets.get_mut(outer), sizes.get_mut(outer)) {
                *offset = rest % len;
                *size = if outer == last { count } else { 1 };
            }
            rest /= len;
        }
        found.extend(Region::new(offsets, sizes));
        at = at.saturating_add(count.saturating_mul(slice));
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The element of the buffer at each row-major position of a tensor, from its pieces.
    fn elements(shape: &Dims, pieces: &[Piece], segments: &[Segment]) -> Vec<u64> {
        let mut found = vec![u64::MAX; usize::try_from(shape.checked_volume().unwrap()).unwrap()];
        for piece in pieces {
            let PieceFrom::Reshaped { part, region, .. } = &piece.from else { panic!() };
            let before: u64 = segments[..*part].iter().map(|segment| segment.len).sum();
            let mut from = before + region.offsets()[0];
            for (at, len) in piece.region.runs_in(shape) {
                for element in at..at + len {
                    let slot = &mut found[usize::try_from(element).unwrap()];
                    assert_eq!(*slot, u64::MAX, "element {element} is there twice");
                    *slot = from;
                    from += 1;
                }
            }
        }
        found
    }

    proptest! {
        #[test]
        fn a_parameter_is_the_range_of_the_buffer_however_that_is_cut(
            shape in prop::collection::vec(1_u64..6, 0..5),
            lens in prop::collection::vec(0_u64..40, 0..6),
            before in 0_u64..30,
        ) {
            let shape = Dims::from(&shape[..]);
            let numel = shape.checked_volume().unwrap();
            let mut segments: Vec<_> =
                (0..).zip(lens).map(|(part, len)| Segment { part, entry: 0, len }).collect();
            let total: u64 = segments.iter().map(|segment| segment.len).sum();
            let missing = (before + numel).saturating_sub(total);
            segments.push(Segment { part: segments.len(), entry: 0, len: missing });
            let flat = Flat::new(segments.clone());
            let runs = flat.slice(before..before + numel).unwrap();
            let pieces = pieces(&shape, &runs).unwrap();
            let expected: Vec<_> = (before..before + numel).collect();
            prop_assert_eq!(elements(&shape, &pieces, &segments), expected);
            prop_assert!(flat.slice(before..flat.len() + 1).is_none());
        }

        #[test]
        fn parts_of_stage_3_hold_every_element_and_less_than_a_part_of_padding(
            numel in 0_u64..1000, ranks in 1_u64..70,
        ) {
            let part = partition_len(numel, ranks);
            prop_assert!(part * ranks >= numel);
            prop_assert!(part * ranks < numel + ranks);
        }
    }

    #[test]
    fn runs_of_another_number_of_elements_make_no_tensor() {
        let run = Run { part: 0, entry: 0, range: 0..6 };
        assert!(pieces(&Dims::from([2, 3]), std::slice::from_ref(&run)).is_some());
        assert!(pieces(&Dims::from([7]), std::slice::from_ref(&run)).is_none());
        assert!(pieces(&Dims::from([5]), std::slice::from_ref(&run)).is_none());
        assert!(pieces(&Dims::from([u64::MAX, 9]), &[run]).is_none());
    }
}
