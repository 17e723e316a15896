//! The elements that each rank of a group compares, and what it reports to rank 0 about them.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, PlanError};

use crate::element::Element;
use crate::element::compare::{Compared, Pair};
use crate::group::JobGroup;

const MAGIC: [u8; 4] = *b"dcd1";

/// The elements of two tensors of one shape.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extent {
    /// The number of elements; 0 when their values cannot be compared.
    pub(super) count: u64,
    /// The elements of a segment.
    pub(super) step: u64,
    /// Bytes of an element in both tensors together.
    pub(super) element_bytes: u64,
}

impl Extent {
    fn byte_len(&self) -> u128 {
        u128::from(self.count) * u128::from(self.element_bytes)
    }

    /// The first element of the first segment whose middle is `bytes` from the beginning or later; a
    /// segment is done where its middle is.
    fn segment_from(&self, bytes: u128) -> u64 {
        let step = self.step.max(1);
        let byte_len = |elements: u64| u128::from(elements) * u128::from(self.element_bytes);
        let (segment, whole) = (byte_len(step).max(1), self.count / step);
        let first = bytes.saturating_sub(segment / 2).div_ceil(segment);
        match u64::try_from(first) {
            Ok(first) if first < whole => first * step,
            _ if byte_len(whole * step) + byte_len(self.count % step) / 2 < bytes => self.count,
            _ => whole * step,
        }
    }
}

/// The elements of each of `extents` that `rank` of `world_size` compares: whole segments, about the
/// same number of bytes on each rank. An index may claim any number of elements, so that nothing here
/// is done for each segment.
pub(super) fn share(extents: &[Extent], rank: u32, world_size: u32) -> Vec<Range<u64>> {
    let total = extents.iter().map(Extent::byte_len).fold(0, u128::saturating_add);
    let ranks = u128::from(world_size.max(1));
    // Without an overflow, of which the remainder is the smaller part.
    let limit = |rank: u128| total / ranks * rank + total % ranks * rank / ranks;
    let first = limit(rank.into());
    let last = if rank + 1 < world_size { limit(u128::from(rank) + 1) } else { u128::MAX };
    let mut before = 0_u128;
    let of_extent = |extent: &Extent| {
        let element = |limit: u128| extent.segment_from(limit.saturating_sub(before));
        let own = element(first)..element(last);
        before = before.saturating_add(extent.byte_len());
        own
    };
    extents.iter().map(of_extent).collect()
}

/// Gathers the findings of all ranks about the pairs, and the bytes that they read, on rank 0; nothing
/// on others.
pub(super) async fn gather(
    group: &JobGroup,
    mine: &[Compared],
    bytes: u64,
) -> Result<Option<(Vec<Compared>, u64)>, CheckpointError> {
    let Some(messages) = group.gather(encode(mine, bytes)).await? else { return Ok(None) };
    let (mut found, mut bytes) = (vec![Compared::default(); mine.len()], 0_u64);
    for message in &messages {
        bytes = bytes.saturating_add(decode(message, &mut found)?);
    }
    Ok(Some((found, bytes)))
}

fn encode(found: &[Compared], bytes: u64) -> Bytes {
    let mut out = MessageWriter::new(MAGIC);
    out.number(bytes);
    for (pair, one) in found.iter().enumerate().filter(|(_, one)| one.count > 0) {
        out.numbers(&[pair as u64, one.count, one.different, one.nan_mismatches]);
        out.numbers(&[one.max_abs.to_bits(), one.max_rel.to_bits()]);
        for spot in [one.first, one.largest] {
            send(&mut out, spot);
        }
    }
    out.finish()
}

/// Adds what a rank found. Returns the bytes that it read.
fn decode(message: &[u8], found: &mut [Compared]) -> Result<u64, PlanError> {
    let mut input = MessageReader::new(message, MAGIC)?;
    let bytes = input.number()?;
    while input.remaining() > 0 {
        let pair = input.number()?;
        let one = Compared {
            count: input.number()?,
            different: input.number()?,
            nan_mismatches: input.number()?,
            max_abs: f64::from_bits(input.number()?),
            max_rel: f64::from_bits(input.number()?),
            first: take(&mut input)?,
            largest: take(&mut input)?,
        };
        let pair = usize::try_from(pair).ok().and_then(|pair| found.get_mut(pair));
        pair.ok_or_else(|| bad("a tensor out of range"))?.merge(one, 0);
    }
    input.finish()?;
    Ok(bytes)
}

fn send(out: &mut MessageWriter, spot: Option<Pair>) {
    let Some(pair) = spot else { return out.number(0) };
    out.numbers(&[1, pair.at, pair.abs.to_bits()]);
    for element in [pair.a, pair.b] {
        out.numbers(&match element {
            Element::Float(x) => [0, x.to_bits(), 0],
            Element::Int(n) => [1, n.cast_unsigned(), 0],
            Element::UInt(n) => [2, n, 0],
            Element::Bool(b) => [3, b.into(), 0],
            Element::Complex(re, im) => [4, re.to_bits(), im.to_bits()],
            Element::Pair(low, high) => [5, low.to_bits(), high.to_bits()],
            Element::Bits(bits, len) => [6, bits, len.into()],
        });
    }
}

fn take(input: &mut MessageReader<'_>) -> Result<Option<Pair>, PlanError> {
    if input.number()? == 0 {
        return Ok(None);
    }
    let (at, abs) = (input.number()?, f64::from_bits(input.number()?));
    let mut element = || {
        let (kind, x, y) = (input.number()?, input.number()?, input.number()?);
        Ok(match kind {
            0 => Element::Float(f64::from_bits(x)),
            1 => Element::Int(x.cast_signed()),
            2 => Element::UInt(x),
            3 => Element::Bool(x != 0),
            4 => Element::Complex(f64::from_bits(x), f64::from_bits(y)),
            5 => Element::Pair(f64::from_bits(x), f64::from_bits(y)),
            6 => Element::Bits(x, u8::try_from(y).map_err(|_| bad("an element of many bits"))?),
            _ => return Err(bad("an element of an unknown kind")),
        })
    };
    Ok(Some(Pair { at, a: element()?, b: element()?, abs }))
}

fn bad(problem: &str) -> PlanError {
    PlanError::message("the differences of a rank", problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::share::contiguous_share;

    #[test]
    fn every_element_is_compared_by_one_rank() {
        let extent = |count, step| Extent { count, step, element_bytes: 6 };
        let extents =
            [extent(10, 4), extent(0, 4), Extent::default(), extent(1000, 7), extent(3, 100)];
        for world_size in 1..9 {
            let mut next = [0; 5];
            for rank in 0..world_size {
                for (at, own) in share(&extents, rank, world_size).into_iter().enumerate() {
                    if own.is_empty() {
                        continue;
                    }
                    assert_eq!(own.start, next[at], "{rank} of {world_size}");
                    assert_eq!(own.start % extents[at].step, 0, "{rank} of {world_size}");
                    next[at] = own.end;
                }
            }
            assert_eq!(next, extents.map(|extent| extent.count), "{world_size}");
        }
    }

    #[test]
    fn an_index_that_claims_a_huge_tensor_is_divided_at_once() {
        let huge = Extent { count: u64::MAX, step: 1, element_bytes: 16 };
        let both = [huge, huge];
        let shares: Vec<_> = (0..3).map(|rank| share(&both, rank, 3)).collect();
        assert_eq!(shares[0], [0..shares[1][0].start, 0..0]);
        assert_eq!(shares[1], [shares[1][0].start..u64::MAX, 0..shares[2][1].start]);
        assert_eq!(shares[2], [u64::MAX..u64::MAX, shares[2][1].start..u64::MAX]);
        assert!(shares[1][0].start.abs_diff(u64::MAX / 3 * 2) < 4, "{shares:?}");
    }

    #[test]
    fn a_segment_is_compared_where_its_middle_is() {
        for lens in [&[5][..], &[3, 3, 3, 3], &[4, 9, 1, 7], &[1, 1, 40, 2, 2]] {
            for world_size in 1..6 {
                let extents: Vec<_> = lens
                    .iter()
                    .map(|count| Extent { count: *count, step: 3, element_bytes: 2 })
                    .collect();
                let segments = lens.iter().flat_map(|count| {
                    (0..*count).step_by(3).map(move |start| 2 * 3.min(count - start))
                });
                let segments: Vec<_> = segments.collect();
                for rank in 0..world_size {
                    let shares = share(&extents, rank, world_size);
                    let own = shares.iter().map(|own| (own.end - own.start).div_ceil(3) as usize);
                    let listed = contiguous_share(&segments, rank, world_size);
                    assert_eq!(own.sum::<usize>(), listed.len(), "{lens:?} {rank}/{world_size}");
                }
            }
        }
    }

    /// The results of three segments of a tensor, the second of which is equal.
    fn compared() -> [Compared; 3] {
        let pair = |at, a, b, abs| Some(Pair { at, a, b, abs });
        let first = Compared {
            count: 10,
            different: 2,
            nan_mismatches: 1,
            max_abs: 0.25,
            max_rel: f64::INFINITY,
            first: pair(3, Element::Float(f64::NAN), Element::Float(-0.0), f64::NAN),
            largest: pair(4, Element::Int(-7), Element::UInt(u64::MAX), 0.25),
        };
        let last = Compared {
            count: 4,
            different: 1,
            max_abs: 0.25,
            first: pair(21, Element::Complex(1.0, -2.0), Element::Pair(0.5, 6.0), 0.25),
            largest: pair(21, Element::Bits(9, 16), Element::Bool(true), 0.25),
            ..Compared::default()
        };
        [first, Compared { count: 10, ..Compared::default() }, last]
    }

    #[test]
    fn differences_arrive_as_they_were_sent() {
        let all = compared();
        let mut whole = Compared::default();
        all.iter().for_each(|one| whole.merge(one.clone(), 0));
        let mut found = vec![Compared::default(); 3];
        let mut bytes = 0;
        for (rank, one) in all.into_iter().enumerate() {
            let mine = [Compared::default(), Compared::default(), one];
            bytes += decode(&encode(&mine, 1 << rank), &mut found).unwrap();
        }
        assert_eq!(bytes, 7);
        // A NaN is not equal to itself, but its text is.
        assert_eq!(format!("{:?}", found[2]), format!("{whole:?}"));
        assert_eq!(found[..2], vec![Compared::default(); 2]);
    }

    #[test]
    fn messages_of_another_length_are_refused() {
        let mut found = vec![Compared::default(); 1];
        let message = encode(&compared()[..1], 40);
        // After the bytes that were read, a message may have no pair.
        for len in (0..message.len()).filter(|len| *len != 5) {
            assert!(decode(&message[..len], &mut found).is_err(), "{len}");
        }
        assert!(decode(&encode(&compared(), 40), &mut found).is_err());
    }
}
