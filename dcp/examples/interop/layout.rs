//! Placements of a rank's share of a tensor: layouts that PyTorch has, and ones that it has not.

use dcp::{DType, Region, Shard, Tensor};

use crate::Result;

/// The boxes of one rank in the layout of this name; `None` when every rank holds everything.
pub(crate) fn by_name(
    name: &str,
    shape: &[u64],
    rank: u32,
    world: u32,
) -> Result<Option<Vec<Region>>> {
    let (rank, world) = (u64::from(rank), u64::from(world));
    let all = || Ok::<_, Box<dyn std::error::Error>>(vec![Region::full(shape)?]);
    let regions = match name {
        "replicated" => return Ok(None),
        "last" if rank + 1 == world => all()?,
        "last" => Vec::new(),
        "cyclic" => {
            let rows = shape.first().copied().unwrap_or(0);
            (rank..rows)
                .step_by(usize::try_from(world)?)
                .map(|row| part(shape, &[(0, row, row + 1)]))
                .collect::<Result<_>>()?
        }
        "grid" if world == 1 => all()?,
        "grid" => {
            // The first rank has the upper third, the others share the rows below by columns.
            let [rows, columns, ..] = *shape else { return Err("a grid of one axis".into()) };
            let third = rows.div_ceil(3);
            vec![if rank == 0 {
                part(shape, &[(0, 0, third)])?
            } else {
                let (begin, end) = even(columns, rank - 1, world - 1);
                part(shape, &[(0, third, rows), (1, begin, end)])?
            }]
        }
        _ => {
            let axis =
                name.strip_prefix("shard").ok_or_else(|| format!("unknown layout {name}"))?;
            let axis: usize = axis.parse()?;
            let size = *shape.get(axis).ok_or("a layout along an axis that is not there")?;
            let (begin, end) = even(size, rank, world);
            vec![part(shape, &[(axis, begin, end)])?]
        }
    };
    Ok(Some(regions))
}

/// A layout for the `number`-th tensor of a checkpoint, so that all are tried on many shapes.
pub(crate) fn any(
    number: usize,
    shape: &[u64],
    rank: u32,
    world: u32,
) -> Result<Option<Vec<Region>>> {
    let last = format!("shard{}", shape.len().saturating_sub(1));
    let name = match (number % 5, shape.len()) {
        (_, 0) | (0, _) => "replicated",
        (1, _) => "shard0",
        (2, _) => &last,
        (3, 1) | (4, _) => "cyclic",
        _ => "grid",
    };
    by_name(name, shape, rank, world)
}

/// A sharded tensor with these boxes of `whole`.
pub(crate) fn cut(
    dtype: DType,
    shape: &[u64],
    whole: &[u8],
    regions: Vec<Region>,
) -> Result<Tensor> {
    let shards = regions
        .into_iter()
        .map(|region| {
            let bytes = bytes_of(dtype, shape, whole, &region)?;
            Ok(Shard::new(dtype, region, bytes)?)
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Tensor::sharded(dtype, shape, shards)?)
}

/// The bytes of a box, in row-major order.
pub(crate) fn bytes_of(
    dtype: DType,
    shape: &[u64],
    whole: &[u8],
    region: &Region,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (first, count) in region.runs_in(shape) {
        let begin = usize::try_from(first)? * dtype.size();
        let run = begin..begin + usize::try_from(count)? * dtype.size();
        bytes.extend_from_slice(whole.get(run).ok_or("fewer bytes than the shape calls for")?);
    }
    Ok(bytes)
}

/// DTensor's Shard: equal parts, the last ones shorter or empty.
fn even(size: u64, rank: u64, world: u64) -> (u64, u64) {
    let part = size.div_ceil(world);
    ((rank * part).min(size), ((rank + 1) * part).min(size))
}

/// All of `shape` but for the axes given with begin and end.
fn part(shape: &[u64], cuts: &[(usize, u64, u64)]) -> Result<Region> {
    let mut offsets = vec![0; shape.len()];
    let mut sizes = shape.to_vec();
    for &(axis, begin, end) in cuts {
        let (Some(offset), Some(size)) = (offsets.get_mut(axis), sizes.get_mut(axis)) else {
            return Err("a cut along an axis that is not there".into());
        };
        (*offset, *size) = (begin, end - begin);
    }
    Ok(Region::new(offsets, sizes)?)
}
