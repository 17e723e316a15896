//! Whether the chunks of a stored tensor can be right.

use std::collections::HashSet;

use dcp_core::{Region, TensorEntry};

/// Pairs of chunks compared before the search for an overlap is given up. Real shardings are
/// grids, where the sweep below compares little more than neighbors.
const COMPARISONS_MAX: usize = 1 << 24;

/// Checks that every chunk lies inside and no two share an element; returns what is odd but
/// harmless to what there is.
pub(super) fn check(tensor: &TensorEntry) -> Result<Option<String>, String> {
    let whole = Region::full(tensor.shape.clone()).map_err(|error| error.to_string())?;
    tensor.byte_len().ok_or("it has more than 2^64 bytes")?;
    let mut regions = Vec::with_capacity(tensor.chunks.len());
    let mut held = 0_u64;
    for chunk in tensor.chunks.iter() {
        let region = chunk.region().map_err(|error| error.to_string())?;
        if !whole.contains(&region) {
            return Err(format!("chunk {region} lies outside of shape {}", tensor.shape));
        }
        held = held.saturating_add(region.volume());
        if !region.is_empty() {
            regions.push(region);
        }
    }
    let complete = overlap_free(&mut regions)?;
    if held < whole.volume() {
        return Ok(Some(format!("its chunks hold {held} of {} elements", whole.volume())));
    }
    Ok((!complete).then(|| "it has too many chunks to look for overlaps".to_owned()))
}

/// Sweeps along the axis with the most distinct starts. `false` when it gave up.
fn overlap_free(regions: &mut [Region]) -> Result<bool, String> {
    let Some(ndim) = regions.first().map(Region::ndim).filter(|_| regions.len() > 1) else {
        return Ok(true);
    };
    let starts = |axis: usize| {
        regions.iter().map(|region| region.offsets()[axis]).collect::<HashSet<_>>().len()
    };
    let Some(axis) = (0..ndim).max_by_key(|axis| (starts(*axis), std::cmp::Reverse(*axis))) else {
        return Err("it has no axes but several chunks".into());
    };
    regions
        .sort_unstable_by(|a, b| a.offsets()[axis].cmp(&b.offsets()[axis]).then_with(|| a.cmp(b)));
    let mut active: Vec<&Region> = Vec::new();
    let mut comparisons = 0_usize;
    for region in &*regions {
        active.retain(|other| other.end(axis) > region.offsets()[axis]);
        comparisons = comparisons.saturating_add(active.len());
        if comparisons > COMPARISONS_MAX {
            return Ok(false);
        }
        if let Some(other) = active.iter().find(|other| other.intersect(region).is_some()) {
            return Err(format!("chunks {other} and {region} overlap"));
        }
        active.push(region);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    fn tensor(shape: &[u64], chunks: &[(&[u64], &[u64])]) -> TensorEntry {
        let mut tensor = TensorEntry::new(DType::Float32, shape);
        for (offsets, sizes) in chunks {
            tensor.chunks.push(offsets, sizes, None).unwrap();
        }
        tensor
    }

    #[test]
    fn grids_holes_and_overlaps() {
        let halves: &[(&[u64], &[u64])] = &[(&[0, 0], &[2, 3]), (&[2, 0], &[2, 3])];
        assert_eq!(check(&tensor(&[4, 3], halves)), Ok(None));
        assert!(check(&tensor(&[5, 3], halves)).unwrap().unwrap().contains("12 of 15"));
        assert!(check(&tensor(&[3, 3], halves)).unwrap_err().contains("outside"));
        let twice = check(&tensor(&[4, 4], &[(&[0, 0], &[2, 2]), (&[1, 1], &[2, 2])]));
        assert!(twice.unwrap_err().contains("overlap"));
        let empty: &[(&[u64], &[u64])] = &[(&[0, 0], &[4, 3]), (&[4, 0], &[0, 3])];
        assert_eq!(check(&tensor(&[4, 3], empty)), Ok(None));
        assert!(check(&tensor(&[], &[(&[], &[]), (&[], &[])])).is_err());
        assert!(check(&tensor(&[9], &[(&[u64::MAX], &[2])])).is_err());
    }

    #[test]
    fn many_rows_are_swept_along_the_axis_they_differ_in() {
        let mut grid = TensorEntry::new(DType::UInt8, [50_000, 1 << 20]);
        for row in 0..50_000 {
            grid.chunks.push(&[row, 0], &[1, 1 << 20], None).unwrap();
        }
        assert_eq!(check(&grid), Ok(None));
    }
}
