//! Groups the byte runs of a region into requests: the source and destination of each run, and the
//! runs that share a request.

use std::iter::Peekable;
use std::ops::Range;

use dcp_core::memory::LoanError;
use dcp_core::region::Runs;
use dcp_core::{FormatError, Region, TensorView};

/// The minimum length of a piece that is read straight into its destination, in bytes.
const DIRECT_MIN: u64 = 4096;
/// The maximum length of a piece, and of a request of direct pieces, in bytes.
const DIRECT_MAX: u64 = 8 << 20;
/// The maximum number of pieces in a direct request, and of ranges in a request through scratch. A
/// request of columns of a few hundred bytes then has about a mebibyte.
const RANGES_MAX: usize = 4096;
/// The maximum number of pieces copied from one scratch buffer.
const SCATTER_MAX: usize = 16_384;
/// Gaps up to this length are always read, whatever the storage prefers.
const GAP_MIN: u64 = 256;

/// A run of bytes that is contiguous in the stored chunk and in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The offset from the chunk's first element, in bytes.
    pub(super) src: u64,
    /// The byte range in the destination's memory.
    pub(super) dst: Range<usize>,
}

impl Piece {
    fn src_end(&self) -> u64 {
        self.src + self.dst.len() as u64
    }
}

/// The pieces of one item, row-major.
pub(super) struct Pieces {
    src: Runs,
    dst: Box<dyn Iterator<Item = Range<usize>> + Send>,
    element: u64,
    max: u64,
    src_left: Range<u64>,
    dst_left: Range<usize>,
}

impl Pieces {
    /// Maps `region`, in the coordinates of a chunk of `sizes`, to all of `view`, in pieces of at
    /// most `max` bytes.
    pub(super) fn new(region: &Region, sizes: &[u64], view: &TensorView, max: u64) -> Self {
        Self {
            src: region.runs_in(sizes),
            dst: Box::new(view.runs()),
            element: view.dtype().size() as u64,
            max: max.max(1),
            src_left: 0..0,
            dst_left: 0..0,
        }
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.src_left.is_empty() {
            let (start, len) = self.src.next()?;
            let end = start.saturating_add(len).saturating_mul(self.element);
            self.src_left = start.saturating_mul(self.element)..end;
        }
        if self.dst_left.is_empty() {
            self.dst_left = self.dst.next()?;
        }
        let dst_len = self.dst_left.len() as u64;
        let len = (self.src_left.end - self.src_left.start).min(dst_len).min(self.max);
        // Bounded by the length of a range of `usize`.
        let dst_end = self.dst_left.start + len as usize;
        let piece = Piece { src: self.src_left.start, dst: self.dst_left.start..dst_end };
        self.src_left.start += len;
        self.dst_left.start = dst_end;
        Some(piece)
    }
}

/// One call of [`Storage::read`](dcp_core::Storage::read).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fetch {
    /// Reads each piece straight into its destination.
    Direct(Vec<Piece>),
    /// Reads ranges into scratch memory, from which pieces are copied.
    Scatter(Vec<Span>),
}

/// A range of the chunk to read at once, and the pieces in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) src: Range<u64>,
    pub(super) pieces: Vec<Piece>,
}

/// Groups the pieces of one item to fetches, lazily.
pub(super) struct Fetches {
    pieces: Peekable<Pieces>,
    /// The maximum gap to read, and the size of the scratch; `None` for direct reads.
    scatter: Option<(u64, u64)>,
}

impl Fetches {
    /// As [`Pieces::new`]. Reads through scratch memory read gaps up to `coalesce_gap` bytes, and
    /// use at most `scratch` bytes of memory.
    pub(super) fn new(
        region: &Region,
        sizes: &[u64],
        view: &TensorView,
        coalesce_gap: u64,
        scratch: u64,
    ) -> Self {
        let element = view.dtype().size() as u64;
        let mut runs = region.runs_in(sizes);
        let src_run = runs.run_len() * element;
        let gap = match (runs.next(), runs.next()) {
            (Some((first, len)), Some((second, _))) => Some((second - first - len) * element),
            _ => None,
        };
        let gap_max = coalesce_gap.max(GAP_MIN);
        let shortest = src_run.min(view.run_bytes());
        let one_piece = gap.is_none() && view.is_contiguous();
        let far = gap.is_none_or(|gap| gap > gap_max);
        // Pieces that follow each other in memory share a loan, so they may be short.
        let direct = one_piece || far && (shortest >= DIRECT_MIN || view.is_contiguous());
        let scratch = scratch.max(DIRECT_MIN);
        let max = if direct { DIRECT_MAX } else { scratch };
        Self {
            pieces: Pieces::new(region, sizes, view, max).peekable(),
            scatter: (!direct).then_some((gap_max, scratch)),
        }
    }

    fn direct(&mut self) -> Option<Fetch> {
        let mut pieces = Vec::new();
        let mut bytes = 0;
        while let Some(piece) = self.pieces.next_if(|piece| {
            pieces.len() < RANGES_MAX
                && (bytes == 0 || bytes + piece.dst.len() as u64 <= DIRECT_MAX)
        }) {
            bytes += piece.dst.len() as u64;
            pieces.push(piece);
        }
        (!pieces.is_empty()).then_some(Fetch::Direct(pieces))
    }

    fn scatter(&mut self, gap_max: u64, scratch: u64) -> Option<Fetch> {
        let mut spans: Vec<Span> = Vec::new();
        let (mut bytes, mut count) = (0, 0);
        while let Some(piece) = self.pieces.peek() {
            let len = piece.dst.len() as u64;
            let joins = spans.last().is_some_and(|span| {
                piece.src.checked_sub(span.src.end).is_some_and(|gap| gap <= gap_max)
            });
            let grown = match spans.last() {
                Some(span) if joins => piece.src_end() - span.src.end,
                _ => len,
            };
            let full = count > 0 && bytes + grown > scratch || count >= SCATTER_MAX;
            if full || (!joins && spans.len() >= RANGES_MAX) {
                break;
            }
            let Some(piece) = self.pieces.next() else { break };
            bytes += grown;
            count += 1;
            match spans.last_mut() {
                Some(span) if joins => {
                    span.src.end = piece.src_end();
                    span.pieces.push(piece);
                }
                _ => spans.push(Span { src: piece.src..piece.src_end(), pieces: vec![piece] }),
            }
        }
        (!spans.is_empty()).then_some(Fetch::Scatter(spans))
    }
}

impl Iterator for Fetches {
    type Item = Fetch;

    fn next(&mut self) -> Option<Fetch> {
        match self.scatter {
            None => self.direct(),
            Some((gap_max, scratch)) => self.scatter(gap_max, scratch),
        }
    }
}

/// Copies pieces out of `bytes`, which begin at offset `start` of the chunk.
pub(super) fn scatter(
    view: &TensorView,
    pieces: impl IntoIterator<Item = Piece>,
    bytes: &[u8],
    start: u64,
) -> Result<(), ScatterError> {
    fill(view, pieces, |src, out| {
        let from = src.checked_sub(start).and_then(|from| usize::try_from(from).ok());
        let source = from.and_then(|from| bytes.get(from..)?.get(..out.len()));
        out.copy_from_slice(source.ok_or(ScatterError::Short)?);
        Ok(())
    })
}

/// Fills the memory of each piece: `source` receives the offset in the chunk and the memory.
///
/// Pieces that are contiguous in memory share a loan.
pub(super) fn fill(
    view: &TensorView,
    pieces: impl IntoIterator<Item = Piece>,
    mut source: impl FnMut(u64, &mut [u8]) -> Result<(), ScatterError>,
) -> Result<(), ScatterError> {
    let mut pieces = pieces.into_iter().peekable();
    let mut group: Vec<Piece> = Vec::new();
    while let Some(first) = pieces.next() {
        let mut whole = first.dst.clone();
        group.clear();
        group.push(first);
        while group.len() < SCATTER_MAX
            && let Some(next) = pieces.next_if(|next| next.dst.start == whole.end)
        {
            whole.end = next.dst.end;
            group.push(next);
        }
        let mut loan = view.memory().lend(whole).map_err(ScatterError::Loan)?;
        let mut rest = &mut loan[..];
        for piece in &group {
            let out = rest.split_off_mut(..piece.dst.len()).ok_or(ScatterError::Short)?;
            source(piece.src, out)?;
        }
    }
    Ok(())
}

/// The error of copying pieces.
#[derive(Debug)]
pub(super) enum ScatterError {
    /// The destination is in use.
    Loan(LoanError),
    /// The source has fewer bytes than the pieces need.
    Short,
    /// The source is damaged.
    Source(FormatError),
}

#[cfg(test)]
mod tests {
    use dcp_core::{DType, Dims, HostMemory};
    use proptest::prelude::*;

    use super::*;

    fn view(region: &Region, padding: u64) -> TensorView {
        let mut strides = vec![1; region.ndim()];
        let mut stride = 1;
        for axis in (0..region.ndim()).rev() {
            strides[axis] = stride;
            stride *= region.sizes()[axis] + padding;
        }
        let memory = HostMemory::zeroed(2 * stride as usize);
        TensorView::strided(memory, DType::Int16, region.sizes().clone(), strides, 0).unwrap()
    }

    fn boxes() -> impl Strategy<Value = (Vec<u64>, Region)> {
        prop::collection::vec((1..7_u64, 0..7_u64, 1..7_u64), 0..4).prop_map(|axes| {
            let sizes: Vec<u64> = axes.iter().map(|(size, ..)| *size).collect();
            let offsets: Vec<u64> = axes.iter().map(|(size, at, _)| at % size).collect();
            let lens: Vec<u64> = axes
                .iter()
                .zip(&offsets)
                .map(|((size, _, len), at)| 1 + len % (size - at))
                .collect();
            (sizes, Region::new(offsets, lens).unwrap())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn fetches_move_every_element_once(
            (sizes, region) in boxes(), padding in 0..2_u64, gap in 0..400_u64,
        ) {
            let volume: u64 = sizes.iter().product();
            let chunk: Vec<u8> =
                (0..volume as u16).flat_map(|n| (n + 1).to_le_bytes()).collect();
            let view = view(&region, padding);
            let mut fetched = 0;
            for fetch in Fetches::new(&region, &sizes, &view, gap, 64) {
                match fetch {
                    Fetch::Direct(pieces) => {
                        fetched += pieces.iter().map(|p| p.dst.len()).sum::<usize>();
                        scatter(&view, pieces, &chunk, 0).unwrap();
                    }
                    Fetch::Scatter(spans) => for span in spans {
                        fetched += span.pieces.iter().map(|p| p.dst.len()).sum::<usize>();
                        let bytes = &chunk[span.src.start as usize..span.src.end as usize];
                        scatter(&view, span.pieces, bytes, span.src.start).unwrap();
                    }
                }
            }
            prop_assert_eq!(fetched as u64, view.byte_len());
            let expected: Vec<u8> = region
                .runs_in(&sizes)
                .flat_map(|(at, n)| chunk[2 * at as usize..2 * (at + n) as usize].to_vec())
                .collect();
            prop_assert_eq!(view.payload().unwrap().to_bytes(), expected);
        }
    }

    #[test]
    fn rows_and_distant_columns_are_read_in_place_and_near_columns_through_scratch() {
        let sizes = [64_u64, 8192];
        let rows = Region::new([8, 0], [8, 8192]).unwrap();
        let fetches: Vec<_> = Fetches::new(&rows, &sizes, &view(&rows, 0), 0, 1 << 20).collect();
        assert_eq!(fetches, [Fetch::Direct(vec![Piece { src: 131_072, dst: 0..131_072 }])]);

        let columns = Region::new([0, 16], [64, 16]).unwrap();
        let near: Vec<_> =
            Fetches::new(&columns, &sizes, &view(&columns, 0), 1 << 20, 100_000).collect();
        let spans = |fetch: &Fetch| match fetch {
            Fetch::Scatter(spans) => spans.len(),
            Fetch::Direct(_) => panic!("direct"),
        };
        // Seven rows, 16 KiB apart, fit into the scratch.
        assert_eq!((near.len(), spans(&near[0])), (10, 1));
        // Rows too far apart to read what is between them go to their places, if they are
        // contiguous there.
        let far: Vec<_> = Fetches::new(&columns, &sizes, &view(&columns, 0), 0, 100_000).collect();
        let [Fetch::Direct(pieces)] = &far[..] else { panic!("{far:?}") };
        assert_eq!((pieces.len(), &pieces[1].dst), (64, &(32..64)));
        let padded: Vec<_> =
            Fetches::new(&columns, &sizes, &view(&columns, 1), 0, 100_000).collect();
        assert_eq!((padded.len(), spans(&padded[0])), (1, 64));
    }

    #[test]
    fn a_source_that_is_too_short_is_noticed() {
        let whole = Region::full(Dims::from([4])).unwrap();
        let view = view(&whole, 0);
        let pieces = || Pieces::new(&whole, &[4], &view, 1 << 20);
        assert!(matches!(scatter(&view, pieces(), &[0; 7], 0), Err(ScatterError::Short)));
        let _reader = view.memory().read().unwrap();
        assert!(matches!(scatter(&view, pieces(), &[0; 8], 0), Err(ScatterError::Loan(_))));
    }
}
