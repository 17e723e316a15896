//! The counts of tests that disturb something at every operation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;

/// A line of the table of `cargo xtask torture`.
///
/// [`report`](Self::report) writes it to the file that `DCP_TORTURE_REPORT` names, if it is set.
#[derive(Clone, Debug, Default)]
pub struct Tortured {
    /// What was disturbed, such as `first save`.
    pub what: String,
    /// How, such as `crash`.
    pub how: String,
    /// The number of operations or events at which it was.
    pub points: u64,
    /// The number of variants at each.
    pub models: u64,
    /// The number of different states that were looked at.
    pub states: u64,
    /// How many of them were what.
    pub found: BTreeMap<String, u64>,
}

impl Tortured {
    /// Nothing so far.
    #[must_use]
    pub fn new(what: &str, how: &str) -> Self {
        Self { what: what.to_owned(), how: how.to_owned(), models: 1, ..Self::default() }
    }

    /// Counts one state.
    pub fn count(&mut self, found: &str) {
        self.states += 1;
        *self.found.entry(found.to_owned()).or_default() += 1;
    }

    /// Appends the line, as JSON.
    #[track_caller]
    pub fn report(&self) {
        let found: BTreeSet<_> =
            self.found.iter().map(|(what, count)| format!("{what:?}: {count}")).collect();
        let found = found.into_iter().collect::<Vec<_>>().join(", ");
        let Self { what, how, points, models, states, .. } = self;
        let line = format!(
            "{{\"what\": {what:?}, \"how\": {how:?}, \"points\": {points}, \"models\": {models}, \
             \"states\": {states}, \"found\": {{{found}}}}}\n"
        );
        let Some(path) = std::env::var_os("DCP_TORTURE_REPORT") else { return };
        let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}

/// How many seeded losses are tried at each point: `DCP_TORTURE_SEEDS`, or 1.
#[must_use]
pub fn torture_seeds() -> u64 {
    std::env::var("DCP_TORTURE_SEEDS").map_or(1, |seeds| seeds.parse().unwrap())
}
