//! Checks the chunks of a stored tensor.

use dcp_core::Region;
use dcp_core::metadata::TensorEntry;
use dcp_core::overlap::find_overlap;

/// Checks that the chunks of a tensor are inside it and do not overlap. Returns observations that
/// are not errors.
///
/// # Errors
///
/// A description of the problem.
pub fn check_chunks(tensor: &TensorEntry) -> Result<Option<String>, String> {
    let whole = Region::full(tensor.shape.clone()).map_err(|error| error.to_string())?;
    tensor.byte_len().ok_or("it has more than 2^64 bytes")?;
    let mut held = 0_u64;
    let mut rows = Vec::with_capacity(tensor.chunks.len());
    for chunk in tensor.chunks.iter() {
        let region = chunk.region().map_err(|error| error.to_string())?;
        if !whole.contains(&region) {
            return Err(format!("chunk {region} is outside shape {}", tensor.shape));
        }
        held = held.saturating_add(region.volume());
        rows.push((chunk.offsets, chunk.sizes));
    }
    match find_overlap(&rows) {
        Ok(Some((a, b))) => {
            let shown = |index: usize| {
                let region = tensor.chunks.get(index).and_then(|chunk| chunk.region().ok());
                region.unwrap_or_default()
            };
            Err(format!("chunks {} and {} overlap", shown(a.min(b)), shown(a.max(b))))
        }
        Ok(None) if held < whole.volume() => {
            Ok(Some(format!("its chunks hold {held} of {} elements", whole.volume())))
        }
        Ok(None) => Ok(None),
        Err(irregular) => Ok(Some(irregular.to_string())),
    }
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
        assert_eq!(check_chunks(&tensor(&[4, 3], halves)), Ok(None));
        assert!(check_chunks(&tensor(&[5, 3], halves)).unwrap().unwrap().contains("12 of 15"));
        assert!(check_chunks(&tensor(&[3, 3], halves)).unwrap_err().contains("outside"));
        let twice = check_chunks(&tensor(&[4, 4], &[(&[0, 0], &[2, 2]), (&[1, 1], &[2, 2])]));
        assert!(twice.unwrap_err().contains("overlap"));
        let empty: &[(&[u64], &[u64])] = &[(&[0, 0], &[4, 3]), (&[4, 0], &[0, 3])];
        assert_eq!(check_chunks(&tensor(&[4, 3], empty)), Ok(None));
        assert!(check_chunks(&tensor(&[], &[(&[], &[]), (&[], &[])])).is_err());
        assert!(check_chunks(&tensor(&[9], &[(&[u64::MAX], &[2])])).is_err());
    }

    #[test]
    fn large_grids_and_huge_empty_tensors_are_checked() {
        let mut grid = TensorEntry::new(DType::UInt8, [300, 300]);
        for n in 0..90_000 {
            grid.chunks.push(&[n / 300, n % 300], &[1, 1], None).unwrap();
        }
        assert_eq!(check_chunks(&grid), Ok(None));
        grid.chunks.push(&[17, 230], &[1, 1], None).unwrap();
        assert!(check_chunks(&grid).unwrap_err().contains("[17:18, 230:231]"));
        let huge: &[u64] = &[1 << 40, 1 << 40, 0];
        assert_eq!(check_chunks(&tensor(huge, &[(&[0, 0, 0], huge)])), Ok(None));
    }
}
