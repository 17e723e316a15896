//! Counts numbers by magnitude: one bin per power of two.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeSeq, Serializer};
use serde_json::json;

/// Numbers by sign and binary exponent: bin `e` counts those with `2^e <= |x| < 2^(e + 1)`. Bin
/// -1023 counts what is below `2^-1022`. Zeros, infinities and NaNs are not counted.
///
/// Serialized, it is a list of `{"exponent", "negative", "positive"}`, ascending, without empty
/// bins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram(BTreeMap<i16, (u64, u64)>);

impl Histogram {
    /// The non-empty bins, ascending: the exponent, the number of negative and the number of
    /// positive values.
    pub fn bins(&self) -> impl DoubleEndedIterator<Item = (i16, u64, u64)> + '_ {
        self.0.iter().map(|(exponent, (negative, positive))| (*exponent, *negative, *positive))
    }

    /// The lowest and the highest exponent; `None` without values.
    #[must_use]
    pub fn range(&self) -> Option<(i16, i16)> {
        Some((*self.0.first_key_value()?.0, *self.0.last_key_value()?.0))
    }

    /// The number of values in the bins `from..=to`.
    #[must_use]
    pub fn within(&self, from: i16, to: i16) -> u64 {
        if from > to {
            return 0;
        }
        self.0.range(from..=to).map(|(_, (negative, positive))| negative + positive).sum()
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (exponent, negative, positive) in other.bins() {
            self.add(exponent, negative, positive);
        }
    }

    /// Adds numbers to a bin.
    pub(crate) fn add(&mut self, exponent: i16, negative: u64, positive: u64) {
        let bin = self.0.entry(exponent).or_default();
        bin.0 = bin.0.saturating_add(negative);
        bin.1 = bin.1.saturating_add(positive);
    }
}

impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        for (exponent, negative, positive) in self.bins() {
            let bin = json!({ "exponent": exponent, "negative": negative, "positive": positive });
            list.serialize_element(&bin)?;
        }
        list.end()
    }
}

/// Signs and exponents of an `f64`.
const BINS: usize = 1 << 12;
/// Neighboring values go to separate tables: they often share a bin, and a counter that was just
/// written cannot be read again at once.
const TABLES: usize = 4;
/// The number of values below which separate tables do not pay.
const FEW: usize = 512;

/// Counters of a [`Histogram`] in the making.
#[derive(Debug)]
pub(crate) struct Bins {
    tables: Box<[[u32; BINS]; TABLES]>,
    /// Values counted since the tables were emptied.
    counted: u64,
    /// Negative and positive subnormal numbers, whose exponent field is that of zero.
    subnormal: (u64, u64),
    done: Histogram,
}

impl Default for Bins {
    fn default() -> Self {
        Self {
            tables: Box::new([[0; BINS]; TABLES]),
            counted: 0,
            subnormal: (0, 0),
            done: Histogram::default(),
        }
    }
}

impl Bins {
    pub(crate) fn count(&mut self, values: &[f64]) {
        if self.counted == 0 && values.len() <= FEW {
            self.count_few(values);
            return;
        }
        if self.counted + values.len() as u64 > u64::from(u32::MAX) {
            self.empty();
        }
        self.counted += values.len() as u64;
        let bin = |x: f64| (x.to_bits() >> 52) as usize;
        let [a, b, c, d] = &mut *self.tables;
        let (rows, rest) = values.as_chunks::<TABLES>();
        for row in rows {
            a[bin(row[0])] += 1;
            b[bin(row[1])] += 1;
            c[bin(row[2])] += 1;
            d[bin(row[3])] += 1;
        }
        for x in rest {
            a[bin(*x)] += 1;
        }
    }

    /// Counts a few values without touching the empty tables.
    fn count_few(&mut self, values: &[f64]) {
        for x in values.iter().filter(|x| x.is_normal()) {
            let exponent = (x.to_bits() >> 52 & 0x7ff) as i16 - 1023;
            let bin = self.done.0.entry(exponent).or_default();
            if *x < 0.0 {
                bin.0 += 1;
            } else {
                bin.1 += 1;
            }
        }
    }

    /// Counts subnormal numbers; after conversion to `f64`, only `f64` tensors have any.
    pub(crate) fn count_subnormal(&mut self, values: &[f64]) {
        for x in values.iter().filter(|x| x.is_subnormal()) {
            if *x < 0.0 {
                self.subnormal.0 += 1;
            } else {
                self.subnormal.1 += 1;
            }
        }
    }

    /// Returns the counts and resets them.
    pub(crate) fn take(&mut self) -> Histogram {
        self.empty();
        std::mem::take(&mut self.done)
    }

    fn empty(&mut self) {
        const SIGN: usize = BINS / 2;
        let used = if self.counted == 0 { 0 } else { BINS };
        for at in 0..used {
            let count: u64 = self.tables.iter().map(|table| u64::from(table[at])).sum();
            // Zeros, infinities and NaNs are counted elsewhere.
            let field = at % SIGN;
            if count == 0 || field == 0 || field == SIGN - 1 {
                continue;
            }
            let bin = self.done.0.entry(field as i16 - 1023).or_default();
            if at < SIGN {
                bin.1 += count;
            } else {
                bin.0 += count;
            }
        }
        if self.subnormal != (0, 0) {
            let bin = self.done.0.entry(-1023).or_default();
            bin.0 += self.subnormal.0;
            bin.1 += self.subnormal.1;
        }
        self.subnormal = (0, 0);
        if self.counted > 0 {
            self.tables.iter_mut().for_each(|table| table.fill(0));
            self.counted = 0;
        }
    }
}
