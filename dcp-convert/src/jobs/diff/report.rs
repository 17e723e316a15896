//! How two checkpoints differ.

use std::sync::Arc;

use serde::Serialize;

use crate::keys::unmatched::UnmatchedPattern;

type Json = serde_json::Value;

/// The differences of two checkpoints. Serialized, they are the output of `dcp diff --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DiffReport {
    /// Whether there is no difference.
    pub equal: bool,
    /// What was compared.
    pub compared: DiffScope,
    /// How many differences there are of each kind.
    pub counts: DiffCounts,
    /// The differences, the gravest first.
    pub differences: Vec<Difference>,
    /// Patterns that were given for keys and match none of either checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<UnmatchedPattern>,
}

/// What was compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DiffScope {
    /// Keys of A that were chosen.
    pub keys_a: usize,
    /// Keys of B that were chosen.
    pub keys_b: usize,
    /// Tensors in both.
    pub tensors: usize,
    /// Objects in both.
    pub objects: usize,
    /// Whether values were compared, or only keys, shapes and dtypes.
    pub values: bool,
    /// Bytes of elements that were read of each side and compared.
    pub bytes: u64,
}

/// Differences by kind.
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
    /// Tensors of different dtypes with equal values, or none that could be compared.
    pub dtype: usize,
}

/// One key that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Difference {
    /// The name under which it was compared.
    pub key: Arc<str>,
    /// Its name in A, where that is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_a: Option<Arc<str>>,
    /// Its name in B, where that is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_b: Option<Arc<str>>,
    /// What is different.
    #[serde(flatten)]
    pub what: DifferenceKind,
}

/// What is different about a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
#[non_exhaustive]
pub enum DifferenceKind {
    /// It is a tensor in one and an object in the other.
    Kind {
        /// What it is in A.
        a: Described,
        /// What it is in B.
        b: Described,
    },
    /// The shapes differ, so no values were compared.
    Shape {
        /// The tensor in A.
        a: Described,
        /// The tensor in B.
        b: Described,
    },
    /// It is only in A.
    OnlyInA {
        /// What it is.
        a: Described,
    },
    /// It is only in B.
    OnlyInB {
        /// What it is.
        b: Described,
    },
    /// Values differ.
    Values(Box<ValueDifference>),
    /// The objects differ.
    Object {
        /// Where the first difference is, such as `["history"][3]`; empty for all of it.
        path: String,
        /// What is there in A, as [`value_json`](crate::value_json()) writes it; `null` for
        /// `None` and where there is nothing.
        a: Json,
        /// The same of B.
        b: Json,
        /// The side that has nothing there, `a` or `b`, if one has not.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing: Option<&'static str>,
    },
    /// The dtypes differ, and nothing else that was compared.
    Dtype {
        /// The tensor in A.
        a: Described,
        /// The tensor in B.
        b: Described,
        /// Whether values of the two can be compared: those of a complex and a real dtype, or
        /// of a packed and a plain one, cannot.
        comparable: bool,
    },
}

impl DifferenceKind {
    /// Graver differences have lower ranks; within a rank, larger ones come first.
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

/// What is stored under a key.
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

/// How the elements of two tensors of one shape differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ValueDifference {
    /// The element type in A.
    pub dtype_a: &'static str,
    /// The element type in B.
    pub dtype_b: &'static str,
    /// Elements per axis.
    pub shape: Vec<u64>,
    /// Elements of each.
    pub count: u64,
    /// Elements that differ by more than the tolerance; without one, in any bit.
    pub different: u64,
    /// Values of which one is NaN and the other is not.
    pub nan_mismatches: u64,
    /// The largest absolute difference of two values; `null` in JSON when it is infinite.
    pub max_abs: f64,
    /// The largest difference as a share of the magnitude in B; `null` in JSON when that is zero.
    pub max_rel: f64,
    /// The first element in row-major order that differs.
    pub first: Option<Spot>,
    /// The one with the largest difference.
    pub largest: Option<Spot>,
}

/// An element of both tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Spot {
    /// Where it is, per axis.
    pub index: Vec<u64>,
    /// Its value in A, as `dcp get --json` writes it.
    pub a: Json,
    /// Its value in B.
    pub b: Json,
}
