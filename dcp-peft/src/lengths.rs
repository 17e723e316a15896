//! The lengths of the rows of a matrix, as PyTorch computes them.
//!
//! `torch.linalg.norm` of contiguous `float32` rows (2.15, on x86-64) adds squares in eight lanes, one for each
//! position modulo eight; then the lanes from the first to the last; then what is left of the row: four squares
//! as the lanes are, and up to three by fused multiply-adds. The order decides the last bits of a length, and
//! with it those of every weight of a DoRA. A row arrives in segments, so its lanes are kept between them.

/// The number of lanes.
const LANES: usize = 8;

/// The sums of one row.
#[derive(Clone, Debug, Default)]
struct Row {
    lanes: [f32; LANES],
    /// The elements beyond the last full set of lanes.
    rest: [f32; LANES],
}

/// The lengths of rows of `columns` elements each.
#[derive(Debug)]
pub(crate) struct Lengths {
    rows: Vec<Row>,
    columns: usize,
}

impl Lengths {
    pub(crate) fn new(rows: usize, columns: usize) -> Self {
        Self { rows: vec![Row::default(); rows], columns }
    }

    /// Adds an element of a row, in which all elements before it were added.
    pub(crate) fn add(&mut self, row: usize, column: usize, element: f32) {
        let Some(row) = self.rows.get_mut(row) else { return };
        let lane = column % LANES;
        match column - lane + LANES <= self.columns {
            true => row.lanes[lane] += element * element,
            false => row.rest[lane] = element,
        }
    }

    /// The length of each row.
    pub(crate) fn finish(self) -> impl Iterator<Item = f32> {
        let left = self.columns % LANES;
        self.rows.into_iter().map(move |row| {
            let [first, others @ ..] = row.lanes;
            let sum = others.iter().fold(first, |sum, lane| sum + lane);
            let (as_lanes, fused) = row.rest[..left].split_at(if left < 4 { 0 } else { 4 });
            let sum = as_lanes.iter().fold(sum, |sum, element| sum + element * element);
            fused.iter().fold(sum, |sum, element| element.mul_add(*element, sum)).sqrt()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_counts_once() {
        for columns in 0..40_usize {
            let mut lengths = Lengths::new(2, columns);
            for column in 0..columns {
                lengths.add(0, column, (column + 1) as f32);
            }
            lengths.add(2, 0, 1.0);
            let squares: usize = (1..=columns).map(|element| element * element).sum();
            let found: Vec<f32> = lengths.finish().collect();
            assert_eq!(found, [(squares as f32).sqrt(), 0.0], "{columns}");
        }
    }
}
