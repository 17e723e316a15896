//! Histograms of one line, on a scale that many of them share.

use std::fmt;

use dcp::jobs::stats::Histogram;

/// The powers of two of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scale {
    /// The exponents of the first column begin here; what is smaller is in it, too.
    from: i32,
    /// Powers of two of one column.
    step: i32,
    columns: usize,
}

impl Scale {
    /// From the smallest magnitudes that matter to the largest: a thousandth of all numbers may
    /// be smaller than the scale.
    pub(crate) fn of<'a>(histograms: impl Iterator<Item = &'a Histogram>, columns: usize) -> Self {
        let mut counts = std::collections::BTreeMap::<i32, u64>::new();
        for (exponent, negative, positive) in histograms.flat_map(Histogram::bins) {
            *counts.entry(exponent.into()).or_default() += negative + positive;
        }
        let all: u64 = counts.values().sum();
        let mut below = 0;
        let low = counts.iter().find(|(_, count)| {
            below += **count;
            below > all / 1000
        });
        let low = low.map_or(0, |(exponent, _)| *exponent);
        let high = counts.last_key_value().map_or(0, |(exponent, _)| *exponent);
        let columns_i32 = i32::try_from(columns).unwrap_or(i32::MAX).max(1);
        let step = ((high - low + 1) + columns_i32 - 1).div_euclid(columns_i32).max(1);
        // The largest magnitude is in the last column.
        Self { from: high + 1 - step * columns_i32, step, columns }
    }

    /// The values at the ends of the scale.
    pub(crate) fn title(&self) -> String {
        let last = self.from + self.step * i32::try_from(self.columns).unwrap_or(0) - 1;
        let (from, to) = (format!("2^{}", self.from), format!("2^{last}"));
        let gap = self.columns.saturating_sub(from.len() + to.len());
        match gap {
            0 => to,
            gap => format!("{from}{}{to}", " ".repeat(gap)),
        }
    }
}

/// A histogram on a scale: a column is as high as its share of the largest one.
#[derive(Debug)]
pub(crate) struct Spark(Vec<u64>);

impl Spark {
    pub(crate) fn new(scale: &Scale, histogram: &Histogram) -> Self {
        let mut heights = vec![0_u64; scale.columns];
        for (exponent, negative, positive) in histogram.bins() {
            let column = (i32::from(exponent) - scale.from).div_euclid(scale.step).max(0);
            let column = usize::try_from(column).unwrap_or(0).min(scale.columns.saturating_sub(1));
            if let Some(height) = heights.get_mut(column) {
                *height += negative + positive;
            }
        }
        Self(heights)
    }
}

impl fmt::Display for Spark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let most = self.0.iter().copied().max().unwrap_or(0);
        for height in &self.0 {
            let level = match height {
                0 => ' ',
                height => {
                    let level = (*height as f64 / most as f64 * 8.0).ceil() as usize;
                    LEVELS.get(level.clamp(1, 8) - 1).copied().unwrap_or(' ')
                }
            };
            write!(f, "{level}")?;
        }
        Ok(())
    }
}
