//! Gathers tensors from storages: transposed, sliced, repeated, big-endian or conjugated ones.

use std::ops::Range;

use dcp_core::storage::{ReadInto, ReadRequest};
use dcp_core::{Buffer, CheckpointError, FormatError, Key, Region, Storage, TensorView};

use crate::torch_tensor::{ByteOrder, TensorLayout};

/// Bytes of elements to assemble in memory at a time.
const PART_BYTES: u64 = 4 << 20;
/// The maximum length of one range, in bytes.
const SPAN_BYTES: u64 = 4 << 20;
/// The maximum number of bytes per request.
const REQUEST_BYTES: u64 = 8 << 20;
/// The maximum number of ranges per request, and of picks from it.
const RANGES_MAX: usize = 256;
const PICKS_MAX: usize = 64 << 10;
/// Gaps up to this many bytes are always read, whatever the storage prefers.
const GAP_MIN: u64 = 256;

/// The position of a tensor's storage.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// In a file, from this offset.
    File { storage: &'a dyn Storage, key: &'a Key, start: u64 },
    /// In memory, because it had to be decoded.
    Memory(&'a [u8]),
}

/// Fills `view` with the elements `region` of a tensor. Returns the number of bytes read.
///
/// Reads only what is needed and small gaps, in storage order, and holds a few MiB at a time, for
/// any strides.
pub(super) async fn read(
    place: Place<'_>,
    layout: &TensorLayout,
    byte_order: ByteOrder,
    region: &Region,
    view: &TensorView,
    fqn: &str,
) -> Result<u64, CheckpointError> {
    let mut read = 0;
    let mut parts = vec![region.clone()];
    while let Some(part) = parts.pop() {
        if let Some(halves) = halves(layout, &part) {
            parts.extend(halves.into_iter().rev());
            continue;
        }
        let element = layout.dtype().size() as u64;
        // At most PART_BYTES, or one element.
        let len = usize::try_from(part.volume().saturating_mul(element)).unwrap_or(0);
        let mut elements = vec![0; len];
        read += pick(place, layout, &part, &mut elements).await?;
        layout.evaluate(byte_order, &mut elements)?;
        let inner = part.relative_to(region.offsets()).unwrap_or(part);
        let target = view.narrow(&inner)?;
        target
            .fill_from(&elements)
            .map_err(|source| CheckpointError::Memory { fqn: fqn.to_owned(), source })?;
    }
    Ok(read)
}

/// Splits a region that is too large for one part, along the axis with the largest distance in the
/// storage, so that runs of elements stay whole.
fn halves(layout: &TensorLayout, region: &Region) -> Option<[Region; 2]> {
    let bytes = region.volume().saturating_mul(layout.dtype().size() as u64);
    if bytes <= PART_BYTES {
        return None;
    }
    let axes = region.sizes().iter().zip(layout.strides()).enumerate();
    let (axis, _) = axes
        .filter(|(_, (size, _))| **size > 1)
        .max_by_key(|(axis, (_, stride))| (**stride, std::cmp::Reverse(*axis)))?;
    let at = region.sizes().get(axis)? / 2;
    let (mut first, mut second) = (region.sizes().clone(), region.sizes().clone());
    let mut offsets = region.offsets().clone();
    *first.get_mut(axis)? = at;
    *second.get_mut(axis)? -= at;
    *offsets.get_mut(axis)? += at;
    Some([Region::new(region.offsets().clone(), first).ok()?, Region::new(offsets, second).ok()?])
}

/// Reads the elements of a part in row-major order.
async fn pick(
    place: Place<'_>,
    layout: &TensorLayout,
    part: &Region,
    out: &mut [u8],
) -> Result<u64, CheckpointError> {
    let element = layout.dtype().size();
    let (storage, key, start) = match place {
        Place::Memory(bytes) => {
            for pick in Picks::new(layout, part, u64::MAX, u64::MAX) {
                pick.copy(bytes, 0, out, element).ok_or_else(outside)?;
            }
            return Ok(0);
        }
        Place::File { storage, key, start } => (storage, key, start),
    };
    let gap = storage.capabilities().coalesce_gap.max(GAP_MIN);
    let mut picks = Picks::new(layout, part, gap, SPAN_BYTES).peekable();
    let mut read = 0;
    while picks.peek().is_some() {
        let (mut spans, mut count, mut total): (Vec<Span>, usize, u64) = (Vec::new(), 0, 0);
        while let Some(next) = picks.peek() {
            let range = next.bytes(element as u64);
            let joined = spans.last().and_then(|span| span.joined(&range, gap));
            let grown = match (&joined, spans.last()) {
                (Some(joined), Some(span)) => joined.end - span.range.end,
                _ => range.end - range.start,
            };
            let full = total + grown > REQUEST_BYTES || count >= PICKS_MAX;
            if count > 0 && (full || joined.is_none() && spans.len() >= RANGES_MAX) {
                break;
            }
            let Some(next) = picks.next() else { break };
            total += grown;
            count += 1;
            match (joined, spans.last_mut()) {
                (Some(joined), Some(span)) => {
                    span.range = joined;
                    span.picks.push(next);
                }
                _ => spans.push(Span { range, picks: vec![next] }),
            }
        }
        let reads = spans.iter().map(|span| ReadInto {
            byte_offset: start.saturating_add(span.range.start),
            // At most REQUEST_BYTES in all.
            buffer: Buffer::zeroed((span.range.end - span.range.start) as usize),
        });
        let buffers = storage.read(key, ReadRequest::new(reads.collect())).await?.buffers;
        read += total;
        for (span, bytes) in spans.iter().zip(&buffers) {
            for pick in &span.picks {
                pick.copy(bytes, span.range.start, out, element).ok_or_else(outside)?;
            }
        }
    }
    Ok(read)
}

fn outside() -> CheckpointError {
    FormatError::new("tensor", "an element is outside the storage").into()
}

/// A byte range of the storage, and the elements to take from it.
struct Span {
    range: Range<u64>,
    picks: Vec<Pick>,
}

impl Span {
    /// The union with another range, if they are near and not too long together.
    fn joined(&self, other: &Range<u64>, gap: u64) -> Option<Range<u64>> {
        let end = self.range.end.max(other.end);
        let near = other.start >= self.range.start
            && other.start <= self.range.end.saturating_add(gap)
            && end - self.range.start <= SPAN_BYTES;
        near.then_some(self.range.start..end)
    }
}

/// Elements at equal distances in the storage and in the part. All numbers count elements.
#[derive(Clone, Copy, Debug)]
struct Pick {
    from: u64,
    from_stride: u64,
    to: u64,
    to_stride: u64,
    len: u64,
}

impl Pick {
    /// The byte range of the storage from the first to the last element.
    fn bytes(&self, element: u64) -> Range<u64> {
        let last = self.from + (self.len - 1) * self.from_stride;
        self.from * element..(last + 1) * element
    }

    /// Copies the elements out of `bytes`, which begin at offset `start` of the storage.
    fn copy(&self, bytes: &[u8], start: u64, out: &mut [u8], element: usize) -> Option<()> {
        let size = element as u64;
        let at = |n: u64| usize::try_from(n).ok();
        let from = at(self.from.checked_mul(size)?.checked_sub(start)?)?;
        let to = at(self.to.checked_mul(size)?)?;
        if (self.from_stride, self.to_stride) == (1, 1) {
            let len = at(self.len.checked_mul(size)?)?;
            let source = bytes.get(from..from.checked_add(len)?)?;
            out.get_mut(to..to.checked_add(len)?)?.copy_from_slice(source);
            return Some(());
        }
        let (from_step, to_step) = (at(self.from_stride * size)?, at(self.to_stride * size)?);
        for n in 0..at(self.len)? {
            let (from, to) = (from + n * from_step, to + n * to_step);
            let source = bytes.get(from..from + element)?;
            out.get_mut(to..to + element)?.copy_from_slice(source);
        }
        Some(())
    }
}

/// An axis of a part: the number of its indices, and their distances.
#[derive(Clone, Copy, Debug)]
struct Axis {
    len: u64,
    from: u64,
    to: u64,
}

/// The elements of a part, in storage order.
struct Picks {
    /// By stride in the storage, largest first.
    axes: Vec<Axis>,
    index: Vec<u64>,
    from: u64,
    to: u64,
    /// The elements of one pick along the innermost axis.
    row: Axis,
    done_of_row: u64,
    at_once: u64,
    left: u64,
}

impl Picks {
    /// Elements more than `gap` bytes apart are picked one by one, others together up to `most`
    /// bytes.
    fn new(layout: &TensorLayout, part: &Region, gap: u64, most: u64) -> Self {
        let element = layout.dtype().size() as u64;
        let mut to = 1;
        let mut axes = Vec::with_capacity(part.ndim());
        for (len, from) in part.sizes().iter().zip(layout.strides()).rev() {
            if *len != 1 {
                axes.push(Axis { len: *len, from: *from, to });
            }
            to *= len;
        }
        // Axes are in row-major order, innermost first, which breaks ties.
        axes.sort_by_key(|axis| axis.from);
        let mut merged: Vec<Axis> = Vec::with_capacity(axes.len());
        for axis in axes {
            match merged.last_mut() {
                Some(inner)
                    if axis.from == inner.from.saturating_mul(inner.len)
                        && axis.to == inner.to.saturating_mul(inner.len) =>
                {
                    inner.len *= axis.len;
                }
                _ => merged.push(axis),
            }
        }
        merged.reverse();
        let row = merged.pop().unwrap_or(Axis { len: 1, from: 1, to: 1 });
        let skipped = part.offsets().iter().zip(layout.strides()).map(|(at, stride)| at * stride);
        let step = row.from.saturating_mul(element);
        let at_once = match step {
            0 => u64::MAX,
            step if step - element.min(step) > gap => 1,
            step => (most / step).max(1),
        };
        Self {
            index: vec![0; merged.len()],
            axes: merged,
            // The layout was checked: every element is inside the storage.
            from: layout.storage_offset() + skipped.sum::<u64>(),
            to: 0,
            row,
            done_of_row: 0,
            at_once,
            left: part.volume(),
        }
    }
}

impl Iterator for Picks {
    type Item = Pick;

    fn next(&mut self) -> Option<Pick> {
        if self.left == 0 {
            return None;
        }
        let len = (self.row.len - self.done_of_row).min(self.at_once);
        let pick = Pick {
            from: self.from + self.done_of_row * self.row.from,
            from_stride: self.row.from,
            to: self.to + self.done_of_row * self.row.to,
            to_stride: self.row.to,
            len,
        };
        self.left -= len;
        self.done_of_row += len;
        if self.done_of_row < self.row.len {
            return Some(pick);
        }
        self.done_of_row = 0;
        for (at, axis) in self.index.iter_mut().zip(&self.axes).rev() {
            *at += 1;
            self.from += axis.from;
            self.to += axis.to;
            if *at < axis.len {
                break;
            }
            self.from -= axis.from * axis.len;
            self.to -= axis.to * axis.len;
            *at = 0;
        }
        Some(pick)
    }
}
