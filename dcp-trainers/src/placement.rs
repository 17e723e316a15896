//! The region of a tensor that one rank has, by mesh and placements.
//!
//! The range of each axis of the tensor begins whole. Each axis of the mesh that shards cuts the range that the ones before
//! it left, as `torch.chunk` does: chunks of `ceil(size / ranks)`, the last of them short or empty. Axes cut in
//! the order of the mesh, or in that of `shard_order`; a strided shard cuts after the plain ones, which is what
//! its split factor says. The alternative, to derive regions from the sizes of local tensors, fails for empty shards and
//! for equal copies.

use dcp_core::{Dims, Region};
use dcp_formats::torch_save::{MeshPlacement, RankMesh};

/// The region that the rank at the mesh's own coordinate has.
///
/// # Errors
///
/// The reason that there is none.
pub(crate) fn region_of(
    shape: &Dims,
    mesh: &RankMesh,
    placements: &[MeshPlacement],
    order: Option<&[usize]>,
) -> Result<Region, String> {
    let coordinate = mesh.coordinate.as_deref().unwrap_or_default();
    if coordinate.len() != mesh.shape.len() || placements.len() != mesh.shape.len() {
        return Err("the rank has no place in its mesh".to_owned());
    }
    let mut axes: Vec<usize> = (0..placements.len()).collect();
    let place = |axis: usize| order.and_then(|order| order.iter().position(|at| *at == axis));
    let is_strided =
        |axis: usize| matches!(placements.get(axis), Some(MeshPlacement::StridedShard { .. }));
    axes.sort_by_key(|axis| (is_strided(*axis), place(*axis).unwrap_or(*axis)));
    let mut ranges: Vec<(u64, u64)> = shape.iter().map(|size| (0, *size)).collect();
    for axis in axes {
        let (Some(placement), Some(parts), Some(at)) =
            (placements.get(axis), mesh.shape.get(axis), coordinate.get(axis))
        else {
            continue;
        };
        let dim = match placement {
            MeshPlacement::Replicate => continue,
            MeshPlacement::Shard { dim } => *dim,
            MeshPlacement::StridedShard { dim, split } => {
                let before = split_before(*dim, mesh, placements);
                if before != *split {
                    return Err(format!(
                        "its strided shard has the split factor {split}, and the other axes of the mesh \
                         cut axis {dim} into {before}"
                    ));
                }
                *dim
            }
            _ => {
                return Err("it is placed as partial sums, which are no state; redistribute it \
                            before the save"
                    .to_owned());
            }
        };
        let axes = shape.ndim();
        let Some((start, end)) = ranges.get_mut(dim) else {
            return Err(format!("it is cut along axis {dim}, and has {axes} axes"));
        };
        let len = end.saturating_sub(*start);
        let chunk = len.div_ceil((*parts).max(1));
        let from = chunk.saturating_mul(*at).min(len);
        let to = from.saturating_add(chunk).min(len);
        (*start, *end) = (start.saturating_add(from), start.saturating_add(to));
    }
    Region::of_ranges(ranges.into_iter().map(|(start, end)| start..end))
        .map_err(|error| error.to_string())
}

/// The number of parts into which plain shards cut an axis.
fn split_before(dim: usize, mesh: &RankMesh, placements: &[MeshPlacement]) -> u64 {
    let cuts = placements.iter().zip(&mesh.shape).filter(
        |(placement, _)| matches!(placement, MeshPlacement::Shard { dim: of } if *of == dim),
    );
    cuts.fold(1, |all: u64, (_, size)| all.saturating_mul(*size))
}

/// The number of a rank among those that have different parts, and whether it is the first of those with equal ones.
pub(crate) fn shard_number(mesh: &RankMesh, placements: &[MeshPlacement]) -> (u64, bool) {
    let (mut number, mut is_first) = (0_u64, true);
    let coordinate = mesh.coordinate.as_deref().unwrap_or_default();
    for ((placement, size), at) in placements.iter().zip(&mesh.shape).zip(coordinate) {
        match placement {
            MeshPlacement::Replicate => is_first &= *at == 0,
            _ => number = number.saturating_mul(*size).saturating_add(*at),
        }
    }
    (number, is_first)
}
