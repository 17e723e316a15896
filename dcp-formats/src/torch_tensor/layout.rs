//! The description of a tensor in a pickle.

use std::ops::Range;

use dcp_core::{DType, Dims, FormatError};

/// A tensor over a storage, with the arguments of `torch._utils._rebuild_tensor_v2` and similar
/// functions.
///
/// Every element is inside the storage, which was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorLayout {
    pub(super) dtype: DType,
    pub(super) sizes: Dims,
    pub(super) strides: Vec<u64>,
    pub(super) storage_offset: u64,
    pub(super) storage: StorageRef,
    pub(super) requires_grad: bool,
    pub(super) parameter: bool,
    pub(super) python_state: bool,
    pub(super) conj: bool,
    pub(super) neg: bool,
    pub(super) quantizer: Option<Quantizer>,
}

/// A storage, by the key of its record `data/<key>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageRef {
    /// The key: in PyTorch the number of the storage, in order of first use.
    pub key: Box<str>,
    /// Length in bytes.
    pub byte_len: u64,
    /// The device of the storage, such as `cpu` or `cuda:0`.
    pub location: Box<str>,
}

/// The parameters that turn quantized elements into real numbers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Quantizer {
    /// `(element - zero_point) * scale`, for `torch.per_tensor_affine`.
    PerTensor {
        /// The scale.
        scale: f64,
        /// The element that represents 0.
        zero_point: i64,
    },
    /// A scale for each index of an axis, for `torch.per_channel_affine`.
    PerChannel {
        /// The scales, one per index.
        scales: Box<TensorLayout>,
        /// The elements that represent 0, one per index.
        zero_points: Box<TensorLayout>,
        /// The axis.
        axis: u64,
        /// Whether zero points are floats (`torch.per_channel_affine_float_qparams`).
        float_zero_points: bool,
    },
}

impl TensorLayout {
    /// A row-major tensor that fills storage `0`, on the CPU.
    ///
    /// # Errors
    ///
    /// When its size exceeds 64 bits, an axis exceeds PyTorch's signed sizes, or the dtype is
    /// quantized, whose elements have no meaning without a scale.
    pub fn contiguous(dtype: DType, sizes: impl Into<Dims>) -> Result<Self, FormatError> {
        let sizes = sizes.into();
        if dtype.is_quantized() {
            return Err(bad(format!("{dtype} needs a scale, which is not known here")));
        }
        let strides =
            sizes.contiguous_strides().iter().map(|stride| stride.unsigned_abs()).collect();
        let mut layout = Self {
            dtype,
            sizes,
            strides,
            storage_offset: 0,
            storage: StorageRef { key: "0".into(), byte_len: 0, location: "cpu".into() },
            requires_grad: false,
            parameter: false,
            python_state: false,
            conj: false,
            neg: false,
            quantizer: None,
        };
        layout.storage.byte_len = layout.checked_byte_len().ok_or_else(|| layout.too_large())?;
        layout.checked()
    }

    /// Sets the device of the storage.
    #[must_use]
    pub(crate) fn with_device(mut self, device: &str) -> Self {
        self.storage.location = device.into();
        self
    }

    /// The key of the storage.
    #[must_use]
    pub fn storage_key(&self) -> &str {
        &self.storage.key
    }

    /// Sets the key of the storage.
    #[must_use]
    pub fn with_storage_key(mut self, key: impl Into<Box<str>>) -> Self {
        self.storage.key = key.into();
        self
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements per axis.
    #[must_use]
    pub fn sizes(&self) -> &Dims {
        &self.sizes
    }

    /// The distance of adjacent indices in elements, per axis.
    #[must_use]
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// The offset of the first element in the storage, in elements.
    #[must_use]
    pub fn storage_offset(&self) -> u64 {
        self.storage_offset
    }

    /// The storage.
    #[must_use]
    pub fn storage(&self) -> &StorageRef {
        &self.storage
    }

    /// Whether autograd tracks the tensor.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Whether a `torch.nn.Parameter` wraps it.
    #[must_use]
    pub fn is_parameter(&self) -> bool {
        self.parameter
    }

    /// Whether the Python object has more than these elements: a subclass, attributes, or another
    /// device. [`write`](Self::write) omits that.
    #[must_use]
    pub fn has_python_state(&self) -> bool {
        self.python_state
    }

    /// Whether the elements are the complex conjugates of the stored ones.
    #[must_use]
    pub fn is_conj(&self) -> bool {
        self.conj
    }

    /// Whether the elements are the negatives of the stored ones.
    #[must_use]
    pub fn is_neg(&self) -> bool {
        self.neg
    }

    /// The parameters of quantized elements.
    #[must_use]
    pub fn quantizer(&self) -> Option<&Quantizer> {
        self.quantizer.as_ref()
    }

    /// The size of all elements in bytes, without gaps.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.checked_byte_len().unwrap_or(u64::MAX)
    }

    /// The byte range of the elements in the storage, if they are stored unencoded and row-major.
    #[must_use]
    pub fn contiguous_range(&self) -> Option<Range<u64>> {
        let as_they_are = !self.conj && !self.neg;
        as_they_are.then(|| self.row_major_range()).flatten()
    }

    pub(super) fn row_major_range(&self) -> Option<Range<u64>> {
        if self.byte_len() == 0 {
            return Some(0..0);
        }
        let mut expected = 1_u64;
        let row_major = self.sizes.iter().zip(&self.strides).rev().all(|(size, is)| {
            let agrees = *size == 1 || *is == expected;
            expected = expected.saturating_mul(*size);
            agrees
        });
        let start = self.storage_offset.checked_mul(self.dtype.size() as u64)?;
        row_major.then_some(start..start.checked_add(self.byte_len())?)
    }

    /// Returns the layout if the tensor is inside its storage.
    pub(super) fn checked(self) -> Result<Self, FormatError> {
        if self.sizes.ndim() > Dims::MAX_AXES {
            let (axes, max) = (self.sizes.ndim(), Dims::MAX_AXES);
            return Err(bad(format!("it has {axes} axes, more than {max}")));
        }
        let signed = |value: &u64| i64::try_from(*value).is_ok();
        if self.strides.len() != self.sizes.ndim() {
            let (strides, sizes) = (self.strides.len(), &self.sizes);
            return Err(bad(format!("{strides} strides for a tensor of shape {sizes}")));
        }
        if !self.sizes.iter().chain(&self.strides).all(signed) {
            return Err(self.too_large());
        }
        let byte_len = self.checked_byte_len().ok_or_else(|| self.too_large())?;
        let end = if byte_len == 0 {
            Some(0)
        } else if self.elements_per_byte() > 1 {
            // Packed elements cannot be addressed, so PyTorch stores them row-major.
            self.row_major_range().map(|range| range.end)
        } else {
            self.last_element().and_then(|last| (last + 1).checked_mul(self.dtype.size() as u64))
        };
        if end.is_none_or(|end| end > self.storage.byte_len) {
            return Err(bad(format!(
                "{} of shape {}, strides {:?} and offset {} does not fit its storage of {} bytes",
                self.dtype, self.sizes, self.strides, self.storage_offset, self.storage.byte_len
            )));
        }
        Ok(self)
    }

    fn last_element(&self) -> Option<u64> {
        let mut last = self.storage_offset;
        for (size, stride) in self.sizes.iter().zip(&self.strides) {
            last = last.checked_add(size.checked_sub(1)?.checked_mul(*stride)?)?;
        }
        (last < u64::MAX).then_some(last)
    }

    fn elements_per_byte(&self) -> u64 {
        match self.dtype {
            DType::QUInt4x2 => 2,
            DType::QUInt2x4 => 4,
            _ => 1,
        }
    }

    fn checked_byte_len(&self) -> Option<u64> {
        let elements = self.sizes.checked_volume()?;
        elements.div_ceil(self.elements_per_byte()).checked_mul(self.dtype.size() as u64)
    }

    fn too_large(&self) -> FormatError {
        bad(format!("{} of shape {} is too large to be stored", self.dtype, self.sizes))
    }
}

pub(super) fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new("tensor pickle", problem)
}
