//! Columns of numbers that repeat earlier runs of themselves, as those of layers do.
//!
//! A column is a sequence of runs: numbers as they are, and copies of numbers that are a distance
//! before them. A copy of more numbers than its distance repeats itself.

use super::{MessageReader, MessageWriter, bad};
use crate::error::PlanError;

/// The most numbers of one copy, which takes two bytes or more: a message of n bytes has at most
/// 128 n numbers.
const COPY_MAX: usize = 256;
/// Shorter copies save nothing.
const COPY_MIN: usize = 4;
const SLOTS_MAX: usize = 1 << 12;

impl MessageWriter {
    /// Writes numbers whose count the message does not contain.
    pub(super) fn column(&mut self, column: &[u64]) {
        let mut seen = Seen::new(column);
        let (mut sent, mut at, mut last) = (0, 0, 0);
        while at < column.len() {
            let found =
                [last, seen.distance(at)].map(|distance| (repeats(column, at, distance), distance));
            let [again, (len, distance)] = found;
            let (len, distance) = if again.0 >= len { again } else { (len, distance) };
            if len < COPY_MIN {
                seen.add(at);
                at += 1;
                continue;
            }
            self.plain(&column[sent..at]);
            self.number(2 * len as u64 + 1);
            self.number(distance as u64);
            at += len;
            (sent, last) = (at, distance);
        }
        self.plain(&column[sent..]);
    }

    fn plain(&mut self, numbers: &[u64]) {
        if !numbers.is_empty() {
            self.number(2 * numbers.len() as u64);
            self.numbers(numbers);
        }
    }
}

impl MessageReader<'_> {
    /// Reads `count` numbers.
    pub(super) fn column(&mut self, count: usize) -> Result<Vec<u64>, PlanError> {
        let mut column = Vec::new();
        while column.len() < count {
            let code = self.number()?;
            let len = usize::try_from(code / 2).ok();
            let fits = |len: &usize| (1..=count - column.len()).contains(len);
            let len = len.filter(fits).ok_or_else(|| bad("a column of another length"))?;
            if code % 2 == 0 {
                if len > self.remaining() {
                    return Err(bad("it ends too early"));
                }
                column.reserve(len);
                for _ in 0..len {
                    column.push(self.number()?);
                }
                continue;
            }
            let distance = usize::try_from(self.number()?).ok();
            let from = distance.filter(|distance| *distance > 0 && len <= COPY_MAX);
            let from = from.and_then(|distance| column.len().checked_sub(distance));
            let from = from.ok_or_else(|| bad("a copy of numbers that were not sent"))?;
            column.reserve(len);
            for at in from..from + len {
                column.push(column[at]);
            }
        }
        Ok(column)
    }
}

/// Counts the numbers from `at` on that equal those `distance` before them, at most [`COPY_MAX`].
fn repeats(column: &[u64], at: usize, distance: usize) -> usize {
    let Some(from) = at.checked_sub(distance).filter(|from| *from < at) else { return 0 };
    let pairs = column[at..].iter().zip(&column[from..]).take(COPY_MAX);
    pairs.take_while(|(now, before)| now == before).count()
}

/// The last position of each sequence of [`COPY_MIN`] numbers, by its hash.
struct Seen<'a> {
    column: &'a [u64],
    /// Positions, and one more; 0 is none.
    positions: Vec<u32>,
}

impl<'a> Seen<'a> {
    fn new(column: &'a [u64]) -> Self {
        let slots = match column.len() {
            0..COPY_MIN => 0,
            len => len.next_power_of_two().min(SLOTS_MAX),
        };
        Self { column, positions: vec![0; slots] }
    }

    fn slot(&self, at: usize) -> Option<usize> {
        let next = self.column.get(at..at + COPY_MIN)?;
        let mixed = next
            .iter()
            .fold(0_u64, |hash, n| (hash.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Some((mixed >> 48) as usize % self.positions.len().max(1))
    }

    fn distance(&self, at: usize) -> usize {
        let found = self.slot(at).and_then(|slot| self.positions.get(slot));
        found.and_then(|found| at.checked_sub((*found as usize).checked_sub(1)?)).unwrap_or(0)
    }

    fn add(&mut self, at: usize) {
        if let Some(slot) = self.slot(at)
            && let Some(position) = self.positions.get_mut(slot)
        {
            // A column of so many numbers that they do not fit is sent as it is from there on.
            *position = u32::try_from(at + 1).unwrap_or(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(column: &[u64]) -> Vec<u8> {
        let mut out = MessageWriter(Vec::new());
        out.column(column);
        out.0
    }

    proptest! {
        #[test]
        fn columns_arrive_as_they_were_sent(
            parts in prop::collection::vec((prop::collection::vec(0_u64..400, 0..12), 0_usize..60), 0..6),
            damage in any::<(prop::sample::Index, u8)>(),
        ) {
            let column: Vec<u64> =
                parts.iter().flat_map(|(part, times)| part.repeat(*times)).collect();
            let mut bytes = encoded(&column);
            let mut input = MessageReader(&bytes);
            let back = input.column(column.len());
            prop_assert_eq!(&back, &Ok(column.clone()));
            prop_assert_eq!(input.finish(), Ok(()));
            if !bytes.is_empty() {
                let at = damage.0.index(bytes.len());
                bytes[at] = damage.1;
                if let Ok(other) = MessageReader(&bytes).column(column.len()) {
                    prop_assert_eq!(other.len(), column.len());
                }
            }
        }
    }

    #[test]
    fn repeated_layers_take_few_bytes() {
        let layers: Vec<u64> = (0..1000).map(|n| n % 9).collect();
        assert!(encoded(&layers).len() <= 30, "{}", encoded(&layers).len());
        assert!(encoded(&[7; 1000]).len() <= 20);
        assert_eq!(encoded(&[]), []);
        assert_eq!(encoded(&[1, 2, 3]), [6, 1, 2, 3]);
    }

    #[test]
    fn copies_are_refused_of_what_was_not_sent_and_of_too_much() {
        let read = |bytes: &[u8], count| MessageReader(bytes).column(count).is_err();
        assert!(read(&[2, 1, 5, 2], 3));
        assert!(read(&[2, 1, 5, 0], 3));
        assert!(read(&[2, 1, 9, 1], 3));
        assert!(read(&[0], 3));
        assert!(read(&[6, 1], 3));
        let mut bomb = MessageWriter(vec![2, 1]);
        bomb.number(2 * 1_000_000 + 1);
        bomb.number(1);
        assert!(read(&bomb.0, 1_000_001));
    }
}
