//! Assigns the parts of a new checkpoint to ranks.

use std::fmt;

use dcp_core::digest::fnv1a_128;
use dcp_core::metadata::TensorEntry;
use dcp_core::region::RegionError;
use dcp_core::{CheckpointMetadata, Region};

use crate::error::JobError;

/// Assigns the parts of a checkpoint that [`divide`](crate::reshard::divide()) writes to ranks.
pub trait Division: fmt::Debug + Send + Sync {
    /// The number of ranks.
    fn ranks(&self) -> u32;

    /// The parts of a tensor, and the ranks that hold them. One of the ranks that hold a part
    /// writes it.
    ///
    /// # Errors
    ///
    /// When the tensor cannot be divided.
    fn tensor(&self, fqn: &str, tensor: &TensorEntry) -> Result<Held, JobError>;

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
    pub fn whole(rank: u32, tensor: &TensorEntry) -> Result<Self, JobError> {
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

impl FirstAxis {
    /// The number of chunks into which the tensors of a checkpoint are cut.
    pub(crate) fn chunk_count(&self, metadata: &CheckpointMetadata) -> Result<u64, JobError> {
        let tensors = metadata.iter().filter_map(|(_, entry)| entry.as_tensor());
        tensors
            .map(|tensor| Ok(Cut::of(&full(tensor)?, self.ranks).map_or(1, |cut| cut.chunks())))
            .try_fold(0, |sum: u64, chunks: Result<u64, JobError>| Ok(sum.saturating_add(chunks?)))
    }
}

impl Division for FirstAxis {
    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn tensor(&self, fqn: &str, tensor: &TensorEntry) -> Result<Held, JobError> {
        let whole = full(tensor)?;
        let Some(cut) = Cut::of(&whole, self.ranks) else {
            let parts = candidates(fqn, self.ranks).map(|rank| (rank, whole.clone())).collect();
            return Ok(Held { sharded: false, parts });
        };
        let parts = (0..self.ranks).take_while(|rank| u64::from(*rank) < cut.chunks());
        let parts = parts.map(|rank| Ok((rank, cut.chunk(&whole, rank)?)));
        Ok(Held { sharded: true, parts: parts.collect::<Result<_, JobError>>()? })
    }

    fn object(&self, _fqn: &str) -> Owner {
        Owner::Anybody
    }

    fn is_nested(&self) -> bool {
        true
    }
}

/// The ranks among which the writer of something undivided is chosen, so that all get a like number
/// of bytes: a few that the name determines, because a plan has an item for each of them.
pub(crate) fn candidates(fqn: &str, ranks: u32) -> impl Iterator<Item = u32> + use<> {
    const MOST: u32 = 16;
    let (count, step) = (ranks.min(MOST), (ranks / MOST).max(1));
    let first = fnv1a_128(fqn.as_bytes()) % u128::from(ranks.max(1));
    // Less than the number of ranks.
    let first = if ranks > MOST { u32::try_from(first).unwrap_or(0) } else { 0 };
    (0..count).map(move |n| {
        let rank = u64::from(first) + u64::from(n) * u64::from(step);
        u32::try_from(rank % u64::from(ranks.max(1))).unwrap_or(0)
    })
}

/// The cut of a tensor: by the rule of `torch.chunk`, in which all chunks but the last have one
/// length. There may be fewer chunks than ranks, and none is empty.
struct Cut {
    axis: usize,
    /// The length of the tensor along the axis.
    len: u64,
    each: u64,
}

impl Cut {
    /// `None` for a tensor that stays whole.
    fn of(whole: &Region, ranks: u32) -> Option<Self> {
        let ranks = u64::from(ranks);
        if whole.volume() < ranks || ranks <= 1 {
            return None;
        }
        let longest = (0..whole.ndim()).max_by_key(|axis| (whole.end(*axis), whole.ndim() - axis));
        let axis = if whole.end(0) >= ranks { 0 } else { longest.unwrap_or(0) };
        let len = whole.end(axis);
        Some(Self { axis, len, each: len.div_ceil(ranks).max(1) })
    }

    fn chunks(&self) -> u64 {
        self.len.div_ceil(self.each)
    }

    fn chunk(&self, whole: &Region, number: u32) -> Result<Region, JobError> {
        let start = self.each.saturating_mul(number.into()).min(self.len);
        let (mut offsets, mut sizes) = (whole.offsets().clone(), whole.sizes().clone());
        offsets[self.axis] = start;
        sizes[self.axis] = self.each.min(self.len - start);
        Region::new(offsets, sizes).map_err(bad_region)
    }
}

fn full(tensor: &TensorEntry) -> Result<Region, JobError> {
    Region::full(tensor.shape.clone()).map_err(bad_region)
}

fn bad_region(error: RegionError) -> JobError {
    dcp_core::PlanError::from(error).into()
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::Entry;

    use super::*;

    fn shards(shape: &[u64], ranks: u32) -> (bool, Vec<(u32, String)>) {
        let tensor = TensorEntry::new(DType::Float32, shape);
        let held = FirstAxis { ranks }.tensor("w", &tensor).unwrap();
        let parts = held.parts.iter().map(|(rank, region)| (*rank, region.to_string()));
        (held.sharded, parts.collect())
    }

    #[test]
    fn tensors_are_cut_as_fsdp2_cuts_them() {
        let cut = |shape: &[u64], ranks, expected: &[&str]| {
            let expected = (0..).zip(expected).map(|(rank, region)| (rank, (*region).to_owned()));
            assert_eq!(shards(shape, ranks), (true, expected.collect()));
        };
        cut(&[5, 2], 2, &["[0:3, 0:2]", "[3:5, 0:2]"]);
        // FSDP2 leaves the last ranks nothing, and an index has no row for that.
        cut(&[5], 4, &["[0:2]", "[2:4]", "[4:5]"]);
        cut(&[2, 6], 3, &["[0:2, 0:2]", "[0:2, 2:4]", "[0:2, 4:6]"]);
        cut(&[2, 2], 3, &["[0:1, 0:2]", "[1:2, 0:2]"]);
    }

    #[test]
    fn small_tensors_stay_whole() {
        let by = |text: &str, ranks| (false, (0..ranks).map(|rank| (rank, text.into())).collect());
        assert_eq!(shards(&[], 2), by("[]", 2));
        assert_eq!(shards(&[0, 4], 2), by("[0:0, 0:4]", 2));
        assert_eq!(shards(&[3], 4), by("[0:3]", 4));
    }

    #[test]
    fn few_of_many_ranks_may_write_what_is_undivided() {
        for ranks in [1, 16, 17, 4000, u32::MAX] {
            let mut found: Vec<u32> = candidates("layers.0.norm", ranks).collect();
            found.sort_unstable();
            found.dedup();
            assert_eq!(found.len(), ranks.min(16) as usize, "{ranks}");
            assert!(found.iter().all(|rank| *rank < ranks), "{ranks}");
        }
        let first = |name: &str| candidates(name, 4000).next();
        assert_ne!(first("layers.0.norm"), first("layers.1.norm"));
        assert_eq!(shards(&[3], 4000).1.len(), 16);
    }

    #[test]
    fn chunks_are_counted_before_they_are_planned() {
        let mut metadata = CheckpointMetadata::new();
        let tensors: [(&str, &[u64]); 4] =
            [("a", &[5]), ("b", &[2, 6]), ("c", &[]), ("d", &[9, 2])];
        for (name, shape) in tensors {
            metadata.insert(name, Entry::Tensor(TensorEntry::new(DType::Float32, shape)));
        }
        for ranks in [1, 2, 4, 5, 4000] {
            let division = FirstAxis { ranks };
            let planned = metadata.iter().filter_map(|(fqn, entry)| {
                let held = division.tensor(fqn, entry.as_tensor()?).unwrap();
                Some(if held.sharded { held.parts.len() as u64 } else { 1 })
            });
            assert_eq!(division.chunk_count(&metadata).unwrap(), planned.sum::<u64>(), "{ranks}");
        }
    }
}
