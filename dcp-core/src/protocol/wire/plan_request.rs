//! The coordinator's request for parts of the ranks' plans, so that it receives each once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use bytes::Bytes;

use super::plan::{PlanReceiver, of_rank};
use super::plan_outline::Outline;
use super::rank_set::RankSet;
use super::{MessageReader, MessageWriter, PlanParts, bad};
use crate::error::{PlanError, PlanMaker, PlanProblem};
use crate::names::rank::Rank;
use crate::plans::plan::SavePlan;

/// The hashes that identify a plan among those of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanSummary {
    /// [`SavePlan::fingerprint`].
    pub fingerprint: u128,
    /// A hash of names, dtypes and shapes, and of which items have the same region.
    pub outline: u64,
}

/// The coordinator's request for the plans of the ranks: of equal plans, and of equal outlines, those of
/// the lowest rank that has them.
///
/// ```
/// use dcp_core::plan::{PlanKey, SavePlan};
/// use dcp_core::wire::PlanRequest;
///
/// let plan = |byte_len| {
///     let mut plan = SavePlan::new();
///     let key = plan.push_key(PlanKey { fqn: "step".into(), path: None, tensor: None });
///     plan.push_object(key, byte_len)?;
///     Ok::<_, dcp_core::PlanError>(plan)
/// };
/// let plans = [plan(461)?, plan(461)?, plan(462)?];
/// let parts = plans.each_ref().map(SavePlan::to_parts);
/// let summaries = parts.each_ref().map(|parts| parts.summary());
///
/// let request = PlanRequest::of(&summaries);
/// let answers = [0, 1, 2].map(|rank| request.answer(rank as u32, &parts[rank]));
/// assert!(answers[1].is_empty() && answers[2].len() < answers[0].len());
/// assert_eq!(SavePlan::from_answers(&summaries, &answers)?, plans);
/// # Ok::<(), dcp_core::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRequest {
    /// Ranks that send their whole plan.
    whole: RankSet,
    /// Ranks that send the values of their plan.
    values: RankSet,
}

/// The part of its plan that a rank sends.
enum Sent {
    Whole,
    /// The values, for the outline of another rank.
    Values,
    /// Nothing: another rank has the same plan.
    Nothing(usize),
}

/// Finds the lowest rank with each plan and outline.
#[derive(Default)]
struct Known {
    plans: HashMap<u128, usize>,
    outlines: HashMap<u64, usize>,
}

impl Known {
    fn next(&mut self, rank: usize, summary: &PlanSummary) -> Sent {
        match self.plans.entry(summary.fingerprint) {
            Entry::Occupied(same) => return Sent::Nothing(*same.get()),
            Entry::Vacant(new) => _ = new.insert(rank),
        }
        match self.outlines.entry(summary.outline) {
            Entry::Occupied(_) => Sent::Values,
            Entry::Vacant(new) => {
                new.insert(rank);
                Sent::Whole
            }
        }
    }
}

impl PlanRequest {
    /// The request for the plans of a group, whose summaries are in rank order.
    #[must_use]
    pub fn of(summaries: &[PlanSummary]) -> Self {
        let mut known = Known::default();
        let (mut whole, mut values) = (Vec::new(), Vec::new());
        for ((number, summary), rank) in summaries.iter().enumerate().zip(0..) {
            match known.next(number, summary) {
                Sent::Whole => whole.push(rank),
                Sent::Values => values.push(rank),
                Sent::Nothing(_) => {}
            }
        }
        Self { whole: RankSet::of(&whole), values: RankSet::of(&values) }
    }

    /// Encodes the part of its plan that `rank` sends.
    #[must_use]
    pub fn answer(&self, rank: Rank, plan: &PlanParts) -> Bytes {
        if self.whole.contains(rank) {
            plan.to_wire()
        } else if self.values.contains(rank) {
            plan.values()
        } else {
            Bytes::new()
        }
    }

    /// Writes the request to a message.
    pub fn write_to(&self, out: &mut MessageWriter) {
        self.whole.write_to(out);
        self.values.write_to(out);
    }

    /// Reads a request from a message.
    ///
    /// # Errors
    ///
    /// When the bytes are not a request of this version.
    pub fn read_from(input: &mut MessageReader<'_>) -> Result<Self, PlanError> {
        Ok(Self { whole: RankSet::read_from(input)?, values: RankSet::read_from(input)? })
    }
}

impl SavePlan {
    /// Decodes what ranks sent for the [`PlanRequest`] of `summaries`, in rank order. Equal plans
    /// share all memory, those with the same outline share that.
    ///
    /// # Errors
    ///
    /// When a message is not what was requested of its rank, which the error names.
    pub fn from_answers<M: AsRef<[u8]>>(
        summaries: &[PlanSummary],
        answers: &[M],
    ) -> Result<Vec<Self>, PlanError> {
        let (expected, found) = (summaries.len(), answers.len());
        if expected != found {
            let made_by = PlanMaker::Group;
            return Err(PlanError::Plan(PlanProblem::Count { made_by, expected, found }));
        }
        let (mut known, mut receiver) = (Known::default(), PlanReceiver::default());
        let mut outlines: HashMap<u64, (Outline, u64)> = HashMap::new();
        let mut plans: Vec<Self> = Vec::with_capacity(answers.len());
        for (rank, (summary, answer)) in summaries.iter().zip(answers).enumerate() {
            let answer = answer.as_ref();
            let plan = match known.next(rank, summary) {
                Sent::Nothing(same) => match (answer, plans.get(same)) {
                    ([], Some(plan)) => Ok(plan.clone()),
                    _ => Err(bad(format!("it is sent, although rank {same} has sent it"))),
                },
                Sent::Values => match outlines.get(&summary.outline) {
                    Some((outline, check)) => PlanReceiver::values(answer, outline, *check),
                    None => Err(bad("it is of an outline that was not sent")),
                },
                Sent::Whole => receiver.whole(answer).and_then(|(plan, outline)| {
                    let check = PlanReceiver::outline_check(answer)?;
                    outlines.insert(summary.outline, (outline, check));
                    Ok(plan)
                }),
            };
            plans.push(plan.map_err(|error| of_rank(error, rank))?);
        }
        Ok(plans)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::plans::plan::{PlanKey, TensorSpec, Unoffered};
    use crate::tensors::dims::Dims;
    use crate::tensors::dtype::DType;
    use crate::tensors::region::Region;

    /// A tensor of the group, or with no shape an object.
    type Leaf = Option<Vec<u64>>;
    /// A leaf, and a chunk of it by rule or by numbers.
    type Offered = (Index, bool, u64, Vec<(u64, u64)>);

    /// The part of `index` of `parts` along each axis that is `divided`.
    fn part(shape: &[u64], divided: &[bool], parts: u64, index: u64) -> Region {
        let of = |(len, divided): (&u64, &bool)| {
            let each = if *divided { len.div_ceil(parts) } else { *len };
            let offset = if *divided { (each * index).min(*len) } else { 0 };
            (offset, each.min(len - offset))
        };
        let (offsets, sizes): (Vec<u64>, Vec<u64>) = shape.iter().zip(divided).map(of).unzip();
        Region::new(offsets, sizes).unwrap()
    }

    fn named(at: usize, leaf: &Leaf) -> PlanKey {
        let spec = |shape: &Vec<u64>| TensorSpec {
            dtype: DType::ALL[at % 3],
            shape: shape.as_slice().into(),
            sharded: true,
        };
        let fqn = format!("layers.{}.{}", at / 3, at % 3).into();
        PlanKey { fqn, path: None, tensor: leaf.as_ref().map(spec) }
    }

    fn plan_of(rank: u64, leaves: &[Leaf], offered: &[Offered]) -> SavePlan {
        let mut plan = SavePlan::new();
        for (at, leaf) in leaves.iter().enumerate() {
            plan.push_key(named(at, leaf));
        }
        let mut unoffered = Vec::new();
        for (which, by_rule, parts, places) in offered {
            if leaves.is_empty() {
                break;
            }
            let at = which.index(leaves.len());
            let region = leaves[at].as_ref().map(|shape| match by_rule {
                true => {
                    part(shape, &places.iter().map(|p| p.0 > 4).collect::<Vec<_>>(), *parts, rank)
                }
                false => {
                    let places = places.iter().take(shape.len());
                    let (offsets, sizes): (Vec<u64>, Vec<u64>) =
                        places.map(|(a, b)| (a + rank, *b)).unzip();
                    Region::new(offsets, sizes).unwrap()
                }
            });
            let fqn = named(at, &leaves[at]).fqn;
            match region {
                _ if places[3].0 == 0 => unoffered.push(Unoffered { fqn, region }),
                Some(region) => plan.push_chunk(at, &region).unwrap(),
                None => plan.push_object(at, *parts).unwrap(),
            }
        }
        plan.unoffered = Arc::new(unoffered);
        plan
    }

    /// Plans of ranks: equal, with other values, of other keys, and empty.
    fn plans() -> impl Strategy<Value = Vec<SavePlan>> {
        let leaf = prop::option::of(prop::collection::vec(0_u64..40, 0..4));
        let leaves = prop::collection::vec(leaf, 0..8);
        let places = prop::collection::vec((0_u64..9, 0_u64..9), 4);
        let offered = (any::<Index>(), any::<bool>(), 1_u64..6, places);
        let offered = prop::collection::vec(offered, 0..12);
        let ranks = prop::collection::vec((0_u64..4, 0_usize..3), 1..9);
        let kinds = prop::collection::vec((leaves, offered), 3);
        (kinds, ranks).prop_map(|(kinds, ranks)| {
            let plan =
                |(values, kind): (u64, usize)| plan_of(values, &kinds[kind].0, &kinds[kind].1);
            ranks.into_iter().map(plan).collect()
        })
    }

    fn answers(parts: &[PlanParts]) -> (Vec<PlanSummary>, Vec<Vec<u8>>) {
        let summaries: Vec<PlanSummary> = parts.iter().map(PlanParts::summary).collect();
        let mut message = MessageWriter::new(*b"test");
        PlanRequest::of(&summaries).write_to(&mut message);
        let message = message.finish();
        let mut input = MessageReader::new(&message, *b"test").unwrap();
        let request = PlanRequest::read_from(&mut input).unwrap();
        input.finish().unwrap();
        let sent = (0..).zip(parts).map(|(rank, parts)| request.answer(rank, parts).to_vec());
        (summaries, sent.collect())
    }

    proptest! {
        #[test]
        fn plans_arrive_from_what_differs(plans in plans()) {
            let parts: Vec<PlanParts> = plans.iter().map(SavePlan::to_parts).collect();
            let (summaries, answers) = answers(&parts);
            let back = SavePlan::from_answers(&summaries, &answers).unwrap();
            let wires = |plans: &[SavePlan]| plans.iter().map(SavePlan::to_wire).collect::<Vec<_>>();
            prop_assert_eq!(wires(&back), wires(&plans));
            for ((plan, back), wire) in plans.iter().zip(&back).zip(wires(&plans)) {
                prop_assert_eq!(back.fingerprint(), plan.fingerprint());
                prop_assert_eq!(back.unoffered(), plan.unoffered());
                prop_assert!(plan.items().map(row).eq(back.items().map(row)));
                let alone = SavePlan::from_wire(&wire).unwrap();
                prop_assert!(plan.items().map(row).eq(alone.items().map(row)));
            }
            let equal = |a: usize, b: usize| plans[a].to_wire() == plans[b].to_wire();
            for (rank, answer) in answers.iter().enumerate() {
                prop_assert_eq!(answer.is_empty(), (0..rank).any(|before| equal(before, rank)));
            }
        }

        #[test]
        fn a_damaged_answer_is_refused_by_the_name_of_its_rank_or_harmless(
            plans in plans(),
            which in any::<Index>(),
            at in any::<Index>(),
            bit in 0_u32..8,
        ) {
            let parts: Vec<PlanParts> = plans.iter().map(SavePlan::to_parts).collect();
            let (summaries, mut answers) = answers(&parts);
            let rank = which.index(plans.len());
            match answers[rank].len() {
                0 => answers[rank].push(7),
                len => answers[rank][at.index(len)] ^= 1_u8 << bit,
            }
            if let Err(error) = SavePlan::from_answers(&summaries, &answers) {
                // A damaged outline may decode, and then does not fit the values of others.
                let error = error.to_string();
                let named = (rank..plans.len()).any(|rank| error.contains(&format!("rank {rank}")));
                prop_assert!(named, "{}: {}", rank, error);
            }
        }
    }

    type Row<'a> = (&'a PlanKey, &'a [u64], &'a [u64], u64);

    fn row<'a>(item: crate::plans::plan::WriteItem<'a>) -> Row<'a> {
        (item.key, item.offsets, item.sizes, item.byte_len)
    }

    /// The plan of a rank of a model of layers: 1000 tensors of nine shapes.
    fn layers(divided: &dyn Fn(usize) -> [bool; 2], parts: u64, index: u64) -> PlanParts {
        const SHAPES: [&[u64]; 9] = [
            &[8192, 8192],
            &[1024, 8192],
            &[1024, 8192],
            &[8192, 8192],
            &[28672, 8192],
            &[28672, 8192],
            &[8192, 28672],
            &[8192],
            &[8192],
        ];
        let leaves: Vec<Leaf> = (0..1000).map(|n| Some(SHAPES[n % 9].to_vec())).collect();
        let mut plan = SavePlan::new();
        for (at, leaf) in leaves.iter().enumerate() {
            let shape = leaf.as_deref().unwrap();
            plan.push_key(named(at, leaf));
            plan.push_chunk(at, &part(shape, &divided(at), parts, index)).unwrap();
        }
        plan.to_parts()
    }

    #[test]
    fn replicas_send_nothing_and_divided_layers_tens_of_bytes() {
        let sizes = |divided: &dyn Fn(usize) -> [bool; 2], parts| {
            let plans: Vec<PlanParts> = (0..16).map(|rank| layers(divided, parts, rank)).collect();
            let (_, answers) = answers(&plans);
            assert!(answers[0].len() > 2000);
            answers[1..].iter().map(Vec::len).max().unwrap()
        };
        assert_eq!(sizes(&|_| [false, false], 1), 0);
        let rows = sizes(&|_| [true, false], 1024);
        assert!(rows <= 64, "{rows} bytes");
        let tensor_parallel = sizes(&|at| [at % 3 == 0, at % 3 == 1], 16);
        assert!(tensor_parallel <= 64, "{tensor_parallel} bytes");
        let grid = sizes(&|_| [true, true], 16);
        assert!(grid <= 64, "{grid} bytes");
    }

    #[test]
    fn answers_that_were_not_requested_are_refused() {
        let plans = [layers(&|_| [true, false], 4, 0), layers(&|_| [true, false], 4, 1)];
        let (summaries, sent) = answers(&plans);
        let refused = |summaries: &[PlanSummary], sent: &[&[u8]]| {
            SavePlan::from_answers(summaries, sent).unwrap_err().to_string()
        };
        let same = [summaries[0], summaries[0]];
        let error = refused(&same, &[&sent[0], &sent[1]]);
        assert!(error.contains("the plan of rank 1") && error.contains("rank 0"), "{error}");
        assert!(refused(&summaries, &[&sent[0], b""]).contains("rank 1"));
        assert!(refused(&summaries, &[&sent[1], &sent[1]]).contains("rank 0"));
        assert!(refused(&summaries, &[&sent[0]]).contains('2'));
        // Of another outline, as after a collision of the half that is in the summary.
        let mut other = sent[1].clone();
        other[4] ^= 1;
        assert!(refused(&summaries, &[&sent[0], &other]).contains("another outline"));
        let too_many: Dims = vec![1; Dims::MAX_AXES + 1].into();
        let mut plan = SavePlan::new();
        let spec = TensorSpec { dtype: DType::Int8, shape: too_many.clone(), sharded: false };
        let key = PlanKey { fqn: "t".into(), path: None, tensor: Some(spec) };
        let key = plan.push_key(key);
        plan.push_chunk(key, &Region::full(too_many).unwrap()).unwrap();
        assert!(SavePlan::from_wire(&plan.to_wire()).unwrap_err().to_string().contains("65 axes"));
    }
}
