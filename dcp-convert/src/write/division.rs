//! Assigns the parts of a new checkpoint to ranks.

use std::fmt;

use dcp_core::Region;
use dcp_core::metadata::TensorEntry;
use dcp_core::region::RegionError;

use crate::error::ConvertError;

/// Assigns the parts of a checkpoint that [`divide`](crate::divide()) writes to ranks.
pub trait Division: fmt::Debug + Send + Sync {
    /// The number of ranks.
    fn ranks(&self) -> u32;

    /// The parts of a tensor, and the ranks that hold them. One of the ranks that hold a part
    /// writes it.
    ///
    /// # Errors
    ///
    /// When the tensor cannot be divided.
    fn tensor(&self, fqn: &str, tensor: &TensorEntry) -> Result<Held, ConvertError>;

    /// The rank that writes an object.
    fn object(&self, fqn: &str) -> Owner;

    /// Whether the new checkpoint records how its keys nest, if the old one did.
    fn is_nested(&self) -> bool;
}

/// The parts of a tensor, and their ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Whether ranks hold different parts.
    pub sharded: bool,
    /// Ranks and boxes. The boxes cover the whole tensor.
    pub parts: Vec<(u32, Region)>,
}

impl Held {
    /// The whole tensor, held by one rank.
    ///
    /// # Errors
    ///
    /// When the tensor has more than 2^64 elements.
    pub fn whole(rank: u32, tensor: &TensorEntry) -> Result<Self, ConvertError> {
        Ok(Self { sharded: false, parts: vec![(rank, full(tensor)?)] })
    }
}

/// The rank that writes an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Owner {
    /// The rank with the least to write.
    Anybody,
    /// This rank.
    Rank(u32),
    /// None: the object is left out.
    Nobody,
}

/// Divides every tensor along its first axis, as FSDP2 does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstAxis {
    pub(crate) ranks: u32,
}

impl Division for FirstAxis {
    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn tensor(&self, _fqn: &str, tensor: &TensorEntry) -> Result<Held, ConvertError> {
        let mut held = Held::default();
        for rank in 0..self.ranks {
            let (sharded, region) = shard(tensor, rank, self.ranks)?;
            held.sharded = sharded;
            held.parts.push((rank, region));
        }
        Ok(held)
    }

    fn object(&self, _fqn: &str) -> Owner {
        Owner::Anybody
    }

    fn is_nested(&self) -> bool {
        true
    }
}

/// The part of a tensor that `rank` holds, and whether the parts of ranks differ.
fn shard(tensor: &TensorEntry, rank: u32, ranks: u32) -> Result<(bool, Region), ConvertError> {
    let whole = full(tensor)?;
    let (rank, ranks) = (u64::from(rank), u64::from(ranks));
    if whole.volume() < ranks || ranks == 1 {
        return Ok((false, whole));
    }
    let longest = (0..whole.ndim()).max_by_key(|axis| (whole.end(*axis), whole.ndim() - axis));
    let axis = if whole.end(0) >= ranks { 0 } else { longest.unwrap_or(0) };
    let len = whole.end(axis);
    // The rule of `torch.chunk`: all chunks but the last have this length.
    let each = len.div_ceil(ranks);
    let start = each.saturating_mul(rank).min(len);
    let (mut offsets, mut sizes) = (whole.offsets().clone(), whole.sizes().clone());
    offsets[axis] = start;
    sizes[axis] = each.min(len - start);
    Ok((true, Region::new(offsets, sizes).map_err(bad_region)?))
}

fn full(tensor: &TensorEntry) -> Result<Region, ConvertError> {
    Region::full(tensor.shape.clone()).map_err(bad_region)
}

fn bad_region(error: RegionError) -> ConvertError {
    dcp_core::PlanError::from(error).into()
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    fn shards(shape: &[u64], ranks: u32) -> Vec<(bool, String)> {
        let tensor = TensorEntry::new(DType::Float32, shape);
        (0..ranks)
            .map(|rank| shard(&tensor, rank, ranks).unwrap())
            .map(|(sharded, region)| (sharded, region.to_string()))
            .collect()
    }

    #[test]
    fn tensors_are_cut_as_fsdp2_cuts_them() {
        let cut = |shape: &[u64], ranks, expected: &[&str]| {
            let found = shards(shape, ranks);
            assert!(found.iter().all(|(sharded, _)| *sharded));
            let found: Vec<_> = found.iter().map(|(_, region)| region.as_str()).collect();
            assert_eq!(found, expected);
        };
        cut(&[5, 2], 2, &["[0:3, 0:2]", "[3:5, 0:2]"]);
        cut(&[5], 4, &["[0:2]", "[2:4]", "[4:5]", "[5:5]"]);
        cut(&[2, 6], 3, &["[0:2, 0:2]", "[0:2, 2:4]", "[0:2, 4:6]"]);
        cut(&[2, 2], 3, &["[0:1, 0:2]", "[1:2, 0:2]", "[2:2, 0:2]"]);
    }

    #[test]
    fn small_tensors_stay_whole() {
        assert_eq!(shards(&[], 2), vec![(false, "[]".to_owned()); 2]);
        assert_eq!(shards(&[0, 4], 2), vec![(false, "[0:0, 0:4]".to_owned()); 2]);
        assert_eq!(shards(&[3], 4), vec![(false, "[0:3]".to_owned()); 4]);
    }
}
