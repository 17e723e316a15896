//! The requests that read the ranges of a call.

/// Memory to fill, and its offset in the object.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    pub(crate) start: u64,
    pub(crate) memory: &'a mut [u8],
}

impl Part<'_> {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.memory.len() as u64)
    }
}

/// Bytes of an object that one request reads, and the memory that they go to.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// In order of their starts.
    parts: Vec<Part<'a>>,
    /// The number of parts at the front that are full.
    full: usize,
}

impl Run<'_> {
    pub(crate) fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Copies the bytes of the object from `offset` to where they belong. Bytes of gaps are
    /// dropped. The offsets of calls increase.
    pub(crate) fn fill(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        for part in &mut self.parts[self.full..] {
            if part.start >= end {
                break;
            }
            let (from, to) = (part.start.max(offset), part.end().min(end));
            if from < to {
                // Both are within the part and the bytes, whose lengths are `usize`.
                let target = (from - part.start) as usize..(to - part.start) as usize;
                let source = (from - offset) as usize..(to - offset) as usize;
                part.memory[target].copy_from_slice(&bytes[source]);
            }
        }
        while self.parts.get(self.full).is_some_and(|part| part.end() <= end) {
            self.full += 1;
        }
    }
}

/// Merges parts with a gap of at most `gap` bytes, and divides what is longer than `max` bytes
/// evenly. Parts without bytes are ignored.
pub(crate) fn runs(mut parts: Vec<Part<'_>>, gap: u64, max: u64) -> Vec<Run<'_>> {
    parts.retain(|part| !part.memory.is_empty());
    parts.sort_unstable_by_key(|part| part.start);
    let mut merged: Vec<Run<'_>> = Vec::new();
    for part in parts {
        let end = part.end();
        match merged.last_mut() {
            Some(run) if part.start.saturating_sub(run.end) <= gap => {
                run.end = run.end.max(end);
                run.parts.push(part);
            }
            _ => merged.push(Run { start: part.start, end, parts: vec![part], full: 0 }),
        }
    }
    merged.into_iter().flat_map(|run| divided(run, max.max(1))).collect()
}

fn divided(run: Run<'_>, max: u64) -> Vec<Run<'_>> {
    let number = run.len().div_ceil(max);
    if number <= 1 {
        return vec![run];
    }
    let each = run.len().div_ceil(number);
    let mut divided = Vec::new();
    let mut parts = run.parts.into_iter().peekable();
    // What is behind the last cut of the parts before it.
    let mut rest = Vec::new();
    let mut cut = run.start;
    while !rest.is_empty() || parts.peek().is_some() {
        cut = cut.saturating_add(each).min(run.end);
        let mut reached = std::mem::take(&mut rest);
        while let Some(part) = parts.next_if(|part| part.start < cut) {
            reached.push(part);
        }
        let mut here = Vec::new();
        for Part { start, memory } in reached {
            // The length of the memory before the cut, which is a `usize`.
            let before = (cut - start).min(memory.len() as u64) as usize;
            let (front, back) = memory.split_at_mut(before);
            here.push(Part { start, memory: front });
            if !back.is_empty() {
                rest.push(Part { start: cut, memory: back });
            }
        }
        // Gaps at the ends are not read.
        if let (Some(first), Some(end)) = (here.first(), here.iter().map(Part::end).max()) {
            divided.push(Run { start: first.start, end, parts: here, full: 0 });
        }
    }
    divided
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn byte_at(offset: u64) -> u8 {
        (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    proptest! {
        /// Every byte that is requested arrives, by requests within the limit, that begin and end
        /// with such a byte and have no gap beyond the limit.
        #[test]
        fn every_byte_arrives(
            ranges in prop::collection::vec((0_u64..500, 0_usize..120), 0..12),
            gap in 0_u64..40,
            max in 1_u64..200,
            step in 1_usize..50,
        ) {
            let mut memory: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![0; *len]).collect();
            let parts = ranges.iter().zip(&mut memory);
            let parts = parts.map(|((start, _), memory)| Part { start: *start, memory });
            let mut total = 0;
            for mut run in runs(parts.collect(), gap, max) {
                prop_assert!(run.len() <= max && run.len() > 0);
                total += run.len();
                let bytes: Vec<u8> = (run.start..run.end).map(byte_at).collect();
                let mut offset = run.start;
                for piece in bytes.chunks(step) {
                    run.fill(offset, piece);
                    offset += piece.len() as u64;
                }
            }
            for ((start, len), memory) in ranges.iter().zip(&memory) {
                let expected: Vec<u8> = (*start..*start + *len as u64).map(byte_at).collect();
                prop_assert_eq!(memory, &expected);
            }
            let mut covered = std::collections::BTreeSet::new();
            for (start, len) in &ranges {
                covered.extend(*start..*start + *len as u64);
            }
            let needed = covered.len() as u64;
            let gaps = gap * (ranges.len() as u64);
            prop_assert!(total >= needed && total <= needed + gaps, "{} of {}", total, needed);
        }
    }

    #[test]
    fn near_ranges_are_one_request_and_far_ones_are_not() {
        let (mut a, mut b, mut c) = ([0; 10], [0; 10], [0; 10]);
        let parts = vec![
            Part { start: 100, memory: &mut c },
            Part { start: 0, memory: &mut a },
            Part { start: 15, memory: &mut b },
        ];
        let spans = runs(parts, 5, 1000).iter().map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(spans, [(0, 25), (100, 110)]);
    }
}
