//! The result of comparing two checkpoints.

use std::sync::Arc;

use serde::Serialize;

use crate::keys::unmatched::UnmatchedPattern;

type Json = serde_json::Value;

/// The differences of two checkpoints. Serialized, they are the output of `dcp diff --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DiffReport {
    /// Whether there are no differences.
    pub equal: bool,
    /// The scope of the comparison.
    pub compared: DiffScope,
    /// The number of differences of each kind.
    pub counts: DiffCounts,
    /// The differences, gravest first.
    pub differences: Vec<Difference>,
    /// Key patterns that match no key of either checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<UnmatchedPattern>,
    /// Doubts about the values, such as a damaged optimizer, for people.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// The scope of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DiffScope {
    /// Selected keys of A.
    pub keys_a: usize,
    /// Selected keys of B.
    pub keys_b: usize,
    /// Tensors in both.
    pub tensors: usize,
    /// Objects in both.
    pub objects: usize,
    /// Whether values were compared, or only keys, shapes and dtypes.
    pub values: bool,
    /// Bytes of elements read and compared on each side.
    pub bytes: u64,
}

/// The number of differences of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiffCounts {
    /// Keys that are a tensor in one and an object in the other.
    pub kind: usize,
    /// Tensors of different shapes.
    pub shape: usize,
    /// Keys only in A.
    pub only_in_a: usize,
    /// Keys only in B.
    pub only_in_b: usize,
    /// Tensors with different values.
    pub values: usize,
    /// Objects that differ.
    pub object: usize,
    /// Tensors of different dtypes whose values are equal or cannot be compared.
    pub dtype: usize,
}

/// One key that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Difference {
    /// Its name in the comparison.
    pub key: Arc<str>,
    /// Its name in A, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_a: Option<Arc<str>>,
    /// Its name in B, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_b: Option<Arc<str>>,
    /// The difference.
    #[serde(flatten)]
    pub what: DifferenceKind,
}

/// The difference of a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
#[non_exhaustive]
pub enum DifferenceKind {
    /// A tensor on one side and an object on the other.
    Kind {
        /// The entry in A.
        a: Described,
        /// The entry in B.
        b: Described,
    },
    /// The shapes differ, so no values were compared.
    Shape {
        /// The tensor in A.
        a: Described,
        /// The tensor in B.
        b: Described,
    },
    /// Only in A.
    OnlyInA {
        /// The entry.
        a: Described,
    },
    /// Only in B.
    OnlyInB {
        /// The entry.
        b: Described,
    },
    /// Values differ.
    Values(Box<ValueDifference>),
    /// The objects differ.
    Object {
        /// The path of the first difference, such as `["history"][3]`; empty when the whole objects
        /// differ.
        path: String,
        /// The value in A, as [`value_json`](crate::element::value_json()) writes it; `null` for
        /// `None` and
        /// when A has no value there.
        a: Json,
        /// The value in B, likewise.
        b: Json,
        /// The side without a value, `a` or `b`, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing: Option<&'static str>,
    },
    /// Only the dtypes differ.
    Dtype {
        /// The tensor in A.
        a: Described,
        /// The tensor in B.
        b: Described,
        /// Whether the values can be compared; those of a complex and a real dtype, or of a packed
        /// and a plain one, cannot.
        comparable: bool,
    },
}

impl DifferenceKind {
    /// A sort key: graver kinds first, and larger differences first within a kind.
    pub(crate) fn severity(&self) -> (u8, u64, f64) {
        match self {
            Self::Kind { .. } => (0, 0, 0.0),
            Self::Shape { .. } => (1, 0, 0.0),
            Self::OnlyInA { .. } => (2, 0, 0.0),
            Self::OnlyInB { .. } => (3, 0, 0.0),
            Self::Values(values) => (4, values.nan_mismatches, values.max_abs),
            Self::Object { .. } => (5, 0, 0.0),
            Self::Dtype { comparable, .. } => (6, u64::from(!comparable), 0.0),
        }
    }
}

/// The kind of an entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Described {
    /// A tensor.
    Tensor {
        /// The element type, by PyTorch's name without `torch.`.
        dtype: &'static str,
        /// Elements per axis.
        shape: Vec<u64>,
    },
    /// An object.
    Object,
}

/// The differences between the elements of two tensors of one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ValueDifference {
    /// The element type in A.
    pub dtype_a: &'static str,
    /// The element type in B.
    pub dtype_b: &'static str,
    /// Elements per axis.
    pub shape: Vec<u64>,
    /// Elements in each tensor.
    pub count: u64,
    /// Elements that differ by more than the tolerance, or in any bit without one.
    pub different: u64,
    /// Elements of which exactly one is NaN.
    pub nan_mismatches: u64,
    /// The largest absolute difference of two values; `null` in JSON when it is infinite.
    pub max_abs: f64,
    /// The largest difference as a share of the magnitude in B; `null` in JSON when that is zero.
    pub max_rel: f64,
    /// The first element in row-major order that differs.
    pub first: Option<Spot>,
    /// The element with the largest difference.
    pub largest: Option<Spot>,
}

/// One element of both tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Spot {
    /// Its index, per axis.
    pub index: Vec<u64>,
    /// Its value in A, as `dcp get --json` writes it.
    pub a: Json,
    /// Its value in B.
    pub b: Json,
}
