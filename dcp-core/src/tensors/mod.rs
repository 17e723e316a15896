//! Tensors: their geometry, their memory on a host or a device, and views of their elements.

pub mod device;
pub mod dims;
pub mod dtype;
pub(crate) mod error;
pub mod memory;
pub mod overlap;
pub(crate) mod payload;
pub mod region;
pub mod tensor;
pub(crate) mod tensor_view;
