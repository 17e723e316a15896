//! Two axes of a tensor as a drawing whose proportions are roughly the tensor's.

use std::collections::BTreeSet;

use dcp::jobs::inspect::{ChunkSummary, TensorSummary};

use crate::output::render::canvas::Canvas;
use crate::output::style::right;

/// The lines that a picture may take.
const HEIGHT: usize = 17;
/// The least a chunk is drawn with, inside its borders.
const MIN_WIDTH: usize = 3;

/// An axis and where the chunks cut it.
#[derive(Debug)]
pub(crate) struct Axis {
    pub(crate) index: usize,
    /// Ascending, from 0 to the length.
    cuts: Vec<u64>,
}

impl Axis {
    pub(crate) fn new(index: usize, tensor: &TensorSummary) -> Self {
        let len = tensor.shape.get(index).copied().unwrap_or(0);
        let mut cuts = BTreeSet::from([0, len]);
        for chunk in tensor.chunks.iter().filter(|chunk| !chunk.sizes.contains(&0)) {
            let (start, end) = extent(chunk, index);
            cuts.extend([start.min(len), end.min(len)]);
        }
        Self { index, cuts: cuts.into_iter().collect() }
    }

    /// Pieces between cuts.
    pub(crate) fn parts(&self) -> usize {
        self.cuts.len().saturating_sub(1).max(1)
    }

    /// The piece at `index`: from where to where.
    pub(crate) fn part(&self, index: usize) -> (u64, u64) {
        let cut = |at: usize| self.cuts.get(at).copied().unwrap_or(0);
        (cut(index), cut(index + 1))
    }

    /// Gives every cut a line: the first at 0, the last at `room` if that can be, each at least
    /// `least` behind the one before; `None` when there is not enough room.
    fn scale(&self, room: usize, least: usize) -> Option<Vec<usize>> {
        let parts = self.cuts.len().checked_sub(1)?;
        let spare = room.checked_sub(parts * least)?;
        let len = self.cuts.last().copied().unwrap_or(0).max(1);
        let place = |(index, cut): (usize, &u64)| {
            let share = *cut as f64 / len as f64 * spare as f64;
            index * least + share.round() as usize
        };
        Some(self.cuts.iter().enumerate().map(place).collect())
    }

    fn line(&self, lines: &[usize], cut: u64) -> usize {
        let at = self.cuts.partition_point(|known| *known < cut);
        lines.get(at).or(lines.last()).copied().unwrap_or(0)
    }
}

fn extent(chunk: &ChunkSummary, axis: usize) -> (u64, u64) {
    let start = chunk.offsets.get(axis).copied().unwrap_or(0);
    let len = chunk.sizes.get(axis).copied().unwrap_or(0);
    (start, start.saturating_add(len))
}

/// What is drawn: one axis to the right, and perhaps one down.
#[derive(Debug)]
pub(crate) struct Plane<'a> {
    pub(crate) rows: Option<&'a Axis>,
    pub(crate) across: &'a Axis,
    /// Columns to draw in.
    pub(crate) width: usize,
}

impl Plane<'_> {
    /// Draws chunks, each with its number and color; `None` when they do not fit.
    pub(crate) fn draw(&self, chunks: &[(usize, &ChunkSummary, usize)]) -> Option<Canvas> {
        let widest = chunks.iter().map(|(index, ..)| label(*index).len()).max().unwrap_or(1);
        let margin = self.rows.map_or(0, |rows| digits(rows.cuts.last().copied().unwrap_or(0)));
        // A margin for row numbers, and room for the last column number to stick out.
        let left = margin + 3;
        let last = digits(self.across.cuts.last().copied().unwrap_or(0));
        let least = (widest + 2).max(MIN_WIDTH) + 1;
        let most = self.width.checked_sub(left + last)?;
        let wanted = (self.across.parts() * 14).clamp(24, 72);
        let across = self.across.scale(wanted.min(most), least);
        let across = across.or_else(|| self.across.scale(most, least))?;
        let down = match self.rows {
            None => vec![0, 2],
            Some(rows) => {
                let wanted = (rows.parts() * 4).clamp(4, HEIGHT - 1);
                rows.scale(wanted, 2).or_else(|| rows.scale(rows.parts() * 2, 2))?
            }
        };
        let height = down.last().copied()?;
        let right = across.last().copied()?;
        let mut canvas = Canvas::new(left + right + 1 + last, height + 2);
        self.numbers(&mut canvas, left, margin, &across, &down);
        canvas.frame(1, left, height + 1, left + right);
        for (index, chunk, hue) in chunks {
            let (start, end) = extent(chunk, self.across.index);
            let x0 = left + self.across.line(&across, start);
            let x1 = left + self.across.line(&across, end);
            let (y0, y1) = match self.rows {
                None => (1, height + 1),
                Some(rows) => {
                    let (start, end) = extent(chunk, rows.index);
                    (1 + rows.line(&down, start), 1 + rows.line(&down, end))
                }
            };
            canvas.frame(y0, x0, y1, x1);
            let name = label(*index);
            let column = x0 + (x1 - x0).saturating_sub(name.len()).div_ceil(2);
            canvas.text(y0 + (y1 - y0) / 2, column, &name, Some(*hue));
        }
        Some(canvas)
    }

    /// Numbers at the cuts, as far as they do not run into each other.
    fn numbers(
        &self,
        canvas: &mut Canvas,
        left: usize,
        margin: usize,
        across: &[usize],
        down: &[usize],
    ) {
        let mut free = 0;
        for (cut, line) in self.across.cuts.iter().zip(across) {
            let text = cut.to_string();
            let column = left + line;
            if column >= free {
                canvas.text(0, column, &text, None);
                free = column + text.len() + 1;
            }
        }
        if let Some(rows) = self.rows {
            for (cut, line) in rows.cuts.iter().zip(down) {
                canvas.text(1 + line, 2, &right(&cut.to_string(), margin), None);
            }
        }
    }
}

fn digits(number: u64) -> usize {
    number.to_string().len()
}

/// A, B, … Z, AA, AB, …
pub(crate) fn label(index: usize) -> String {
    let mut letters = Vec::new();
    let mut left = index + 1;
    while left > 0 {
        left -= 1;
        letters.push(char::from(b'A' + u8::try_from(left % 26).unwrap_or(0)));
        left /= 26;
    }
    letters.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_gets_room() {
        let axis = Axis { index: 0, cuts: vec![0, 1, 2, 1000] };
        assert_eq!(axis.scale(30, 4), Some(vec![0, 4, 8, 30]));
        assert_eq!(axis.scale(11, 4), None);
        let line = axis.line(&[0, 4, 8, 30], 2);
        assert_eq!(line, 8);
    }

    #[test]
    fn labels_count_in_letters() {
        let labels: Vec<_> = [0, 25, 26, 27, 701, 702].into_iter().map(label).collect();
        assert_eq!(labels, ["A", "Z", "AA", "AB", "ZZ", "AAA"]);
    }
}
