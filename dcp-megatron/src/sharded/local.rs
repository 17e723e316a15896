//! A rank's local part of a tensor.

use dcp_core::error::TensorError;
use dcp_core::{DType, Dims, Region, Tensor, TensorView};

/// A rank's part of a tensor: its memory, or a description of it.
#[derive(Clone, Debug)]
pub struct LocalTensor {
    pub(super) dtype: DType,
    pub(super) shape: Dims,
    pub(super) data: Option<TensorView>,
}

impl LocalTensor {
    /// Without memory: enough to describe a shard, and to load it into memory made for it.
    #[must_use]
    pub fn described(dtype: DType, shape: impl Into<Dims>) -> Self {
        Self { dtype, shape: shape.into(), data: None }
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements per local axis.
    #[must_use]
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// The memory, if there is any.
    #[must_use]
    pub fn data(&self) -> Option<&TensorView> {
        self.data.as_ref()
    }

    /// The part `region` of it; of its memory, if there is any.
    ///
    /// # Errors
    ///
    /// When the region is outside.
    pub fn narrow(&self, region: &Region) -> Result<Self, TensorError> {
        let whole = Region::full(self.shape.clone()).ok();
        if !whole.is_some_and(|whole| whole.contains(region)) {
            let problem = format!("region {region} is outside shape {}", self.shape);
            return Err(TensorError::Invalid { fqn: None, problem });
        }
        let data = self.data.as_ref().map(|data| data.narrow(region)).transpose()?;
        Ok(Self { dtype: self.dtype, shape: region.sizes().clone(), data })
    }

    /// Returns the tensor with its axes in another order: axis `i` of the result is axis `axes[i]`
    /// of this.
    ///
    /// # Errors
    ///
    /// When `axes` does not name every axis once.
    pub fn permuted(&self, axes: &[usize]) -> Result<Self, TensorError> {
        let mut seen: Vec<usize> = axes.to_vec();
        seen.sort_unstable();
        if !seen.into_iter().eq(0..self.shape.ndim()) {
            return Err(TensorError::Invalid {
                fqn: None,
                problem: format!("axes {axes:?} are not an order of those of {}", self.shape),
            });
        }
        let shape = axes.iter().filter_map(|axis| self.shape.get(*axis).copied()).collect();
        let named: Vec<Option<usize>> = axes.iter().copied().map(Some).collect();
        let data = self.data.as_ref().map(|data| data.with_axes(&named)).transpose()?;
        Ok(Self { dtype: self.dtype, shape, data })
    }

    /// Removes the first axis, which must have one index.
    pub(super) fn without_first_axis(self) -> Result<Self, TensorError> {
        let axes: Vec<Option<usize>> = (1..self.shape.ndim()).map(Some).collect();
        let shape = self.shape.iter().skip(1).copied().collect();
        let data = self.data.map(|data| data.with_axes(&axes)).transpose()?;
        Ok(Self { dtype: self.dtype, shape, data })
    }
}

impl From<TensorView> for LocalTensor {
    fn from(view: TensorView) -> Self {
        Self { dtype: view.dtype(), shape: view.shape().clone(), data: Some(view) }
    }
}

impl From<&Tensor> for LocalTensor {
    /// A tensor that is here in one piece in host memory. One in several pieces, in none, or on a
    /// device is a description.
    fn from(tensor: &Tensor) -> Self {
        let view = if let [shard] = tensor.shards() { shard.view() } else { None };
        match view {
            Some(view) => view.clone().into(),
            None => Self::described(tensor.dtype(), tensor.shape().clone()),
        }
    }
}

impl From<Tensor> for LocalTensor {
    fn from(tensor: Tensor) -> Self {
        Self::from(&tensor)
    }
}
