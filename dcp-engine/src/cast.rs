//! Saving tensors in another dtype than they have in memory.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use dcp_cast::{CastCounts, CastOptions, CastReport, Caster, ExactTensors, TensorCast};
use dcp_core::error::StateProblem;
use dcp_core::plan::{LeafKind, StateIndex};
use dcp_core::{DType, Payload, PlanError};
use dcp_planner::KeyFilter;

/// Bytes of a tensor in its new dtype to make at a time.
pub(crate) const SEGMENT: u64 = 16 << 20;

/// The tensors that a save casts, and their dtypes; see [`Settings::cast`](crate::Settings::cast).
///
/// Tensors of float64, float32, float16 and bfloat16 are cast. Integers, truth values, complex
/// numbers and 8-bit floats never are, nor [`ExactTensors`]: steps of an optimizer, packed weights with
/// their scales, biases of routers.
///
/// ```
/// use dcp_core::DType;
/// use dcp_engine::Casts;
/// use dcp_planner::KeyFilter;
///
/// let weights = Casts::to(DType::BFloat16).keep(KeyFilter::any_of(["optim"]));
/// # drop(weights);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Casts {
    to: DType,
    only: KeyFilter,
    keep: KeyFilter,
}

impl Casts {
    /// All floats of 16 bits and more become `dtype`.
    #[must_use]
    pub fn to(dtype: DType) -> Self {
        Self { to: dtype, only: KeyFilter::all(), keep: KeyFilter::any_of::<String>([]) }
    }

    /// Casts only the tensors that `keys` selects.
    #[must_use]
    pub fn only(mut self, keys: KeyFilter) -> Self {
        self.only = keys;
        self
    }

    /// Leaves the tensors that `keys` selects as they are.
    #[must_use]
    pub fn keep(mut self, keys: KeyFilter) -> Self {
        self.keep = keys;
        self
    }

    /// Gives every leaf that is cast its new dtype, and returns the casts by leaf.
    pub(crate) fn apply(&self, index: &mut StateIndex) -> Result<Vec<Option<Cast>>, PlanError> {
        let wide = [DType::Float64, DType::Float32, DType::Float16, DType::BFloat16];
        let tensors = index.leaves.iter().filter_map(|leaf| match &leaf.kind {
            LeafKind::Tensor { dtype, shape, .. } => Some((&*leaf.fqn, *dtype, &**shape)),
            _ => None,
        });
        let exact = ExactTensors::of(tensors);
        let casts = index.leaves.iter_mut().map(|leaf| {
            let LeafKind::Tensor { dtype, .. } = &mut leaf.kind else { return Ok(None) };
            let path = leaf.path.as_ref();
            let meant = wide.contains(dtype)
                && *dtype != self.to
                && !exact.contains(&leaf.fqn)
                && self.only.selects(&leaf.fqn, path)
                && !self.keep.selects(&leaf.fqn, path);
            if !meant {
                return Ok(None);
            }
            let caster = Caster::new(&leaf.fqn, *dtype, self.to, CastOptions::default())
                .map_err(|e| StateProblem::NotCastable { problem: e.problem }.of(e.fqn))?;
            *dtype = self.to;
            let lost = Mutex::default();
            Ok(Some(Cast { fqn: Arc::clone(&leaf.fqn), caster, lost: Arc::new(lost) }))
        });
        casts.collect()
    }
}

impl From<DType> for Casts {
    fn from(dtype: DType) -> Self {
        Self::to(dtype)
    }
}

/// The cast of one tensor, and its losses so far.
#[derive(Clone, Debug)]
pub(crate) struct Cast {
    fqn: Arc<str>,
    caster: Caster,
    lost: Arc<Mutex<CastCounts>>,
}

impl Cast {
    /// The bytes of the elements, in the dtype that they have in memory, of which bytes `range` in
    /// their new dtype are made. A part of an element is cut from the whole one.
    pub(crate) fn source_of(&self, range: &Range<u64>) -> Range<u64> {
        let (from, to) = self.sizes();
        range.start / to * from..range.end.div_ceil(to) * from
    }

    /// Divides bytes of elements in their new dtype so that each part is made of at most `most`
    /// bytes, or of one element.
    pub(crate) fn parts(
        &self,
        range: Range<u64>,
        most: u64,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let (from, to) = self.sizes();
        let step = (most / from).max(1).saturating_mul(to);
        let first = range.start / to * to;
        let starts = (first..range.end).step_by(usize::try_from(step).unwrap_or(usize::MAX));
        starts.map(move |at| at.max(range.start)..range.end.min(at.saturating_add(step)))
    }

    /// The sizes of an element in memory and in its new dtype.
    fn sizes(&self) -> (u64, u64) {
        (self.caster.from().size() as u64, self.caster.to().size() as u64)
    }

    /// The bytes `range` of elements in their new dtype, from their [`source_of`](Self::source_of).
    pub(crate) fn cast(&self, source: &[u8], range: Range<u64>) -> Payload {
        let to = self.caster.to().size() as u64;
        let mut target =
            vec![0; source.len() / self.caster.from().size() * self.caster.to().size()];
        let mut lost = CastCounts::default();
        self.caster.cast(source, &mut target, &mut lost);
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).add(&lost);
        let start = range.start % to;
        Payload::from(target).slice(start..start + (range.end - range.start))
    }

    /// The bytes of elements in their new dtype, of which there are `byte_len` bytes in memory.
    pub(crate) fn byte_len(&self, byte_len: u64) -> u64 {
        let (from, to) = self.sizes();
        byte_len / from * to
    }
}

/// Reports the casts of the tensors of which this rank wrote anything.
pub(crate) fn report<'a>(casts: impl Iterator<Item = &'a Cast>) -> CastReport {
    let mut report = CastReport::default();
    for cast in casts {
        let counts = *cast.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.elements > 0 {
            let (from, to) = (cast.caster.from().name(), cast.caster.to().name());
            report.tensors.insert(Arc::clone(&cast.fqn), TensorCast::new(from, to, counts));
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use dcp_core::Tensor;
    use dcp_core::plan::StateLeaf;

    use super::*;

    fn leaf(fqn: &str, dtype: DType) -> StateLeaf {
        let kind =
            LeafKind::Tensor { dtype, shape: [4].into(), sharded: false, regions: Vec::new() };
        StateLeaf { fqn: fqn.into(), path: None, kind }
    }

    fn cast_of(casts: &Casts, fqn: &str, dtype: DType) -> Option<Cast> {
        let mut index = StateIndex { leaves: vec![leaf(fqn, dtype)] };
        casts.apply(&mut index).unwrap().pop().unwrap()
    }

    #[test]
    fn only_wide_floats_are_cast_and_nothing_that_is_exact() {
        let casts = Casts::to(DType::BFloat16)
            .only(KeyFilter::any_of(["model", "optim"]))
            .keep(KeyFilter::any_of(["model.head"]));
        for (fqn, dtype, meant) in [
            ("model.w", DType::Float32, true),
            ("model.w", DType::Float64, true),
            ("model.w", DType::Float16, true),
            ("model.w", DType::BFloat16, false),
            ("model.w", DType::Int64, false),
            ("model.w", DType::Bool, false),
            ("model.w", DType::Complex64, false),
            ("model.w", DType::Float8E4M3Fn, false),
            ("model.w", DType::Float8E8M0Fnu, false),
            ("model.head", DType::Float32, false),
            ("other.w", DType::Float32, false),
            ("optim.state.w.exp_avg", DType::Float32, true),
            ("optim.state.w.step", DType::Float32, false),
            ("model.mlp.router.expert_bias", DType::Float32, false),
            ("model.w_scale_inv", DType::Float32, false),
        ] {
            assert_eq!(cast_of(&casts, fqn, dtype).is_some(), meant, "{fqn} {dtype}");
        }
        let mut index = StateIndex { leaves: vec![leaf("w", DType::Float32)] };
        let error = Casts::to(DType::Int32).apply(&mut index).unwrap_err();
        assert!(error.to_string().contains("\"w\""), "{error}");
    }

    fn bytes(cast: &Cast, elements: &Payload, range: Range<u64>) -> Payload {
        cast.cast(&elements.slice(cast.source_of(&range)).to_bytes(), range)
    }

    #[test]
    fn any_ranges_of_the_new_bytes_are_those_of_the_whole() {
        let numbers: Vec<u8> = (0..300_u16).flat_map(|n| f32::from(n).to_le_bytes()).collect();
        let tensor = Tensor::replicated(DType::Float32, [300], numbers).unwrap();
        let elements = tensor.shards()[0].view().unwrap().payload().unwrap();
        for to in [DType::BFloat16, DType::Float64, DType::Float8E4M3Fn] {
            let cast = cast_of(&Casts::to(to), "w", DType::Float32).unwrap();
            let len = cast.byte_len(tensor.shards()[0].byte_len());
            assert_eq!(len, 300 * to.size() as u64);
            let whole = bytes(&cast, &elements, 0..len).to_bytes();
            assert_eq!(report([&cast].into_iter()).total().elements, 300);
            for step in [1, 7, 16, 1000] {
                let ranges = (0..len).step_by(step as usize);
                let parts = ranges.map(|at| bytes(&cast, &elements, at..len.min(at + step)));
                let joined: Vec<u8> = parts.flat_map(|part| part.to_bytes().to_vec()).collect();
                assert!(joined == whole, "{to} by {step}");
                let parts = cast.parts(3..len, step).map(|part| {
                    let source = cast.source_of(&part);
                    assert!(source.end - source.start <= step.max(4), "{source:?} by {step}");
                    bytes(&cast, &elements, part).to_bytes().to_vec()
                });
                assert!(parts.collect::<Vec<_>>().concat() == whole[3..], "{to} by {step}");
            }
        }
    }
}
