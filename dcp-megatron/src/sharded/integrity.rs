//! Checks that the main replicas of all ranks make every tensor and object grid exactly once.

use std::collections::HashMap;

use dcp_core::dims::checked_volume;
use dcp_core::overlap::find_overlap;
use dcp_core::{Dims, Rank, Region};

use super::problem::{IntegrityError, ShardingProblem};
use super::rank_shards::{Kind, RankShards, Spec};

/// Shards that are named in one problem; the rest is counted.
const LISTED: usize = 256;
/// Shards outside their tensor that are reported for one key.
const OUTSIDE: usize = 8;

/// Checks the descriptions of all ranks, in rank order: that ranks agree on dtypes and shapes, that
/// regular grids divide their tensors, that every shard is inside, and that of each shard and
/// each object there is exactly one main replica. Shards of irregular grids must not overlap and
/// must cover their tensor; flattened ranges must follow each other.
///
/// Megatron-Core asserts most of this on rank 0 alone and stops at the first problem (0.16); it
/// leaves irregular grids to PyTorch, which does not look whether they cover the tensor when one
/// rank saves.
///
/// # Errors
///
/// Everything that is wrong with any key.
#[doc(alias = "determine_global_metadata")]
pub fn validate_sharding_integrity(ranks: &[RankShards]) -> Result<(), IntegrityError> {
    let mut merged = Merged::default();
    for (rank, description) in ranks.iter().enumerate() {
        merged.take(Rank::try_from(rank).unwrap_or(Rank::MAX), description);
    }
    let mut problems = merged.problems;
    for key in merged.keys {
        key.settle(&mut problems);
    }
    if problems.is_empty() { Ok(()) } else { Err(IntegrityError { problems }) }
}

#[derive(Default)]
struct Merged<'a> {
    keys: Vec<MergedKey<'a>>,
    by_name: HashMap<&'a str, usize>,
    /// The keys of the rank before, which mostly has the same in the same order.
    last: Vec<usize>,
    problems: Vec<ShardingProblem>,
}

/// A key and the main replicas of it.
struct MergedKey<'a> {
    spec: &'a Spec,
    rank: Rank,
    /// Whether the declarations contradict each other, so that replicas are not counted.
    broken: bool,
    outside: usize,
    /// For grids: the position of each main replica, counted row by row, and its rank.
    cells: Vec<(u64, Rank)>,
    /// For flattened ranges, beside the cells: start and end.
    ranges: Vec<(u64, u64, u64, Rank)>,
    /// For irregular grids: offsets and sizes.
    boxes: Vec<(&'a [u64], &'a [u64], Rank)>,
}

impl<'a> Merged<'a> {
    fn take(&mut self, rank: Rank, description: &'a RankShards) {
        for (position, spec) in description.specs.iter().enumerate() {
            let guess = self.last.get(position).copied();
            let guess = guess.filter(|at| self.keys[*at].spec.key == spec.key);
            let at = guess.or_else(|| self.by_name.get(&*spec.key).copied());
            let at = at.unwrap_or_else(|| {
                self.by_name.insert(&spec.key, self.keys.len());
                let mut key = MergedKey::new(spec, rank);
                key.check_grid(&mut self.problems);
                self.keys.push(key);
                self.keys.len() - 1
            });
            match self.last.get_mut(position) {
                Some(slot) => *slot = at,
                None => self.last.push(at),
            }
            self.keys[at].meet(spec, rank, description, &mut self.problems);
        }
    }
}

impl<'a> MergedKey<'a> {
    fn new(spec: &'a Spec, rank: Rank) -> Self {
        Self {
            spec,
            rank,
            broken: false,
            outside: 0,
            cells: Vec::new(),
            ranges: Vec::new(),
            boxes: Vec::new(),
        }
    }

    fn name(&self) -> String {
        self.spec.key.to_string()
    }

    /// Whether the grid of the first rank covers its tensor.
    fn check_grid(&mut self, problems: &mut Vec<ShardingProblem>) {
        let Kind::Regular { shape, fragments, sizes, .. } = &self.spec.kind else { return };
        let axes = shape.iter().zip(&**fragments).zip(&**sizes);
        let off = { axes }.position(|((whole, count), size)| {
            count.checked_mul(*size) != Some(*whole) || *count == 0
        });
        if let Some(axis) = off {
            self.broken = true;
            let problem = format!(
                "{} shards of {} elements do not make the {} of axis {axis} of global shape {shape}",
                fragments[axis], sizes[axis], shape[axis]
            );
            problems.push(ShardingProblem::Grid { key: self.name(), rank: self.rank, problem });
        }
    }

    fn meet(
        &mut self,
        spec: &'a Spec,
        rank: Rank,
        description: &'a RankShards,
        problems: &mut Vec<ShardingProblem>,
    ) {
        if spec.kind != self.spec.kind {
            if !self.broken {
                problems.push(ShardingProblem::Disagreement {
                    key: self.name(),
                    left: described(&self.spec.kind),
                    left_rank: self.rank,
                    right: described(&spec.kind),
                    right_rank: rank,
                });
            }
            self.broken = true;
        }
        if self.broken {
            return;
        }
        for (row, main) in description.rows(spec) {
            if !self.row(row, main, rank) {
                if self.outside < OUTSIDE {
                    problems.push(ShardingProblem::Outside {
                        key: self.name(),
                        rank,
                        shard: shard(&spec.kind, row),
                        shape: match &spec.kind {
                            Kind::Object { grid } => format!("the grid {grid}"),
                            Kind::Regular { shape, .. } | Kind::Irregular { shape, .. } => {
                                format!("global shape {shape}")
                            }
                        },
                    });
                }
                self.outside += 1;
            }
        }
    }

    /// Adds a shard; false when it is outside the tensor.
    fn row(&mut self, row: &'a [u64], main: bool, rank: Rank) -> bool {
        match &self.spec.kind {
            // The last axis of objects with older names is not known.
            Kind::Object { grid } if grid.contains(&0) => true,
            Kind::Object { grid } => {
                let Some(cell) = cell(row, grid) else { return false };
                if main {
                    self.cells.push((cell, rank));
                }
                true
            }
            Kind::Regular { fragments, flattened, .. } => {
                let (at, range) = row.split_at(fragments.ndim());
                let Some(cell) = cell(at, fragments) else { return false };
                match (main, flattened, range) {
                    (true, true, &[start, end]) => self.ranges.push((cell, start, end, rank)),
                    (true, false, _) => self.cells.push((cell, rank)),
                    _ => {}
                }
                true
            }
            Kind::Irregular { shape, .. } => {
                let (offsets, sizes) = row.split_at(shape.ndim());
                let ends = offsets.iter().zip(sizes).map(|(o, s)| o.checked_add(*s));
                if !{ ends }.zip(&**shape).all(|(end, len)| end.is_some_and(|end| end <= *len)) {
                    return false;
                }
                if main {
                    self.boxes.push((offsets, sizes, rank));
                }
                true
            }
        }
    }

    fn settle(mut self, problems: &mut Vec<ShardingProblem>) {
        if self.broken || self.outside > 0 {
            return;
        }
        match &self.spec.kind {
            Kind::Object { grid } if grid.contains(&0) => {}
            // Nothing is to be covered.
            Kind::Regular { shape, .. } if shape.contains(&0) => {}
            Kind::Object { grid } => {
                let kind = self.spec.kind.clone();
                count_cells(&self.name(), grid, &kind, &mut self.cells, problems);
            }
            Kind::Regular { fragments, flattened: false, .. } => {
                let kind = self.spec.kind.clone();
                count_cells(&self.name(), fragments, &kind, &mut self.cells, problems);
            }
            Kind::Regular { fragments, sizes, .. } => {
                let volume = checked_volume(sizes).unwrap_or(0);
                self.ranges.sort_unstable();
                check_ranges(&self, fragments, volume, problems);
            }
            Kind::Irregular { shape, .. } => {
                let expected = shape.checked_volume().unwrap_or(u64::MAX);
                check_boxes(&self.name(), expected, &mut self.boxes, problems);
            }
        }
    }
}

/// The number of a position of a grid, counted row by row; `None` outside.
fn cell(at: &[u64], grid: &Dims) -> Option<u64> {
    at.iter().zip(&**grid).try_fold(0_u64, |cell, (at, len)| {
        if at >= len { None } else { cell.checked_mul(*len)?.checked_add(*at) }
    })
}

/// The position that has a number.
fn position(mut cell: u64, grid: &Dims) -> Dims {
    let mut at = grid.clone();
    for slot in at.iter_mut().rev() {
        let len = (*slot).max(1);
        *slot = cell % len;
        cell /= len;
    }
    at
}

/// Every cell of a grid must be there once.
fn count_cells(
    key: &str,
    grid: &Dims,
    kind: &Kind,
    cells: &mut [(u64, Rank)],
    problems: &mut Vec<ShardingProblem>,
) {
    let expected = grid.checked_volume().unwrap_or(u64::MAX);
    // Ranks come in order, so this is linear where they hold their parts in order.
    cells.sort();
    let (mut missing, mut doubles) = (Vec::new(), Vec::new());
    let (mut found, mut double, mut next) = (0_u64, 0_u64, 0_u64);
    let shard_of = |cell: u64| shard(kind, &position(cell, grid));
    let mut absent = |from: u64, to: u64| {
        let room = LISTED.saturating_sub(missing.len()) as u64;
        missing.extend((from..to.min(from.saturating_add(room))).map(shard_of));
    };
    for claims in cells.chunk_by(|a, b| a.0 == b.0) {
        let Some(&(cell, _)) = claims.first() else { continue };
        absent(next, cell);
        next = cell.saturating_add(1);
        found += 1;
        if claims.len() > 1 {
            double += 1;
            if doubles.len() < LISTED {
                let ranks = claims.iter().take(LISTED).map(|(_, rank)| *rank).collect();
                doubles.push((shard_of(cell), ranks));
            }
        }
    }
    absent(next, expected);
    if double > 0 {
        let key = key.to_owned();
        problems.push(ShardingProblem::Double { key, shards: doubles, count: double });
    }
    if found < expected {
        let (key, count) = (key.to_owned(), expected - found);
        problems.push(ShardingProblem::Missing { key, shards: missing, count });
    }
}

/// The ranges of every cell must cover its elements.
fn check_ranges(
    key: &MergedKey<'_>,
    fragments: &Dims,
    volume: u64,
    problems: &mut Vec<ShardingProblem>,
) {
    let kind = &key.spec.kind;
    let mut cells: Vec<(u64, Rank)> = Vec::new();
    for ranges in key.ranges.chunk_by(|a, b| a.0 == b.0) {
        let Some(&(cell, .., rank)) = ranges.first() else { continue };
        cells.push((cell, rank));
        let mut next = 0;
        let off = ranges
            .iter()
            .filter(|(_, start, end, _)| start != end)
            .find(|(_, start, end, _)| std::mem::replace(&mut next, *end) != *start || start > end);
        let problem = match off {
            Some((_, start, end, rank)) => {
                format!("elements {start}..{end} of rank {rank} do not follow those before them")
            }
            None if next != volume => format!("its ranges end at {next} of {volume} elements"),
            None => continue,
        };
        let shard = shard(kind, &position(cell, fragments));
        problems.push(ShardingProblem::Ranges { key: key.name(), shard, problem });
    }
    count_cells(&key.name(), fragments, kind, &mut cells, problems);
}

type BoxRow<'a> = (&'a [u64], &'a [u64], Rank);

fn check_boxes(
    key: &str,
    expected: u64,
    boxes: &mut Vec<BoxRow<'_>>,
    problems: &mut Vec<ShardingProblem>,
) {
    boxes.retain(|(_, sizes, _)| !sizes.contains(&0));
    boxes.sort_unstable();
    let mut doubles = Vec::new();
    let mut distinct: Vec<BoxRow<'_>> = Vec::with_capacity(boxes.len());
    let mut double = 0_u64;
    for same in boxes.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
        let Some(first) = same.first() else { continue };
        distinct.push(*first);
        if same.len() > 1 {
            double += 1;
            if doubles.len() < LISTED {
                let ranks = same.iter().take(LISTED).map(|(.., rank)| *rank).collect();
                doubles.push((shown(first.0, first.1), ranks));
            }
        }
    }
    if double > 0 {
        let key = key.to_owned();
        problems.push(ShardingProblem::Double { key, shards: doubles, count: double });
    }
    let rows: Vec<(&[u64], &[u64])> = distinct.iter().map(|b| (b.0, b.1)).collect();
    match find_overlap(&rows) {
        Err(_) => problems.push(ShardingProblem::TooIrregular { key: key.to_owned() }),
        Ok(Some((first, second))) => {
            let of = |at: usize| (shown(distinct[at].0, distinct[at].1), distinct[at].2);
            let (first, second) = (of(first.min(second)), of(first.max(second)));
            problems.push(ShardingProblem::Overlap { key: key.to_owned(), first, second });
        }
        Ok(None) => {
            let volume = |b: &BoxRow<'_>| u128::from(checked_volume(b.1).unwrap_or(0));
            let found: u128 = distinct.iter().map(volume).sum();
            if found != u128::from(expected) {
                let found = u64::try_from(found).unwrap_or(u64::MAX);
                let key = key.to_owned();
                problems.push(ShardingProblem::Uncovered { key, expected, found });
            }
        }
    }
}

fn shown(offsets: &[u64], sizes: &[u64]) -> String {
    match Region::new(offsets, sizes) {
        Ok(region) => format!("shard {region}"),
        Err(error) => error.to_string(),
    }
}

/// A row in words.
fn shard(kind: &Kind, row: &[u64]) -> String {
    match kind {
        Kind::Object { grid } => format!("object {} of {grid}", Dims::from(row)),
        Kind::Regular { sizes, .. } => {
            let offsets: Dims =
                row.iter().zip(&**sizes).map(|(at, n)| at.saturating_mul(*n)).collect();
            shown(&offsets, sizes)
        }
        Kind::Irregular { shape, .. } => {
            let (offsets, sizes) = row.split_at(shape.ndim().min(row.len()));
            shown(offsets, sizes)
        }
    }
}

fn described(kind: &Kind) -> String {
    match kind {
        Kind::Object { grid } => format!("objects in a grid of {grid}"),
        Kind::Regular { dtype, shape, sizes, flattened, .. } => {
            let what = if *flattened { "flattened ranges of shards" } else { "shards" };
            format!("{dtype} of global shape {shape} in {what} of {sizes}")
        }
        Kind::Irregular { dtype, shape } => {
            format!("{dtype} of global shape {shape} in an irregular grid")
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::{DType, Value};
    use proptest::prelude::*;

    use super::super::local::LocalTensor;
    use super::super::object::{ObjectKey, ShardedObject};
    use super::super::tensor::ShardedTensor;
    use super::super::traversal::ShardedLeaf;
    use super::*;

    fn part(position: u64, of: u64, replica: u64) -> ShardedTensor {
        ShardedTensor::from_rank_offsets("w", LocalTensor::described(DType::Float32, [2, 3]))
            .offset(0, position, of)
            .replica_id(replica)
            .build()
            .unwrap()
    }

    fn box_of(shape: u64, offset: u64, len: u64) -> ShardedTensor {
        let local = LocalTensor::described(DType::Float32, [len]);
        ShardedTensor::builder("w", local, [shape], [offset]).build().unwrap()
    }

    fn check(ranks: &[&[ShardedTensor]]) -> Result<(), IntegrityError> {
        let described: Vec<RankShards> = ranks
            .iter()
            .map(|tensors| RankShards::of(tensors.iter().map(ShardedLeaf::Tensor)))
            .map(|described| RankShards::from_wire(&described.to_wire()).unwrap())
            .collect();
        validate_sharding_integrity(&described)
    }

    fn problem(ranks: &[&[ShardedTensor]]) -> ShardingProblem {
        let mut problems = check(ranks).unwrap_err().problems;
        assert_eq!(problems.len(), 1, "{problems:?}");
        problems.remove(0)
    }

    #[test]
    fn replicas_do_not_count_and_main_ones_must_be_there_once() {
        check(&[&[part(0, 2, 0)], &[part(1, 2, 0)], &[part(1, 2, 1)]]).unwrap();
        let missing = problem(&[&[part(0, 3, 0)], &[part(1, 3, 1)]]);
        assert_eq!(
            missing.to_string(),
            "\"w\" has no main replica of shard [2:4, 0:3], shard [4:6, 0:3]"
        );
        let double = problem(&[&[part(0, 1, 0)], &[part(0, 1, 1)], &[part(0, 1, 0)]]);
        assert_eq!(
            double.to_string(),
            "\"w\" has several main replicas of shard [0:2, 0:3] (ranks 0, 2)"
        );
    }

    #[test]
    fn all_problems_of_all_keys_are_told() {
        let named = |key: &str, position| part(position, 2, 0).with_key(key);
        let error = check(&[&[named("a", 0), named("b", 1)], &[named("b", 1)]]).unwrap_err();
        let keys: Vec<&str> = error
            .problems
            .iter()
            .map(|problem| match problem {
                ShardingProblem::Missing { key, .. } | ShardingProblem::Double { key, .. } => {
                    &**key
                }
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(keys, ["a", "b", "b"]);
    }

    #[test]
    fn ranks_that_disagree_are_named() {
        let other =
            ShardedTensor::from_rank_offsets("w", LocalTensor::described(DType::BFloat16, [2, 3]))
                .offset(0, 1, 2)
                .build()
                .unwrap();
        let text = problem(&[&[part(0, 2, 0)], &[other]]).to_string();
        assert!(text.contains("on rank 0") && text.contains("on rank 1"), "{text}");
        let shapes = problem(&[&[part(0, 2, 0)], &[part(1, 3, 0)]]);
        assert!(matches!(shapes, ShardingProblem::Disagreement { .. }), "{shapes}");
        let mixed = problem(&[&[part(0, 1, 0)], &[box_of(4, 0, 4)]]);
        assert!(mixed.to_string().contains("irregular"), "{mixed}");
    }

    #[test]
    fn a_grid_that_does_not_divide_is_told() {
        let local = LocalTensor::described(DType::Float32, [3]);
        let off = ShardedTensor::builder("w", local, [7], [3]).axis_fragmentations([2]).build();
        let text = problem(&[&[off.unwrap()]]).to_string();
        assert!(text.contains("2 shards of 3 elements") && text.contains("[7]"), "{text}");
    }

    #[test]
    fn shards_outside_of_their_tensor_are_told_with_their_rank() {
        let local = || LocalTensor::described(DType::Float32, [3]);
        let far = ShardedTensor::builder("w", local(), [6], [9]).axis_fragmentations([2]).build();
        let inside =
            ShardedTensor::from_rank_offsets("w", local()).offset(0, 0, 2).build().unwrap();
        let text = problem(&[&[inside], &[far.unwrap()]]).to_string();
        assert!(text.contains("shard [9:12] of rank 1 is outside global shape [6]"), "{text}");
        let text = problem(&[&[box_of(6, 0, 4)], &[box_of(6, 4, 3)]]).to_string();
        assert!(text.contains("shard [4:7] of rank 1"), "{text}");
    }

    /// Traps 11 and 12: Megatron-Core leaves irregular grids to PyTorch, which does not request
    /// coverage when one rank saves.
    #[test]
    fn trap_11_trap_12_irregular_grids_are_checked_for_overlap_and_coverage() {
        check(&[&[box_of(10, 0, 3), box_of(10, 3, 7)]]).unwrap();
        let text = problem(&[&[box_of(10, 0, 3), box_of(10, 3, 3)]]).to_string();
        assert!(text.contains("hold 6 of its 10"), "{text}");
        let text = problem(&[&[box_of(10, 0, 4)], &[box_of(10, 3, 7)]]).to_string();
        assert!(text.contains("shard [0:4] of rank 0 overlaps shard [3:10] of rank 1"), "{text}");
        let double = problem(&[&[box_of(4, 0, 4)], &[box_of(4, 0, 4)]]);
        assert!(matches!(double, ShardingProblem::Double { .. }));
    }

    /// Trap 12: these end in a division by zero in Megatron-Core.
    #[test]
    fn trap_12_tensors_without_elements_are_fine() {
        let empty = |position| {
            ShardedTensor::from_rank_offsets("w", LocalTensor::described(DType::Float32, [0, 3]))
                .offset(0, position, 2)
                .build()
                .unwrap()
        };
        check(&[&[empty(0)], &[empty(1)]]).unwrap();
        check(&[&[box_of(4, 0, 4)], &[box_of(4, 4, 0)]]).unwrap();
    }

    #[test]
    fn flattened_ranges_follow_each_other_in_every_shard() {
        let range = |position, start, end| {
            ShardedTensor::from_rank_offsets(
                "w",
                LocalTensor::described(DType::Float32, [end - start]),
            )
            .offset(0, position, 2)
            .flattened_range(start..end, [2, 3])
            .build()
            .unwrap()
        };
        let second = range(1, 0, 6);
        check(&[&[range(0, 4, 6), second.clone()], &[range(0, 0, 4)], &[range(0, 4, 4)]]).unwrap();
        let gap = problem(&[&[range(0, 4, 6), second.clone()], &[range(0, 0, 3)]]).to_string();
        assert!(gap.contains("elements 4..6 of rank 0"), "{gap}");
        let short = problem(&[&[range(0, 0, 3)], std::slice::from_ref(&second)]).to_string();
        assert!(short.contains("end at 3 of 6"), "{short}");
        assert!(matches!(problem(&[&[second]]), ShardingProblem::Missing { count: 1, .. }));
    }

    #[test]
    fn objects_are_there_once_and_not_beside_a_tensor() {
        let object = |at: u64, replica: u64| {
            ShardedObject::new("rng", Value::None, [2, 2], [at / 2, at % 2])
                .unwrap()
                .with_replica_id(replica)
        };
        let check = |objects: &[ShardedObject], tensors: &[ShardedTensor]| {
            let leaves = objects.iter().map(ShardedLeaf::Object);
            let leaves = leaves.chain(tensors.iter().map(ShardedLeaf::Tensor));
            let described = RankShards::of(leaves);
            let described = RankShards::from_wire(&described.to_wire()).unwrap();
            validate_sharding_integrity(&[described])
        };
        let all: Vec<ShardedObject> = (0..4).map(|at| object(at, 0)).collect();
        check(&all, &[]).unwrap();
        let some = [object(0, 0), object(1, 1), object(3, 0), object(3, 0)];
        let text = check(&some, &[]).unwrap_err().to_string();
        assert!(
            text.contains("no main replica of object [0, 1] of [2, 2], object [1, 0]"),
            "{text}"
        );
        assert!(text.contains("object [1, 1] of [2, 2] (ranks 0, 0)"), "{text}");
        let text = check(&all, &[part(0, 1, 0).with_key("rng")]).unwrap_err().to_string();
        assert!(text.contains("objects in a grid of [2, 2] on rank 0 but float32"), "{text}");
        let far = ShardedObject::request(ObjectKey::parse("rng/shard_2_2").unwrap());
        assert!(check(&[far], &[]).is_err());
    }

    #[test]
    fn messages_that_are_none_are_refused() {
        let wire = RankShards::of([ShardedLeaf::Tensor(&part(0, 1, 0))]).to_wire();
        for len in 0..wire.len() {
            assert!(RankShards::from_wire(&wire[..len]).is_err());
        }
        assert!(RankShards::from_wire(&[&*wire, b"x"].concat()).is_err());
        let mut huge = b"msd1\x01\x01k\x00\x00".to_vec();
        huge.extend([0xff; 9]);
        huge.push(1);
        assert!(RankShards::from_wire(&huge).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_claim_more_or_less_is_always_noticed(
            grid in prop::collection::vec(1_u64..5, 1..4),
            ranks in 1_usize..6,
            owners in prop::collection::vec(0_usize..6, 64),
            pick in any::<prop::sample::Index>(),
        ) {
            let cells = grid.iter().product::<u64>();
            let dims = Dims::from(grid.clone());
            let shard = |cell: u64, replica: u64| {
                let local = vec![2; grid.len()];
                let at = position(cell, &dims);
                let local = LocalTensor::described(DType::Int8, local);
                let mut shard = ShardedTensor::from_rank_offsets("w", local).replica_id(replica);
                for (axis, (at, of)) in at.iter().zip(&grid).enumerate() {
                    shard = shard.offset(axis, *at, *of);
                }
                shard.build().unwrap()
            };
            let mut all: Vec<Vec<ShardedTensor>> = vec![Vec::new(); ranks];
            for cell in 0..cells {
                let owner = owners[cell as usize % 64] % ranks;
                for (rank, mine) in all.iter_mut().enumerate() {
                    mine.push(shard(cell, u64::from(rank != owner)));
                }
            }
            let check = |all: &[Vec<ShardedTensor>]| {
                check(&all.iter().map(Vec::as_slice).collect::<Vec<_>>())
            };
            prop_assert!(check(&all).is_ok());
            let cell = pick.index(cells as usize);
            let owner = owners[cell % 64] % ranks;
            let other = (owner + 1) % ranks;
            let mut more = all.clone();
            more[other].push(shard(cell as u64, 0));
            let error = check(&more).unwrap_err();
            let is_double = matches!(&error.problems[..], [ShardingProblem::Double { count: 1, .. }]);
            prop_assert!(is_double, "{}", error);
            all[owner][cell] = shard(cell as u64, 7);
            let error = check(&all).unwrap_err();
            let is_missing = matches!(&error.problems[..], [ShardingProblem::Missing { count: 1, .. }]);
            prop_assert!(is_missing, "{}", error);
        }
    }
}
