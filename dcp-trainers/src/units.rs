//! The parameters in each flat buffer of FSDP1.
//!
//! With `use_orig_params=False` the optimizer has one number for each wrapped module: first the root's own parameters,
//! then the wrapped ones in order of definition. No file says which modules were wrapped. [`units`] finds them by
//! their sizes: the parameters of a module are contiguous in order of definition, and the flat buffer of a module is
//! their sum, padded to a multiple of the ranks. The invariant is that a division is only returned if it is
//! the only one that gives every buffer its length; where two are possible a guess could exchange the state of
//! parameters, so there is none.

/// A parameter by name and number of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) fqn: String,
    pub(crate) elements: u64,
}

/// The steps of a search after which there is no answer.
const STEPS_MAX: u32 = 1 << 20;

/// The positions of the parameters in each unit, whose flat length on each of `ranks` ranks is `lens`. `None` if there
/// is no division, or more than one.
pub(crate) fn units(all: &[Parameter], lens: &[u64], ranks: u64) -> Option<Vec<Vec<usize>>> {
    let mut found = Vec::new();
    for has_root in [true, false] {
        let mut search = Search { all, lens, ranks, has_root, steps: STEPS_MAX, found: Vec::new() };
        search.run(0, usize::from(has_root), 0, &mut Vec::new());
        if search.steps == 0 {
            return None;
        }
        found.extend(search.found);
    }
    let [only] = <[_; 1]>::try_from(found).ok()?;
    Some(only)
}

struct Search<'a> {
    all: &'a [Parameter],
    lens: &'a [u64],
    ranks: u64,
    has_root: bool,
    steps: u32,
    found: Vec<Vec<Vec<usize>>>,
}

impl Search<'_> {
    /// Whether parameters with so many elements fill the buffer of a unit.
    fn fits(&self, elements: u64, unit: usize) -> bool {
        self.lens.get(unit) == Some(&elements.div_ceil(self.ranks.max(1)))
    }

    fn root_room(&self) -> u64 {
        let len = self.lens.first().filter(|_| self.has_root);
        len.map_or(0, |len| len.saturating_mul(self.ranks))
    }

    fn elements(&self, range: std::ops::Range<usize>) -> u64 {
        let all = self.all.get(range).unwrap_or_default();
        all.iter().fold(0, |sum, one| sum.saturating_add(one.elements))
    }

    /// Divides the parameters from `at` on among the units from `unit` on; `taken` has the ranges of those before.
    /// `left` is the number of elements before that are the root's, which has room for so many.
    fn run(&mut self, at: usize, unit: usize, left: u64, taken: &mut Vec<std::ops::Range<usize>>) {
        if self.found.len() > 1 || self.steps == 0 {
            return;
        }
        self.steps -= 1;
        if unit == self.lens.len() {
            self.finish(taken);
            return;
        }
        for start in at..self.all.len() {
            let left = left.saturating_add(self.elements(at..start));
            if left > self.root_room() {
                return;
            }
            for end in self.modules(start) {
                self.steps = self.steps.saturating_sub(1);
                if self.fits(self.elements(start..end), unit) {
                    taken.push(start..end);
                    self.run(end, unit + 1, left, taken);
                    taken.pop();
                }
            }
        }
    }

    /// Ends of the modules whose parameters begin at `start`.
    fn modules(&self, start: usize) -> Vec<usize> {
        let mut ends = Vec::new();
        let Some(first) = self.all.get(start) else { return ends };
        for (dot, _) in first.fqn.match_indices('.') {
            let Some(module) = first.fqn.get(..=dot) else { continue };
            let of = |one: Option<&Parameter>| one.is_some_and(|one| one.fqn.starts_with(module));
            let before = start.checked_sub(1).and_then(|before| self.all.get(before));
            if of(before) {
                continue;
            }
            let mut end = start;
            while of(self.all.get(end)) {
                end += 1;
            }
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        ends
    }

    fn finish(&mut self, taken: &[std::ops::Range<usize>]) {
        let is_taken = |at: &usize| taken.iter().any(|range| range.contains(at));
        let root: Vec<usize> = (0..self.all.len()).filter(|at| !is_taken(at)).collect();
        let own = root.iter().filter_map(|at| self.all.get(*at));
        let own = own.fold(0_u64, |sum, one| sum.saturating_add(one.elements));
        let root_fits = match self.has_root {
            true => !root.is_empty() && self.fits(own, 0),
            false => root.is_empty(),
        };
        if root_fits {
            let units = taken.iter().map(|range| range.clone().collect());
            let root = self.has_root.then_some(root);
            let division: Vec<Vec<usize>> = root.into_iter().chain(units).collect();
            if !self.found.contains(&division) {
                self.found.push(division);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(all: &[(&str, u64)]) -> Vec<Parameter> {
        let of = |(fqn, elements): &(&str, u64)| Parameter {
            fqn: (*fqn).to_owned(),
            elements: *elements,
        };
        all.iter().map(of).collect()
    }

    #[test]
    fn wrapped_layers_are_found_by_their_sizes() {
        let all = parameters(&[
            ("embed.weight", 40),
            ("layers.0.up.weight", 12),
            ("layers.0.down.weight", 9),
            ("layers.1.up.weight", 12),
            ("layers.1.down.weight", 9),
            ("norm.weight", 5),
        ]);
        let expected = vec![vec![0, 5], vec![1, 2], vec![3, 4]];
        assert_eq!(units(&all, &[23, 11, 11], 2), Some(expected));
        assert_eq!(units(&all, &[87], 1), Some(vec![(0..6).collect()]));
        assert_eq!(units(&all, &[23, 11, 12], 2), None);
        assert_eq!(units(&all, &[23, 11], 2), None);
    }

    #[test]
    fn a_division_that_is_not_the_only_one_is_none() {
        let all = parameters(&[("a.w", 4), ("b.w", 4), ("c.w", 4)]);
        assert_eq!(units(&all, &[4, 4, 4], 1), None);
    }
}
