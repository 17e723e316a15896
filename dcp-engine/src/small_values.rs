//! Values that ranks have under one name: small ones are compared, so that state of one rank is not lost
//! in silence.
//!
//! A value without shards is a replica, and one rank writes it for all. Where a rank puts a value of its own
//! under such a name (the state of a random generator, the position of a data loader), the checkpoint holds
//! that of one rank. Plans have no elements, so planners cannot notice it. Comparing everything would read the
//! whole state once more; what is mistaken for a replica in practice is small. So a rank hashes its objects (up
//! to [`HASHED_MAX`] bytes of each) and its whole host tensors of at most as many bytes.
//!
//! An offer carries five bytes ([`Digest`]): two of the names, three of the values, each the sum over all of
//! them, so that the order does not matter. Ranks with the same names and other values make the coordinator
//! request the single hashes, which come with the reports of what was written; so a save in which nothing
//! differs exchanges no more than those five bytes. Digests of ranks with other names cannot be compared. At
//! the first save, and whenever plans are sent, their single hashes are requested too, and the answer names what
//! only one rank has ([`Compared::own`]). Every rank then leaves these out of its next digests, so that keys of
//! single ranks, which are the right way to save such state, do not keep the others from being compared.
//!
//! Single hashes are those of the [`SAMPLE_MAX`] smallest hashes of names: ranks that have a name in common
//! choose alike, and no message grows with the state.

use std::collections::{BTreeMap, HashMap};

use dcp_core::digest::WordHash;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{PlanError, Rank, Tensor};

use crate::packed;
use crate::source::Leaf;
use crate::summary::DifferingValue;

/// Bytes of a value that are hashed; a larger tensor is not compared.
const HASHED_MAX: usize = 64 << 10;
/// Values of a rank whose single hashes are compared.
const SAMPLE_MAX: usize = 1024;
/// Names in a summary, and ranks of each.
const SHOWN_MAX: usize = 16;
/// Names of single ranks that all ranks remember.
const OWN_MAX: usize = 64 << 10;

/// The hashes of a name and of its value.
pub(crate) type Hashed = (u64, u64);

/// A hash of names and one of values, in an offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest {
    pub(crate) names: [u8; 2],
    pub(crate) values: [u8; 3],
}

/// The small values of this rank, by the hash of their name.
#[derive(Debug, Default)]
pub(crate) struct SmallValues(BTreeMap<u64, u64>);

impl SmallValues {
    /// Adds a value, if it is a small one that other ranks may have too.
    pub(crate) fn add(&mut self, fqn: &str, leaf: &Leaf) {
        let hash = match leaf {
            Leaf::Object(bytes) => Some(hash_of(bytes)),
            Leaf::Tensor(tensor, _) => hash_of_tensor(tensor),
        };
        if let Some(hash) = hash {
            self.0.insert(hash_of_name(fqn), hash);
        }
    }

    /// The digest of all values but `own`, which is sorted.
    pub(crate) fn digest(&self, own: &[u64]) -> Digest {
        let shared = self.0.iter().filter(|(name, _)| own.binary_search(name).is_err());
        let (mut names, mut values) = (0_u64, 0_u64);
        for (name, value) in shared {
            names = names.wrapping_add(spread(*name));
            values = values.wrapping_add(spread(spread(*name) ^ *value));
        }
        let ([.., n0, n1], [.., v0, v1, v2]) = (names.to_le_bytes(), values.to_le_bytes());
        Digest { names: [n0, n1], values: [v0, v1, v2] }
    }

    /// The single hashes to compare.
    pub(crate) fn sample(&self) -> Vec<Hashed> {
        self.0.iter().take(SAMPLE_MAX).map(|(name, value)| (*name, *value)).collect()
    }
}

/// A number of which every bit depends on all bits of `n`, by the finalizer of SplitMix64. A digest is some bits of a sum,
/// and the word hashes of short names that differ in a digit are equal in those.
fn spread(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

fn hash_of_name(fqn: &str) -> u64 {
    hash_of(fqn.as_bytes())
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hash = WordHash::new();
    hash.number(bytes.len() as u64);
    hash.bytes(bytes.get(..HASHED_MAX).unwrap_or(bytes));
    hash.finish()
}

/// `None` for parts of tensors, large ones and those on devices. Memory that is lent is an error of the save,
/// which finds it later.
fn hash_of_tensor(tensor: &Tensor) -> Option<u64> {
    let [shard] = tensor.shards() else { return None };
    let is_whole = shard.region().sizes() == tensor.shape();
    if !is_whole || shard.byte_len() > HASHED_MAX as u64 {
        return None;
    }
    Some(hash_of(&shard.view()?.payload().ok()?.to_bytes()))
}

/// The reason for which the coordinator requests single hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Ranks have other values under the same names.
    Values,
    /// Ranks have other names, and it is not known which are those of single ranks.
    Names,
}

/// Whether the coordinator requests single hashes; `known` are the names of single ranks.
pub(crate) fn request(
    digests: impl Iterator<Item = Digest>,
    repeats: bool,
    known: Option<&[u64]>,
) -> Option<Request> {
    let mut by_names = HashMap::new();
    for Digest { names, values } in digests {
        if *by_names.entry(names).or_insert(values) != values {
            return Some(Request::Values);
        }
    }
    let unknown = match known {
        None => by_names.len() > 1,
        // Another plan may have other names, and one of a single rank may have come to others.
        Some(own) => !repeats && (by_names.len() > 1 || !own.is_empty()),
    };
    unknown.then_some(Request::Names)
}

/// The result of comparing the single hashes of all ranks.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Compared {
    pub(crate) differing: Vec<DifferingValue>,
    /// The hashes of names that only one rank has, sorted.
    pub(crate) own: Vec<u64>,
}

/// Compares the single hashes of all ranks, in rank order; `names` are those of the checkpoint.
pub(crate) fn compare<'a>(ranks: &[Vec<Hashed>], names: impl Iterator<Item = &'a str>) -> Compared {
    struct Seen {
        first: u64,
        times: usize,
        others: Vec<Rank>,
    }
    let mut seen = HashMap::<u64, Seen>::new();
    for (rank, hashes) in (0..).zip(ranks) {
        for (name, value) in hashes {
            let one =
                seen.entry(*name).or_insert(Seen { first: *value, times: 0, others: Vec::new() });
            one.times += 1;
            if one.first != *value && one.others.len() < SHOWN_MAX {
                one.others.push(rank);
            }
        }
    }
    let own = seen.iter().filter(|(_, one)| one.times == 1).map(|(name, _)| *name);
    let mut own: Vec<u64> = own.collect();
    own.sort_unstable();
    own.truncate(OWN_MAX);
    seen.retain(|_, one| !one.others.is_empty());
    let mut differing = Vec::new();
    if !seen.is_empty() {
        let shown = |fqn: &str| {
            let ranks = seen.get(&hash_of_name(fqn))?.others.clone();
            Some(DifferingValue { fqn: fqn.to_owned(), ranks })
        };
        differing.extend(names.filter_map(shown));
        differing.sort_unstable_by(|one, other| one.fqn.cmp(&other.fqn));
        differing.truncate(SHOWN_MAX);
    }
    Compared { differing, own }
}

/// Says which values differ.
pub(crate) fn warn(differing: &[DifferingValue], request: Request) {
    for DifferingValue { fqn, ranks } in differing {
        tracing::warn!(
            fqn,
            ?ranks,
            "these ranks have another value than the first rank under this name, and the checkpoint holds \
             that of one rank; save what a rank has for itself under a name with its rank"
        );
    }
    if differing.is_empty() && request == Request::Values {
        tracing::warn!(
            compared = SAMPLE_MAX,
            "ranks have different values under one name, which is not among those compared by name; the \
             checkpoint holds that of one rank"
        );
    }
}

impl Digest {
    pub(crate) fn write_to(self, out: &mut MessageWriter) {
        let ([n0, n1], [v0, v1, v2]) = (self.names, self.values);
        out.bytes(&[n0, n1, v0, v1, v2]);
    }

    pub(crate) fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let [n0, n1, v0, v1, v2] = packed::array(input)?;
        Ok(Self { names: [n0, n1], values: [v0, v1, v2] })
    }
}

/// Writes pairs of hashes, in 16 bytes each.
pub(crate) fn put_hashes(out: &mut MessageWriter, hashes: &[Hashed]) {
    let pair = |(name, value): &Hashed| [name.to_le_bytes(), value.to_le_bytes()].concat();
    out.bytes(&hashes.iter().flat_map(pair).collect::<Vec<u8>>());
}

pub(crate) fn hashes(input: &mut MessageReader<'_>) -> Result<Vec<Hashed>, PlanError> {
    let numbers = numbers(input)?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(packed::bad("the hash of a name without that of its value"));
    }
    Ok(pairs.iter().map(|[name, value]| (*name, *value)).collect())
}

fn numbers(input: &mut MessageReader<'_>) -> Result<Vec<u64>, PlanError> {
    let (numbers, rest) = input.bytes()?.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(packed::bad("hashes that end too early"));
    }
    Ok(numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

impl Compared {
    pub(crate) fn write_to(&self, out: &mut MessageWriter) {
        out.number(self.differing.len() as u64);
        for DifferingValue { fqn, ranks } in &self.differing {
            out.text(fqn);
            out.number(ranks.len() as u64);
            ranks.iter().for_each(|rank| out.number((*rank).into()));
        }
        out.bytes(&self.own.iter().flat_map(|name| name.to_le_bytes()).collect::<Vec<u8>>());
    }

    pub(crate) fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        let count = input.count()?;
        let mut compared = Self::default();
        for _ in 0..count {
            let fqn = input.text()?.to_owned();
            let count = input.count()?;
            let ranks = (0..count).map(|_| packed::rank(input)).collect::<Result<_, _>>()?;
            compared.differing.push(DifferingValue { fqn, ranks });
        }
        compared.own = numbers(input)?;
        Ok(compared)
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::{DType, Region};

    use super::*;

    fn values(of: &[(&str, &[u8])]) -> SmallValues {
        let mut values = SmallValues::default();
        for (fqn, bytes) in of {
            values.add(fqn, &Leaf::Object(bytes.to_vec().into()));
        }
        values
    }

    fn compared(ranks: &[&SmallValues], names: &[&str]) -> Compared {
        let samples: Vec<_> = ranks.iter().map(|values| values.sample()).collect();
        compare(&samples, names.iter().copied())
    }

    #[test]
    fn parts_of_tensors_and_large_ones_have_no_hash() {
        let tensor = |len| Leaf::Tensor(Tensor::zeros(DType::UInt8, [len]).unwrap(), None);
        let rows = Region::new([0], [4]).unwrap();
        let part = Tensor::zeros_sharded(DType::UInt8, [8], [rows]).unwrap();
        let mut values = SmallValues::default();
        values.add("large", &tensor(HASHED_MAX as u64 + 1));
        values.add("part", &Leaf::Tensor(part, None));
        assert!(values.sample().is_empty());
        values.add("small", &tensor(HASHED_MAX as u64));
        assert_eq!(values.sample().len(), 1);
        // One shard that is all of the tensor.
        let whole = Region::full([8]).unwrap();
        let whole = Tensor::zeros_sharded(DType::UInt8, [8], [whole]).unwrap();
        values.add("whole", &Leaf::Tensor(whole, None));
        assert_eq!(values.sample().len(), 2);
    }

    #[test]
    fn names_that_differ_in_a_digit_have_other_digests() {
        for name in ["o", "rng_", "rng/rank_", "loader.state.of_rank_"] {
            let ranks: Vec<_> = (0..4).map(|rank| format!("{name}{rank}")).collect();
            let digest =
                |rank: &String| values(&[("x", b"1"), (rank, rank.as_bytes())]).digest(&[]);
            let names: std::collections::HashSet<_> =
                ranks.iter().map(|rank| digest(rank).names).collect();
            assert_eq!(names.len(), 4, "{name}");
        }
    }

    #[test]
    fn digests_depend_on_names_and_values_and_not_on_their_order() {
        let one = values(&[("a", b"1"), ("b", b"2")]);
        let turned = values(&[("b", b"2"), ("a", b"1")]);
        let swapped = values(&[("a", b"2"), ("b", b"1")]);
        let other = values(&[("a", b"1"), ("c", b"2")]);
        assert_eq!(one.digest(&[]), turned.digest(&[]));
        assert_eq!(one.digest(&[]).names, swapped.digest(&[]).names);
        assert_ne!(one.digest(&[]).values, swapped.digest(&[]).values);
        assert_ne!(one.digest(&[]).names, other.digest(&[]).names);
        assert_eq!(compared(&[&one, &swapped], &["b", "a"]).differing.len(), 2);
        let Compared { differing, own } = compared(&[&one, &other], &["a", "b", "c"]);
        assert!(differing.is_empty());
        assert_eq!(own.len(), 2);
        assert_eq!(one.digest(&own), other.digest(&own));
    }

    #[test]
    fn single_hashes_are_requested_only_where_they_say_something() {
        let digests = |ranks: &[&SmallValues]| {
            ranks.iter().map(|values| values.digest(&[])).collect::<Vec<_>>().into_iter()
        };
        let one = values(&[("a", b"1")]);
        let [other, named] = [values(&[("a", b"2")]), values(&[("b", b"1")])];
        for (repeats, known) in [(false, None), (true, None), (true, Some(&[7][..]))] {
            assert_eq!(request(digests(&[&one, &one]), repeats, known), None);
            let values = request(digests(&[&one, &one, &other]), repeats, known);
            assert_eq!(values, Some(Request::Values));
        }
        let names = Some(Request::Names);
        assert_eq!(request(digests(&[&one, &named]), true, None), names);
        assert_eq!(request(digests(&[&one, &named]), true, Some(&[])), None);
        assert_eq!(request(digests(&[&one, &named]), false, Some(&[])), names);
        assert_eq!(request(digests(&[&one, &one]), false, Some(&[7])), names);
    }

    #[test]
    fn what_is_compared_and_shown_is_bounded() {
        let names: Vec<String> = (0..2 * SAMPLE_MAX).map(|n| format!("value.{n:04}")).collect();
        let of = |rank: u8| {
            let mut values = SmallValues::default();
            names.iter().for_each(|fqn| values.add(fqn, &Leaf::Object(vec![rank].into())));
            values.sample()
        };
        let ranks: Vec<_> = (0..40).map(of).collect();
        assert!(ranks.iter().all(|rank| rank.len() == SAMPLE_MAX));
        let Compared { differing, own } = compare(&ranks, names.iter().map(String::as_str));
        assert_eq!(differing.len(), SHOWN_MAX);
        assert!(differing.iter().all(|value| value.ranks == (1..=16).collect::<Vec<_>>()));
        assert!(own.is_empty());
    }
}
