//! Encodes what of a save plan differs between ranks: where its chunks are, and the lengths of
//! objects.
//!
//! Most chunks are parts of equal length along some axes, as `torch.chunk` divides: few ways to
//! divide describe those of all tensors of a rank. Others are sent as offsets and sizes.
//!
//! A [`Division`] does not name lengths: "part 3 of 8 along axis 0" is the chunk of a rank in every tensor
//! that FSDP divides, whatever its rows. A rank of a mesh has one or two of them, so the values of a plan are
//! a small table of divisions and their numbers. The encoder derives the divisions from the chunks
//! ([`Division::shown_by`]) and uses one only where it gives back exactly the offsets and sizes of a chunk,
//! so a wrong guess costs bytes and never a wrong plan. General compression finds no repetition here: the
//! offsets differ from tensor to tensor.

use std::sync::Arc;

use super::plan_outline::Outline;
use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;
use crate::plans::plan::Unoffered;
use crate::tensors::dims::checked_volume;
use crate::tensors::region::Region;

/// In place of the number of a division: offsets and sizes follow.
const NONE: u64 = 0;
/// A rank with more divisions than this sends offsets and sizes.
const DIVISIONS_MAX: usize = 32;

/// A chunk, and the shape of its tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Chunk<'a> {
    pub(super) shape: &'a [u64],
    pub(super) offsets: &'a [u64],
    pub(super) sizes: &'a [u64],
}

/// One part of an axis that is divided into parts of equal length; the last ones are shorter.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    axis: u64,
    parts: u64,
    index: u64,
}

/// The axes of which a rank holds one part. It holds others whole; axes that a tensor does not have
/// do not count.
#[derive(Debug, Default, PartialEq)]
struct Division(Vec<Part>);

impl Part {
    /// Offset and size of the part of an axis of `len` elements.
    fn of(&self, len: u64) -> Option<(u64, u64)> {
        let each = (self.parts > 0).then(|| len.div_ceil(self.parts))?;
        let offset = each.saturating_mul(self.index).min(len);
        Some((offset, each.min(len - offset)))
    }
}

impl Division {
    fn along(&self, axis: usize, len: u64) -> Option<(u64, u64)> {
        match self.0.iter().find(|part| part.axis == axis as u64) {
            None => Some((0, len)),
            Some(part) => part.of(len),
        }
    }

    fn describes(&self, chunk: &Chunk<'_>) -> bool {
        let places = chunk.offsets.iter().copied().zip(chunk.sizes.iter().copied());
        let mut axes = chunk.shape.iter().zip(places).enumerate();
        axes.all(|(axis, (len, place))| self.along(axis, *len) == Some(place))
    }

    /// The division that `chunk` shows, with parts of `known` ones where they fit.
    fn shown_by(chunk: &Chunk<'_>, known: &[Self]) -> Option<Self> {
        let mut division = Self::default();
        let places = chunk.offsets.iter().copied().zip(chunk.sizes.iter().copied());
        for (axis, (len, place)) in chunk.shape.iter().zip(places).enumerate() {
            let (offset, size) = place;
            if place == (0, *len) {
                continue;
            }
            let fits = |part: &Part| part.of(*len) == Some(place);
            let axis = axis as u64;
            let before = known.iter().flat_map(|division| &division.0).find(|part| fits(part));
            let part = match before {
                Some(part) => Part { axis, ..*part },
                None if size > 0 && offset % size == 0 => {
                    Part { axis, parts: len.div_ceil(size), index: offset / size }
                }
                None => return None,
            };
            if !fits(&part) {
                return None;
            }
            division.0.push(part);
        }
        Some(division)
    }
}

/// Encodes the lengths of objects, the chunks, and regions that are not offered.
pub(super) fn encode<'a>(
    out: &mut MessageWriter,
    objects: &[u64],
    chunks: &[Chunk<'_>],
    unoffered: impl Iterator<Item = &'a Region>,
) {
    out.column(objects);
    let mut divisions: Vec<Division> = Vec::new();
    let (mut codes, mut numbers) = (Vec::with_capacity(chunks.len()), Vec::new());
    let mut last = 0;
    for chunk in chunks {
        let fits = |at: &usize| divisions.get(*at).is_some_and(|known| known.describes(chunk));
        let mut known = Some(last).filter(fits).or_else(|| (0..divisions.len()).find(fits));
        if known.is_none() && divisions.len() < DIVISIONS_MAX {
            known = Division::shown_by(chunk, &divisions).map(|division| {
                divisions.push(division);
                divisions.len() - 1
            });
        }
        match known {
            Some(at) => {
                codes.push(at as u64 + 1);
                last = at;
            }
            None => {
                codes.push(NONE);
                numbers.extend_from_slice(chunk.offsets);
                numbers.extend_from_slice(chunk.sizes);
            }
        }
    }
    for region in unoffered {
        numbers.extend_from_slice(region.offsets());
        numbers.extend_from_slice(region.sizes());
    }
    out.number(divisions.len() as u64);
    for Division(parts) in &divisions {
        out.number(parts.len() as u64);
        parts.iter().for_each(|part| out.numbers(&[part.axis, part.parts, part.index]));
    }
    out.column(&codes);
    out.column(&numbers);
}

/// The values of the items of `outline`, and what is not offered.
pub(super) fn decode(
    input: &mut MessageReader<'_>,
    outline: &Outline,
) -> Result<(Vec<u64>, Vec<Unoffered>), PlanError> {
    let mut objects = input.column(outline.objects)?.into_iter();
    let mut divisions = Vec::new();
    for _ in 0..input.count()? {
        let mut division = Division::default();
        for _ in 0..input.count()? {
            let [axis, parts, index] = [input.number()?, input.number()?, input.number()?];
            division.0.push(Part { axis, parts, index });
        }
        divisions.push(division);
    }
    let codes = input.column(outline.chunks())?;
    let own = outline.slots.iter().filter(|slot| slot.shape.is_some());
    let own = own.zip(&codes).filter(|(_, code)| **code == NONE);
    let plain: usize = own.map(|(slot, _)| 2 * slot.ndim()).sum();
    let numbers = input.column(plain + outline.unoffered_numbers())?;
    let mut rest = numbers.as_slice();
    let mut take = |len: usize| {
        let (taken, after) = rest.split_at_checked(len)?;
        rest = after;
        Some(taken)
    };
    let short = || bad("it ends too early");
    let mut codes = codes.into_iter();
    let mut values = Vec::with_capacity(outline.numbers);
    for slot in &outline.slots {
        let Some(shape) = &slot.shape else {
            values.push(objects.next().ok_or_else(short)?);
            continue;
        };
        let (start, ndim) = (values.len(), shape.ndim());
        match codes.next().ok_or_else(short)?.checked_sub(1) {
            None => values.extend_from_slice(take(2 * ndim).ok_or_else(short)?),
            Some(at) => {
                let division = usize::try_from(at).ok().and_then(|at| divisions.get(at));
                let division = division.ok_or_else(|| bad("a division that was not sent"))?;
                values.resize(start + 2 * ndim, 0);
                for (axis, len) in shape.iter().enumerate() {
                    let (offset, size) =
                        division.along(axis, *len).ok_or_else(|| bad("an axis of no parts"))?;
                    values[start + axis] = offset;
                    values[start + ndim + axis] = size;
                }
            }
        }
        let volume = values.get(start + ndim..).and_then(checked_volume);
        let byte_len = volume.and_then(|volume| volume.checked_mul(slot.dtype_size));
        byte_len.ok_or_else(|| bad("a chunk larger than 64 bits can count"))?;
    }
    let mut unoffered = Vec::with_capacity(outline.unoffered.len());
    for (fqn, ndim) in &outline.unoffered {
        let region = ndim.map(|ndim| {
            let (offsets, sizes) = (take(ndim).ok_or_else(short)?, take(ndim).ok_or_else(short)?);
            Region::new(offsets, sizes).map_err(|error| bad(error.to_string()))
        });
        unoffered.push(Unoffered { fqn: Arc::clone(fqn), region: region.transpose()? });
    }
    Ok((values, unoffered))
}
