//! Elements of shards, copied between host memory, devices and other shards in bounded pieces.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::error::CheckpointError;
use dcp_core::memory::LoanError;
use dcp_core::overlap::find_overlap;
use dcp_core::tensor::ShardData;
use dcp_core::{DType, HostMemory, Region, Shard, Tensor, TensorView};
use dcp_engine::device::DeviceElements;
use indexmap::IndexMap;

use crate::error::StateDictError;

/// The most bytes of one copy and of one message, unless a single element has more.
const PIECE_BYTES: u64 = 16 << 20;

/// A box in pieces of at most [`PIECE_BYTES`], in row-major order; none of an empty one.
pub(crate) fn pieces(whole: &Region, dtype: DType) -> impl Iterator<Item = Region> + use<> {
    let most = (PIECE_BYTES / dtype.size().max(1) as u64).max(1);
    let (offsets, sizes) = (whole.offsets().to_vec(), whole.sizes().to_vec());
    let behind =
        |axis: usize| -> u64 { sizes[axis + 1..].iter().fold(1, |n: u64, s| n.saturating_mul(*s)) };
    let is_empty = whole.is_empty();
    let axis = (0..sizes.len()).find(|axis| behind(*axis) <= most);
    let rows = axis.map_or(1, |axis| (most / behind(axis).max(1)).max(1));
    let along = axis.map_or(1, |axis| sizes[axis].div_ceil(rows));
    let before: u64 = sizes[..axis.unwrap_or(0)].iter().product();
    let count = if is_empty { 0 } else { before * along };
    (0..count).filter_map(move |piece| {
        let (mut offsets, mut sizes) = (offsets.clone(), sizes.clone());
        if let Some(axis) = axis {
            let start = (piece % along) * rows;
            offsets[axis] += start;
            sizes[axis] = rows.min(sizes[axis] - start);
            let mut rest = piece / along;
            for outer in (0..axis).rev() {
                offsets[outer] += rest % sizes[outer];
                rest /= sizes[outer];
                sizes[outer] = 1;
            }
        }
        Region::new(offsets, sizes).ok()
    })
}

/// The elements of `region` of the tensor, row-major, which `shard` holds.
pub(crate) async fn read(
    fqn: &str,
    shard: &Shard,
    region: &Region,
) -> Result<Bytes, CheckpointError> {
    let inner = within(fqn, shard, region)?;
    match shard.data() {
        ShardData::Host(view) => {
            let payload = view.narrow(&inner)?.payload();
            Ok(payload.map_err(|source| memory(fqn, source))?.to_bytes())
        }
        ShardData::Device(memory) => {
            let (sizes, memory) = (shard.region().sizes(), Arc::clone(memory));
            let elements = DeviceElements::new(memory, shard.dtype(), &inner, sizes, PIECE_BYTES);
            let len = usize::try_from(elements.byte_len()).unwrap_or(usize::MAX);
            let mut bytes = vec![0; len];
            elements.read_into(fqn, &mut bytes).await?;
            Ok(bytes.into())
        }
        _ => Err(unfit(fqn, "its memory is of an unknown kind")),
    }
}

/// Sets the elements of `region` of the tensor, which `shard` holds.
pub(crate) async fn write(
    fqn: &str,
    shard: &Shard,
    region: &Region,
    bytes: Bytes,
) -> Result<(), CheckpointError> {
    let inner = within(fqn, shard, region)?;
    match shard.data() {
        ShardData::Host(view) => {
            view.narrow(&inner)?.fill_from(&bytes).map_err(|source| memory(fqn, source))
        }
        ShardData::Device(memory) => {
            let (sizes, memory) = (shard.region().sizes(), Arc::clone(memory));
            let elements = DeviceElements::new(memory, shard.dtype(), &inner, sizes, PIECE_BYTES);
            elements.write(fqn, bytes).await
        }
        _ => Err(unfit(fqn, "its memory is of an unknown kind")),
    }
}

/// Sets the elements of `region`, which are `bytes`, in the shards of `target` that hold them.
pub(crate) async fn spread(
    fqn: &str,
    target: &Tensor,
    region: &Region,
    bytes: &Bytes,
) -> Result<(), CheckpointError> {
    for shard in target.shards() {
        let Some(common) = shard.region().intersect(region) else { continue };
        if common.is_empty() {
            continue;
        }
        let part = if common == *region {
            bytes.clone()
        } else {
            let memory = HostMemory::from_bytes(bytes.clone());
            let sizes = region.sizes().clone();
            let view = TensorView::contiguous(memory, target.dtype(), sizes, 0)?;
            let inner = relative(fqn, &common, region)?;
            let part = view.narrow(&inner)?.payload();
            part.map_err(|source| self::memory(fqn, source))?.to_bytes()
        };
        write(fqn, shard, &common, part).await?;
    }
    Ok(())
}

/// A tensor to fill with the layout of `local`: itself, where its memory can be written.
pub(crate) fn destination(local: &Tensor) -> Result<Tensor, CheckpointError> {
    let is_writable = |shard: &Shard| shard.view().is_none_or(|view| !view.memory().is_read_only());
    if local.shards().iter().all(is_writable) {
        return Ok(local.clone());
    }
    Ok(fresh(local)?)
}

fn fresh(like: &Tensor) -> Result<Tensor, dcp_core::error::TensorError> {
    let (dtype, shape) = (like.dtype(), like.shape().clone());
    if !like.is_sharded() {
        return Tensor::zeros(dtype, shape);
    }
    let regions = like.shards().iter().map(|shard| shard.region().clone());
    Tensor::zeros_sharded(dtype, shape, regions)
}

/// The tensor `given`, in the layout and, where it can be written, in the memory of `local`.
pub(crate) async fn fit(
    fqn: &str,
    local: &Tensor,
    given: &Tensor,
) -> Result<Tensor, CheckpointError> {
    if is_same_memory(local, given) {
        return Ok(given.clone());
    }
    check(fqn, local, given.dtype(), given.shape())?;
    let sources = check_cover(fqn, local, given)?;
    let target = destination(local)?;
    for source in sources {
        for piece in pieces(source.region(), given.dtype()) {
            let is_held =
                |shard: &Shard| shard.region().intersect(&piece).is_some_and(|r| !r.is_empty());
            if target.shards().iter().any(is_held) {
                let bytes = read(fqn, source, &piece).await?;
                spread(fqn, &target, &piece, &bytes).await?;
            }
        }
    }
    Ok(target)
}

/// Returns the tensor with its shards in host memory: a copy, if any of them is on a device.
pub(crate) async fn to_host(fqn: &str, tensor: &Tensor) -> Result<Tensor, CheckpointError> {
    if tensor.shards().iter().all(|shard| shard.view().is_some()) {
        return Ok(tensor.clone());
    }
    let target = fresh(tensor)?;
    for (from, to) in tensor.shards().iter().zip(target.shards()) {
        for piece in pieces(from.region(), tensor.dtype()) {
            write(fqn, to, &piece, read(fqn, from, &piece).await?).await?;
        }
    }
    Ok(target)
}

/// The shards of `given` without replicas, if they have all elements of those of `local`.
pub(crate) fn check_cover<'a>(
    fqn: &str,
    local: &Tensor,
    given: &'a Tensor,
) -> Result<Vec<&'a Shard>, CheckpointError> {
    let sources = distinct(fqn, given.shards())?;
    for shard in local.shards() {
        let shares = sources.iter().filter_map(|source| source.region().intersect(shard.region()));
        let held = shares.map(|share| share.volume()).fold(0, u64::saturating_add);
        if held < shard.region().volume() {
            let problem = format!("the state dict lacks elements of {}", shard.region());
            return Err(unfit(fqn, problem));
        }
    }
    Ok(sources)
}

/// Shards that share no element; replicas are left out.
fn distinct<'a>(fqn: &str, shards: &'a [Shard]) -> Result<Vec<&'a Shard>, CheckpointError> {
    let regions: IndexMap<_, _> = shards.iter().map(|shard| (shard.region(), shard)).collect();
    let rows: Vec<_> =
        regions.keys().map(|region| (&**region.offsets(), &**region.sizes())).collect();
    match find_overlap(&rows) {
        Ok(None) => Ok(regions.into_values().collect()),
        Ok(Some((first, second))) => {
            let shown = |at: usize| regions.get_index(at).map(|(region, _)| region.to_string());
            let (first, second) = (shown(first), shown(second));
            let [first, second] = [first, second].map(Option::unwrap_or_default);
            let problem = format!("its shards {first} and {second} share elements");
            Err(unfit(fqn, problem))
        }
        Err(error) => Err(unfit(fqn, error.to_string())),
    }
}

/// Whether both are the same elements in the same memory.
pub(crate) fn is_same_memory(a: &Tensor, b: &Tensor) -> bool {
    let same = |(a, b): (&Shard, &Shard)| match (a.data(), b.data()) {
        (ShardData::Host(a), ShardData::Host(b)) => {
            a.memory().is_same(b.memory()) && a.runs().eq(b.runs())
        }
        (ShardData::Device(a), ShardData::Device(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    (a.dtype(), a.shape(), a.shards().len()) == (b.dtype(), b.shape(), b.shards().len())
        && a.shards().iter().zip(b.shards()).all(same)
}

/// Refuses elements of another dtype or shape than those of `local`.
pub(crate) fn check(
    fqn: &str,
    local: &Tensor,
    dtype: DType,
    shape: &[u64],
) -> Result<(), CheckpointError> {
    if (local.dtype(), &**local.shape()) == (dtype, shape) {
        return Ok(());
    }
    let (own, its) = (local.shape(), dcp_core::Dims::from(shape));
    let problem = format!("it is {} {own}, in the state dict {dtype} {its}", local.dtype());
    Err(unfit(fqn, problem))
}

pub(crate) fn unfit(fqn: &str, problem: impl Into<String>) -> CheckpointError {
    StateDictError::Unfit { fqn: fqn.to_owned(), problem: problem.into() }.into()
}

fn memory(fqn: &str, source: LoanError) -> CheckpointError {
    CheckpointError::Memory { fqn: fqn.to_owned(), source }
}

fn within(fqn: &str, shard: &Shard, region: &Region) -> Result<Region, CheckpointError> {
    relative(fqn, region, shard.region())
}

fn relative(fqn: &str, inner: &Region, outer: &Region) -> Result<Region, CheckpointError> {
    let relative = inner.relative_to(outer.offsets());
    relative.ok_or_else(|| unfit(fqn, format!("{inner} is outside {outer}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_bounded_and_cover_a_box_in_order() {
        let boxes: [&[u64]; 7] =
            [&[], &[0, 5], &[7], &[5, 3000, 1500], &[3, 5_000_000], &[2, 3, 2_100_000], &[9, 1]];
        for sizes in boxes {
            let whole = Region::new(vec![4; sizes.len()], sizes).unwrap();
            let mut next = 0;
            for piece in pieces(&whole, DType::Float64) {
                assert!(piece.volume() * 8 <= PIECE_BYTES && whole.contains(&piece));
                let inner = piece.relative_to(whole.offsets()).unwrap();
                let runs: Vec<_> = inner.runs_in(sizes).collect();
                assert_eq!(runs, [(next, piece.volume())], "{sizes:?} {piece}");
                next += piece.volume();
            }
            assert_eq!(next, whole.volume());
        }
    }
}
