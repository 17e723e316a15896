//! The reports of the ranks of a group to rank 0 about the numbers that they have read.
//!
//! Sums of floats depend on their order. So a rank sends the statistics of each piece, and rank 0
//! merges them in the order of the file, as one process does: the result has the same bits. Counts do
//! not depend on the order, so that the pieces of a tensor that follow each other have one histogram.

use std::mem;

use bytes::Bytes;
use dcp_core::PlanError;
use dcp_core::wire::{MessageReader, MessageWriter};

use crate::error::JobError;
use crate::read::pieces::Piece;
use crate::stats::moments::{Moments, Wide};

const MAGIC: [u8; 4] = *b"dcm1";

/// The statistics of the pieces that a rank has read, in the order of the file.
pub(super) struct Outgoing {
    message: MessageWriter,
    /// The tensor of the last piece, and its statistics.
    last: Option<(usize, Moments)>,
}

impl Outgoing {
    pub(super) fn new() -> Self {
        Self { message: MessageWriter::new(MAGIC), last: None }
    }

    /// Adds a piece of the tensor at position `entry`.
    pub(super) fn push(&mut self, entry: usize, mut moments: Moments) {
        if let Some((before, mut last)) = self.last.take() {
            if before == entry {
                moments.histogram.merge(&mem::take(&mut last.histogram));
            }
            send(&mut self.message, &last);
        }
        self.last = Some((entry, moments));
    }

    pub(super) fn finish(mut self) -> Bytes {
        if let Some((_, last)) = self.last {
            send(&mut self.message, &last);
        }
        self.message.finish()
    }
}

/// Passes each of `pieces` to `add` with its statistics, which the messages of all ranks have, in the
/// order of ranks.
pub(super) fn receive(
    messages: &[Bytes],
    pieces: impl Iterator<Item = Result<Piece, JobError>>,
    mut add: impl FnMut(&Piece, &Moments),
) -> Result<(), JobError> {
    let readers = messages.iter().map(|message| MessageReader::new(message, MAGIC));
    let mut readers = readers.collect::<Result<Vec<_>, _>>()?.into_iter();
    let mut reader = readers.next();
    for piece in pieces {
        let piece = piece?;
        while reader.as_ref().is_some_and(|reader| reader.remaining() == 0) {
            reader = readers.next();
        }
        let moments = reader.as_mut().ok_or_else(|| bad("it ends too early")).and_then(take)?;
        add(&piece, &moments);
    }
    reader.into_iter().chain(readers).try_for_each(MessageReader::finish)?;
    Ok(())
}

fn bad(problem: &str) -> PlanError {
    PlanError::message("the statistics of a rank", problem)
}

fn send(message: &mut MessageWriter, moments: &Moments) {
    let Moments { count, nan, pos_inf, neg_inf, zero, .. } = *moments;
    message.numbers(&[count, nan, pos_inf, neg_inf, zero]);
    let Moments { min, max, mean, squares, .. } = *moments;
    message.numbers(&[min, max, mean, squares].map(f64::to_bits));
    let first = moments.first_non_finite;
    message.flags(&[moments.scaled, moments.wide.is_some(), first.is_some()]);
    if let Some(Wide { min, max, sum }) = moments.wide {
        for number in [min, max, sum] {
            message.bytes(&number.to_le_bytes());
        }
    }
    if let Some(first) = first {
        message.number(first);
    }
    message.number(moments.histogram.bins().count() as u64);
    for (exponent, negative, positive) in moments.histogram.bins() {
        message.numbers(&[u64::from(exponent.cast_unsigned()), negative, positive]);
    }
}

fn take(message: &mut MessageReader<'_>) -> Result<Moments, PlanError> {
    let mut moments = Moments::default();
    let Moments { count, nan, pos_inf, neg_inf, zero, .. } = &mut moments;
    for number in [count, nan, pos_inf, neg_inf, zero] {
        *number = message.number()?;
    }
    let Moments { min, max, mean, squares, .. } = &mut moments;
    for number in [min, max, mean, squares] {
        *number = f64::from_bits(message.number()?);
    }
    let flags = message.flags(3)?;
    let [scaled, has_wide, has_first] = *flags else { return Err(bad("it ends too early")) };
    moments.scaled = scaled;
    if has_wide {
        let mut number = || {
            let bytes = message.bytes()?.try_into();
            bytes.map(i128::from_le_bytes).map_err(|_| bad("a number of another length"))
        };
        moments.wide = Some(Wide { min: number()?, max: number()?, sum: number()? });
    }
    if has_first {
        moments.first_non_finite = Some(message.number()?);
    }
    for _ in 0..message.count()? {
        let exponent = u16::try_from(message.number()?).map_err(|_| bad("a large exponent"))?;
        let (negative, positive) = (message.number()?, message.number()?);
        moments.histogram.add(exponent.cast_signed(), negative, positive);
    }
    Ok(moments)
}

#[cfg(test)]
mod tests {
    use dcp_core::{DType, Region};

    use super::*;
    use crate::stats::moments::Observer;

    fn piece(entry: usize) -> Piece {
        Piece { entry, chunk: 0, region: Region::full(vec![1]).unwrap(), byte_len: 4 }
    }

    /// Statistics of pieces of three tensors: floats, huge ones with a NaN, and wide integers.
    fn pieces() -> Vec<(usize, Moments)> {
        let floats = |values: &[f64]| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            Observer::default().observe(DType::Float64, &bytes)
        };
        let integers: Vec<u8> = [i64::MIN, 7].iter().flat_map(|n| n.to_le_bytes()).collect();
        vec![
            (4, floats(&[0.1, -0.0, 1e-310])),
            (4, floats(&[0.3; 9])),
            (1, floats(&[1e300, f64::NAN, -1e300])),
            (4, floats(&[])),
            (2, Observer::default().observe(DType::Int64, &integers)),
        ]
    }

    #[test]
    fn statistics_arrive_with_their_bits_from_any_number_of_ranks() {
        let all = pieces();
        for first in 0..=all.len() {
            for second in first..=all.len() {
                let ranks = [&all[..first], &all[first..second], &all[second..]];
                let messages = ranks.map(|rank| {
                    let mut out = Outgoing::new();
                    rank.iter().for_each(|(entry, moments)| out.push(*entry, moments.clone()));
                    out.finish()
                });
                let mut received = Vec::new();
                let pieces = all.iter().map(|(entry, _)| Ok(piece(*entry)));
                receive(&messages, pieces, |at, moments| {
                    received.push((at.entry, moments.clone()))
                })
                .unwrap();
                let whole = |all: &[(usize, Moments)], wanted: usize| {
                    let mut sum = Moments::default();
                    let of_entry = all.iter().filter(|(entry, _)| *entry == wanted);
                    of_entry.for_each(|(_, moments)| sum.merge(moments));
                    sum
                };
                for entry in [1, 2, 4] {
                    assert_eq!(whole(&received, entry), whole(&all, entry), "{first} {second}");
                }
            }
        }
    }

    #[test]
    fn messages_that_are_cut_or_too_long_are_refused() {
        let mut out = Outgoing::new();
        pieces().into_iter().for_each(|(entry, moments)| out.push(entry, moments));
        let message = out.finish();
        let try_as = |message: Bytes, pieces: usize| {
            receive(&[message], (0..pieces).map(|_| Ok(piece(0))), |_, _| ())
        };
        assert!(try_as(message.clone(), 5).is_ok());
        assert!(try_as(message.clone(), 4).is_err());
        assert!(try_as(message.clone(), 6).is_err());
        for len in 0..message.len() {
            assert!(try_as(message.slice(..len), 5).is_err(), "{len}");
        }
    }
}
