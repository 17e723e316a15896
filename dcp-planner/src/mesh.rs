//! The regions of a tensor that each rank of a device mesh holds, by PyTorch's placements.

mod layout;

use dcp_core::{Dims, PlanError, Rank, Region};

pub use self::layout::MeshLayout;

/// The most pieces into which a `_StridedShard` may cut the part of one rank.
const MAX_PIECES: u64 = 1 << 20;

/// The division of a tensor along one axis of a mesh: a `Placement` of PyTorch's DTensor.
#[doc(alias = "Placement")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorPlacement {
    /// Every rank along the mesh axis holds the same.
    Replicate,
    /// A tensor axis is cut into one piece per rank: each as long as the quotient rounded up, the
    /// last ones shorter or empty.
    Shard(usize),
    /// PyTorch's `_StridedShard`: the tensor axis was cut into `split_factor` pieces first, by
    /// mesh axes further right, and each of those pieces along this mesh axis.
    StridedShard {
        /// The tensor axis.
        axis: usize,
        /// Pieces that the mesh axes further right make of it.
        split_factor: u64,
    },
    /// Every rank along the mesh axis holds a term of a sum, or of another reduction. Neither a
    /// save nor a load can use it, as in PyTorch.
    Partial,
}

/// A grid of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    shape: Dims,
    /// The rank at each place, row-major; `None` where the places count the ranks.
    ranks: Option<Vec<Rank>>,
}

impl DeviceMesh {
    /// A grid of `shape` ranks per axis, numbered in row-major order.
    ///
    /// # Errors
    ///
    /// When an axis is empty or the ranks exceed 32 bits.
    pub fn new(shape: impl Into<Dims>) -> Result<Self, PlanError> {
        let shape = shape.into();
        let ranks = shape.checked_volume().filter(|ranks| *ranks > 0);
        match ranks.and_then(|ranks| Rank::try_from(ranks).ok()) {
            Some(_) => Ok(Self { shape, ranks: None }),
            None => Err(invalid(&format!("a mesh of {shape} ranks"))),
        }
    }

    /// A grid of these ranks, in row-major order: a part of a world, or ranks in another order.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and when the ranks are not as many as places, or one is repeated.
    pub fn of_ranks(shape: impl Into<Dims>, ranks: Vec<Rank>) -> Result<Self, PlanError> {
        let mesh = Self::new(shape)?;
        let distinct: std::collections::BTreeSet<_> = ranks.iter().collect();
        if ranks.len() != mesh.world_size() as usize || distinct.len() != ranks.len() {
            let problem = format!("ranks {ranks:?} in a mesh of {} ranks", mesh.shape);
            return Err(invalid(&problem));
        }
        Ok(Self { ranks: Some(ranks), ..mesh })
    }

    /// Ranks per axis.
    #[must_use]
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.shape.iter().product::<u64>() as u32
    }

    /// The coordinate of a rank in the mesh; `None` outside the mesh.
    #[must_use]
    pub fn coordinate(&self, rank: Rank) -> Option<Dims> {
        let mut rest = match &self.ranks {
            None => u64::from(rank),
            Some(ranks) => ranks.iter().position(|other| *other == rank)? as u64,
        };
        let mut coordinate = Dims::zeros(self.shape.ndim());
        for axis in (0..self.shape.ndim()).rev() {
            coordinate[axis] = rest % self.shape[axis];
            rest /= self.shape[axis];
        }
        (rest == 0).then_some(coordinate)
    }

    /// The rank that stands at a coordinate; `None` outside the mesh.
    #[must_use]
    pub fn rank(&self, coordinate: &[u64]) -> Option<Rank> {
        let inside = coordinate.len() == self.shape.ndim()
            && coordinate.iter().zip(&*self.shape).all(|(at, len)| at < len);
        let fold = |place, (at, len): (&u64, &u64)| place * len + at;
        let place = inside.then(|| coordinate.iter().zip(&*self.shape).fold(0, fold))?;
        match &self.ranks {
            None => Some(place as Rank),
            Some(ranks) => ranks.get(usize::try_from(place).ok()?).copied(),
        }
    }
}

/// The boxes of a tensor of `shape` that the rank at `coordinate` of `mesh` holds, in row-major
/// order; together the ranks hold every element, and equally often.
///
/// It is one box, unless a `_StridedShard` stands without the shards that its split factor
/// means; then it is one per piece. An empty part is one box without elements, which begins at the
/// end of the axis that left nothing (PyTorch's convention, so that all empty shards of a tensor
/// are one chunk).
///
/// Where FSDP2 and TP shard the same axis (`[_StridedShard(0, tp), Shard(0)]`), FSDP2 cuts what
/// TP left to a rank. PyTorch 2.15 computes the box in the other order, which is the same only
/// when TP's piece divides evenly: of 7 rows on a mesh of 3 x 2 it records row 6 for rank (2, 0),
/// but the data is on rank (2, 1), and such checkpoints cannot be loaded. Here it is the box of
/// the data. [`recorded_box`] gives the one that PyTorch records.
///
/// # Errors
///
/// [`PlanError::Placement`] when mesh, coordinate, placements and shape do not fit together.
pub fn local_regions(
    shape: &[u64],
    mesh: &DeviceMesh,
    coordinate: &[u64],
    placements: &[TensorPlacement],
) -> Result<Vec<Region>, PlanError> {
    check(shape, mesh, coordinate, placements)?;
    let mut per_axis = Vec::with_capacity(shape.len());
    for (axis, len) in shape.iter().enumerate() {
        let steps: Vec<Step> = steps(mesh, coordinate, placements, axis);
        let mut pieces = Pieces::whole(*len);
        for step in data_order(&steps).unwrap_or(steps) {
            pieces = pieces.cut(&step)?;
        }
        per_axis.push(pieces.0);
    }
    if per_axis.iter().any(Vec::is_empty) {
        return Ok(vec![bounding(shape, &per_axis)?]);
    }
    let mut regions = vec![(Vec::new(), Vec::new())];
    for pieces in per_axis {
        if regions.len().saturating_mul(pieces.len()) as u64 > MAX_PIECES {
            return Err(invalid("a rank holds too many pieces of one tensor"));
        }
        let longer = |(offsets, sizes): &(Vec<u64>, Vec<u64>)| {
            let (offsets, sizes) = (offsets.clone(), sizes.clone());
            pieces.clone().into_iter().map(move |(start, len)| {
                ([&*offsets, &[start]].concat(), [&*sizes, &[len]].concat())
            })
        };
        regions = regions.iter().flat_map(longer).collect();
    }
    regions.into_iter().map(|(offsets, sizes)| region(offsets, sizes)).collect()
}

/// The box that PyTorch 2.15 records for a rank
/// (`compute_local_shape_and_global_offset`): as [`local_regions`] where that is one box and the
/// axes divide evenly, and otherwise first index and number of indices, whether or not they are
/// consecutive and the data is there.
///
/// # Errors
///
/// As [`local_regions`].
pub fn recorded_box(
    shape: &[u64],
    mesh: &DeviceMesh,
    coordinate: &[u64],
    placements: &[TensorPlacement],
) -> Result<Region, PlanError> {
    check(shape, mesh, coordinate, placements)?;
    let mut per_axis = Vec::with_capacity(shape.len());
    for (axis, len) in shape.iter().enumerate() {
        let mut pieces = Pieces::whole(*len);
        for step in steps(mesh, coordinate, placements, axis) {
            pieces = pieces.cut(&step)?;
        }
        per_axis.push(pieces.0);
    }
    bounding(shape, &per_axis)
}

/// The region that `part` of `parts` ranks holds of a tensor cut along `axis`, by the rule of
/// [`TensorPlacement::Shard`]; `None` for ranks behind the end, which hold no shard.
///
/// Along axis 0 these are the shards of FSDP1 and of PyTorch's `ChunkShardingSpec`.
#[must_use]
pub fn chunk_along(shape: &[u64], axis: usize, parts: u32, part: Rank) -> Option<Region> {
    let len = *shape.get(axis)?;
    let step = Step { parts: parts.into(), part: part.into(), split_factor: None };
    let (start, end) = step.bounds(len);
    let (mut offsets, mut sizes) = (Dims::zeros(shape.len()), Dims::from(shape));
    offsets[axis] = start;
    sizes[axis] = end - start;
    (start < end).then(|| Region::new(offsets, sizes).ok()).flatten()
}

/// The axis along which a tensor is best cut into many parts: the longest, the first of equals.
/// `None` without axes.
#[must_use]
pub fn longest_axis(shape: &[u64]) -> Option<usize> {
    let longest = shape.iter().max()?;
    shape.iter().position(|len| len == longest)
}

fn invalid(problem: &str) -> PlanError {
    PlanError::Placement { problem: problem.to_owned() }
}

fn check(
    shape: &[u64],
    mesh: &DeviceMesh,
    coordinate: &[u64],
    placements: &[TensorPlacement],
) -> Result<(), PlanError> {
    if mesh.rank(coordinate).is_none() {
        let problem = format!("coordinate {coordinate:?} of a mesh of {}", mesh.shape());
        return Err(invalid(&problem));
    }
    if placements.len() != mesh.shape().ndim() {
        let (given, axes) = (placements.len(), mesh.shape().ndim());
        return Err(invalid(&format!("{given} placements on a mesh of {axes} axes")));
    }
    for placement in placements {
        let (axis, factor) = match placement {
            TensorPlacement::Replicate => continue,
            TensorPlacement::Partial => {
                return Err(invalid("a partial placement; reduce the tensor first"));
            }
            TensorPlacement::Shard(axis) => (*axis, 1),
            TensorPlacement::StridedShard { axis, split_factor } => (*axis, *split_factor),
        };
        if axis >= shape.len() || factor == 0 {
            let problem = format!("{placement:?} of a tensor of {} axes", shape.len());
            return Err(invalid(&problem));
        }
    }
    Ok(())
}

/// One cut of an axis.
#[derive(Clone, Copy, Debug)]
struct Step {
    parts: u64,
    part: u64,
    split_factor: Option<u64>,
}

impl Step {
    /// The indices of this part out of `len`.
    fn bounds(&self, len: u64) -> (u64, u64) {
        let each = len.div_ceil(self.parts.max(1));
        let start = each.saturating_mul(self.part).min(len);
        (start, start.saturating_add(each).min(len))
    }
}

/// The cuts of one axis, in the order of the mesh.
fn steps(
    mesh: &DeviceMesh,
    coordinate: &[u64],
    placements: &[TensorPlacement],
    axis: usize,
) -> Vec<Step> {
    let places = mesh.shape().iter().zip(coordinate).zip(placements);
    let cuts = places.filter_map(|((parts, part), placement)| {
        let split_factor = match placement {
            TensorPlacement::Shard(of) if *of == axis => None,
            TensorPlacement::StridedShard { axis: of, split_factor } if *of == axis => {
                Some(*split_factor)
            }
            _ => return None,
        };
        Some(Step { parts: *parts, part: *part, split_factor })
    });
    cuts.collect()
}

/// The order in which the cuts were really made: a strided one after all to its right. `None`
/// unless every split factor is the number of pieces that those make.
fn data_order(steps: &[Step]) -> Option<Vec<Step>> {
    let Some((first, rest)) = steps.split_first() else { return Some(Vec::new()) };
    let rest_order = data_order(rest)?;
    let plain = Step { split_factor: None, ..*first };
    match first.split_factor {
        None => Some([vec![plain], rest_order].concat()),
        Some(factor) => {
            let pieces = rest.iter().try_fold(1_u64, |all, step| all.checked_mul(step.parts));
            (pieces == Some(factor)).then(|| [rest_order, vec![plain]].concat())
        }
    }
}

/// Ascending indices of an axis: start and length of each run.
struct Pieces(Vec<(u64, u64)>);

impl Pieces {
    fn whole(len: u64) -> Self {
        Self(if len == 0 { Vec::new() } else { vec![(0, len)] })
    }

    fn len(&self) -> u64 {
        self.0.iter().map(|(_, len)| len).sum()
    }

    fn cut(&self, step: &Step) -> Result<Self, PlanError> {
        let len = self.len();
        let each = len.div_ceil(step.split_factor.unwrap_or(1)).max(1);
        if len.div_ceil(each).saturating_mul(self.0.len() as u64) > MAX_PIECES {
            return Err(invalid("a strided shard of too many pieces"));
        }
        let mut kept = Self(Vec::new());
        let mut from = 0;
        while from < len {
            let (start, end) = step.bounds(each.min(len - from));
            self.copy(from + start, from + end, &mut kept);
            from += each;
        }
        Ok(kept)
    }

    /// Appends the indices from the `from`-th to the `to`-th; neighbors merge.
    fn copy(&self, from: u64, to: u64, into: &mut Self) {
        let mut passed = 0;
        for (start, len) in &self.0 {
            let (low, high) = (from.max(passed), to.min(passed + len));
            if low < high {
                let (start, len) = (start + (low - passed), high - low);
                match into.0.last_mut() {
                    Some(last) if last.0 + last.1 == start => last.1 += len,
                    _ => into.0.push((start, len)),
                }
            }
            passed += len;
        }
    }
}

/// First index and number of indices on each axis; an empty axis begins at its end.
fn bounding(shape: &[u64], per_axis: &[Vec<(u64, u64)>]) -> Result<Region, PlanError> {
    let first = |(pieces, len): (&Vec<(u64, u64)>, &u64)| pieces.first().map_or(*len, |p| p.0);
    let offsets: Vec<u64> = per_axis.iter().zip(shape).map(first).collect();
    let total = |pieces: &Vec<(u64, u64)>| pieces.iter().map(|(_, len)| len).sum();
    region(offsets, per_axis.iter().map(total).collect())
}

fn region(offsets: Vec<u64>, sizes: Vec<u64>) -> Result<Region, PlanError> {
    Region::new(offsets, sizes).map_err(|error| invalid(&error.to_string()))
}
