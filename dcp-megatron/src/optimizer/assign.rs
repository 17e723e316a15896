//! Assigns parameters with equal elements by the order in which modules register them.
//!
//! The places of a buffer hold parameters in the reverse of that order. For each way of registration
//! a greedy pass from the front finds the latest parameter that each place can hold, and one from the
//! back the earliest; where both are the same, it is the only one. Invariant: of several parameters,
//! one is assigned only where some way fits and all that fit agree. Assignments are not enumerated,
//! because their number grows exponentially with the layers that are equal.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::registration::{Place, Registration};
use super::shards::Known;

/// The classes of parameters in one buffer, in the order of the buffer.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    /// Buffers of the same group belong to the same rank.
    pub(super) group: usize,
    pub(super) classes: Vec<usize>,
}

/// The parameter at one place of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Assigned {
    /// The only one with these elements.
    ByValue(usize),
    /// The one that the order of registration leaves.
    ByOrder(usize),
    /// One of these.
    Ambiguous(Vec<usize>),
}

/// The parameters of every sequence, and the ways of registration that they agree with.
pub(super) fn assign(
    known: &Known,
    sequences: &[Sequence],
) -> (Vec<Vec<Assigned>>, Vec<Registration>) {
    let options = options(known, sequences);
    let fits = |way: &Registration| {
        let solved: Option<Vec<_>> =
            options.iter().map(|sequence| bounds(known, sequence, *way)).collect();
        Some((*way, solved?))
    };
    let fitting: Vec<_> = Registration::ALL.iter().filter_map(fits).collect();
    let mut assigned = Vec::with_capacity(options.len());
    for (number, sequence) in options.into_iter().enumerate() {
        let found = sequence.into_iter().enumerate().map(|(at, options)| {
            if let [only] = &*options {
                return Assigned::ByValue(*only);
            }
            let mut all = fitting.iter().map(|(_, solved)| solved.get(number)?.get(at).copied()?);
            match all.next().flatten() {
                Some(one) if all.all(|other| other == Some(one)) => Assigned::ByOrder(one),
                _ => Assigned::Ambiguous(options),
            }
        });
        let mut found: Vec<_> = found.collect();
        refuse_repeated(&mut found);
        assigned.push(found);
    }
    (assigned, fitting.into_iter().map(|(way, _)| way).collect())
}

/// For every place, the parameters that can be there by their elements and by the parts and
/// layers that the rank has.
fn options(known: &Known, sequences: &[Sequence]) -> Vec<Vec<Vec<usize>>> {
    let members = |class: &usize| known.classes.get(*class).map_or(&[][..], |all| all);
    let certain = |sequence: &Sequence| -> Vec<usize> {
        let only = sequence.classes.iter().filter_map(|class| match members(class) {
            [only] => Some(*only),
            _ => None,
        });
        only.collect()
    };
    // The tensor-parallel rank of each group, by the number of parts.
    let mut ranks: HashMap<usize, BTreeMap<u64, BTreeSet<u64>>> = HashMap::new();
    for sequence in sequences {
        for at in certain(sequence) {
            let Some((part, parts)) = known.params.get(at).map(|param| param.part) else {
                continue;
            };
            ranks.entry(sequence.group).or_default().entry(parts).or_default().insert(part);
        }
    }
    let all = sequences.iter().map(|sequence| {
        let layers: BTreeSet<u64> = certain(sequence)
            .into_iter()
            .filter_map(|at| known.params.get(at).and_then(|param| param.layer))
            .collect();
        let fits = |at: &usize| {
            let Some(param) = known.params.get(*at) else { return false };
            let (part, parts) = param.part;
            let rank = ranks.get(&sequence.group).and_then(|ranks| ranks.get(&parts));
            let of_rank = rank.is_none_or(|rank| rank.len() > 1 || rank.contains(&part));
            let of_stage =
                param.layer.is_none_or(|layer| layers.is_empty() || layers.contains(&layer));
            of_rank && of_stage
        };
        let choose = |class: &usize| {
            let some: Vec<_> = members(class).iter().copied().filter(fits).collect();
            if some.is_empty() { members(class).to_vec() } else { some }
        };
        sequence.classes.iter().map(choose).collect()
    });
    all.collect()
}

/// The one parameter of every place that an order of registration leaves, `None` where it leaves
/// several; `None` at all when the order cannot be.
fn bounds(known: &Known, options: &[Vec<usize>], way: Registration) -> Option<Vec<Option<usize>>> {
    let places: Vec<Vec<(Place, usize)>> = options
        .iter()
        .map(|options| {
            let place = |at: &usize| Some((way.place(&known.params.get(*at)?.place())?, *at));
            options.iter().filter_map(place).collect()
        })
        .collect();
    // A buffer holds what was registered last first.
    let mut largest = Vec::with_capacity(places.len());
    let mut before: Option<Place> = None;
    for (places, options) in places.iter().zip(options) {
        let fitting = places.iter().filter(|(place, _)| before.is_none_or(|last| *place < last));
        match fitting.max() {
            Some((place, at)) => {
                before = Some(*place);
                largest.push(Some(*at));
            }
            // What is only known by its elements can be anywhere.
            None if options.len() == 1 && places.is_empty() => {
                largest.push(options.first().copied())
            }
            None if places.is_empty() => largest.push(None),
            None => return None,
        }
    }
    let mut smallest = Vec::with_capacity(places.len());
    let mut behind: Option<Place> = None;
    for (places, options) in places.iter().zip(options).rev() {
        let fitting = places.iter().filter(|(place, _)| behind.is_none_or(|next| *place > next));
        match fitting.min() {
            Some((place, at)) => {
                behind = Some(*place);
                smallest.push(Some(*at));
            }
            None if places.is_empty() => smallest.push(options.first().copied()),
            None => return None,
        }
    }
    smallest.reverse();
    // An option without a known place could be anywhere: nothing follows from the order then.
    let complete =
        |(places, options): (&Vec<(Place, usize)>, &Vec<usize>)| places.len() == options.len();
    let complete: Vec<_> = places.iter().zip(options).map(complete).collect();
    let both = largest.into_iter().zip(smallest).zip(complete);
    Some(both.map(|((a, b), complete)| a.filter(|_| a == b && complete)).collect())
}

/// A rank has every parameter once: a parameter found twice in a buffer counts as not found.
fn refuse_repeated(assigned: &mut [Assigned]) {
    let mut count: HashMap<usize, usize> = HashMap::new();
    for one in assigned.iter() {
        if let Assigned::ByValue(at) | Assigned::ByOrder(at) = one {
            *count.entry(*at).or_default() += 1;
        }
    }
    for one in assigned.iter_mut() {
        if let Assigned::ByValue(at) | Assigned::ByOrder(at) = one
            && count.get(at).is_some_and(|count| *count > 1)
        {
            *one = Assigned::Ambiguous(vec![*at]);
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::Region;

    use super::*;
    use crate::optimizer::shards::{Fingerprint, LocalParam};

    /// Key, layer, part, and a number for the elements: equal numbers are equal elements.
    type Param = (&'static str, Option<u64>, (u64, u64), u8);

    fn known(params: &[Param]) -> Known {
        let locals = params.iter().map(|(key, layer, part, _)| LocalParam {
            key: (*key).into(),
            entry: 0,
            boxes: vec![Region::full([8]).unwrap()],
            elements: 8,
            layer: *layer,
            expert: None,
            part: *part,
        });
        let prints = params.iter().map(|(.., value)| {
            let print = Fingerprint { elements: 8, digest: [*value; 32] };
            (vec![*value; 16].into(), print)
        });
        Known::new(locals.collect(), prints.collect())
    }

    fn layer(layer: u64, at: u8) -> [Param; 6] {
        let name = |name| (name, Some(layer), (0, 1));
        let with = |(name, layer, part), value| (name, layer, part, value);
        [
            with(name("decoder.layers.self_attention.linear_qkv.layer_norm_weight"), 0),
            with(name("decoder.layers.self_attention.linear_proj.weight"), at + 1),
            with(name("decoder.layers.self_attention.linear_qkv.weight"), at + 2),
            with(name("decoder.layers.mlp.linear_fc1.layer_norm_weight"), 0),
            with(name("decoder.layers.mlp.linear_fc1.weight"), at + 3),
            with(name("decoder.layers.mlp.linear_fc2.weight"), at + 4),
        ]
    }

    /// The classes of parameters that a rank holds in this order of registration.
    fn sequence(known: &Known, group: usize, registered: &[usize]) -> Sequence {
        let classes = registered.iter().rev().filter_map(|at| known.class_of.get(*at).copied());
        Sequence { group, classes: classes.collect() }
    }

    #[test]
    fn norms_that_are_all_ones_are_told_by_their_neighbors() {
        let mut params: Vec<_> = (0..4_u8).flat_map(|at| layer(at.into(), 10 * (at + 1))).collect();
        params.push(("decoder.final_layernorm.weight", None, (0, 1), 0));
        let known = known(&params);
        // Two pipeline stages of two local layers each.
        let local = [0, 1, 2, 3, 4, 5];
        let stage = |first: usize| (first..first + 2).flat_map(move |l| local.map(|at| 6 * l + at));
        let first: Vec<_> = stage(0).collect();
        let last: Vec<_> = stage(2).chain([24]).collect();
        let sequences = [sequence(&known, 0, &first), sequence(&known, 1, &last)];
        let (assigned, ways) = assign(&known, &sequences);
        for (found, expected) in assigned.iter().zip([first, last]) {
            let found: Vec<_> = found
                .iter()
                .rev()
                .map(|one| match one {
                    Assigned::ByValue(at) | Assigned::ByOrder(at) => *at,
                    Assigned::Ambiguous(all) => panic!("{all:?}"),
                })
                .collect();
            assert_eq!(found, expected);
        }
        assert!(ways.iter().all(|way| way.name().starts_with("local")), "{ways:?}");
    }

    #[test]
    fn another_order_is_found_too() {
        let params: Vec<_> = (0..2_u8).flat_map(|at| layer(at.into(), 10 * (at + 1))).collect();
        let known = known(&params);
        let fused: Vec<_> =
            [0, 1].iter().flat_map(|l| [1, 0, 2, 3, 4, 5].map(|at| 6 * l + at)).collect();
        let (assigned, ways) = assign(&known, &[sequence(&known, 0, &fused)]);
        let found: Vec<_> = assigned[0].iter().rev().collect();
        assert_eq!(found[1], &Assigned::ByOrder(0));
        assert_eq!(found[3], &Assigned::ByOrder(3));
        assert_eq!(ways.len(), 2);
        assert!(ways.iter().all(|way| way.name().starts_with("Transformer")));
    }

    #[test]
    fn what_no_order_explains_is_ambiguous() {
        let params: Vec<_> = layer(0, 10).into();
        let known = known(&params);
        let strange = [2, 0, 1, 3, 5, 4];
        let (assigned, ways) = assign(&known, &[sequence(&known, 0, &strange)]);
        assert!(ways.is_empty());
        assert_eq!(assigned[0][4], Assigned::Ambiguous(vec![0, 3]));
        assert_eq!(assigned[0][0], Assigned::ByValue(4));
    }

    #[test]
    fn parts_of_other_tensor_parallel_ranks_are_not_taken() {
        let (bias, matrix) =
            ("decoder.layers.mlp.linear_fc1.bias", "decoder.layers.mlp.linear_fc1.weight");
        let params = [
            (bias, Some(0), (0, 2), 0),
            (bias, Some(0), (1, 2), 0),
            (matrix, Some(0), (0, 2), 1),
            (matrix, Some(0), (1, 2), 2),
        ];
        let known = known(&params);
        let sequences = [sequence(&known, 0, &[2, 0]), sequence(&known, 1, &[3, 1])];
        let (assigned, _) = assign(&known, &sequences);
        assert_eq!(assigned[0], [Assigned::ByValue(0), Assigned::ByValue(2)]);
        assert_eq!(assigned[1], [Assigned::ByValue(1), Assigned::ByValue(3)]);
    }

    #[test]
    fn a_parameter_found_twice_was_not_found() {
        let params: Vec<_> = layer(0, 10).into();
        let known = known(&params);
        let (assigned, _) = assign(&known, &[sequence(&known, 0, &[1, 1])]);
        assert_eq!(assigned[0], vec![Assigned::Ambiguous(vec![1]); 2]);
    }
}
