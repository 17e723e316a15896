//! Writes tensors into pickles.

use std::convert::Infallible;

use bytes::Bytes;
use dcp_core::FormatError;

use super::layout::{Quantizer, StorageRef, TensorLayout};
use super::storage_class::StorageClass;
use crate::pickle::Writer;

impl TensorLayout {
    /// The `data.pkl` that PyTorch 2.15 writes for this tensor.
    ///
    /// # Errors
    ///
    /// When the storage's key is 4 GiB or longer.
    pub fn to_pickle(&self) -> Result<Bytes, FormatError> {
        let mut writer = Writer::new();
        self.write(&mut writer);
        writer.finish()
    }

    /// Bytes per element of the storage class that the tensor is written with.
    pub(crate) fn storage_element_size(&self) -> u64 {
        StorageClass::of(self.dtype).element_size()
    }

    /// Writes the call that rebuilds this tensor, as part of a larger pickle.
    pub fn write(&self, writer: &mut Writer) {
        let Ok(()) = self.try_write(writer);
    }

    fn try_write(&self, writer: &mut Writer) -> Result<(), Infallible> {
        if self.parameter {
            writer.global("torch._utils", "_rebuild_parameter");
            let inner = Self { parameter: false, requires_grad: false, ..self.clone() };
            writer.tuple(3, |writer| {
                inner.try_write(writer)?;
                writer.bool(self.requires_grad);
                no_hooks(writer);
                Ok::<(), Infallible>(())
            })?;
            writer.call();
            return Ok(());
        }
        let class = StorageClass::of(self.dtype);
        let untyped = class == StorageClass::Untyped;
        let math_bits = self.conj || self.neg;
        let function = match (&self.quantizer, untyped) {
            (Some(_), _) => "_rebuild_qtensor",
            (None, true) => "_rebuild_tensor_v3",
            (None, false) => "_rebuild_tensor_v2",
        };
        writer.global("torch._utils", function);
        let fixed = 6 + usize::from(self.quantizer.is_some());
        let len = fixed + usize::from(untyped) + usize::from(math_bits);
        writer.tuple(len, |writer| {
            self.write_storage(writer, class);
            writer.uint(self.storage_offset);
            writer.uint_tuple(&self.sizes);
            writer.uint_tuple(&self.strides);
            if let Some(quantizer) = &self.quantizer {
                quantizer.write(writer)?;
            }
            writer.bool(self.requires_grad);
            no_hooks(writer);
            if untyped {
                writer.global("torch", self.dtype.name());
            }
            if math_bits {
                let bits = [("conj", self.conj), ("neg", self.neg)];
                let set: Vec<_> = bits.into_iter().filter(|(_, set)| *set).collect();
                writer.dict(set.into_iter(), |writer, (name, _)| {
                    writer.constant(name);
                    writer.bool(true);
                    Ok::<(), Infallible>(())
                })?;
            }
            Ok::<(), Infallible>(())
        })?;
        writer.call();
        Ok(())
    }

    fn write_storage(&self, writer: &mut Writer, class: StorageClass) {
        let StorageRef { key, location, byte_len } = &self.storage;
        writer.storage(class.global(), key, location, byte_len / class.element_size());
    }
}

impl Quantizer {
    fn write(&self, writer: &mut Writer) -> Result<(), Infallible> {
        match self {
            Self::PerTensor { scale, zero_point } => writer.tuple(3, |writer| {
                writer.global("torch", "per_tensor_affine");
                writer.float(*scale);
                writer.int(*zero_point);
                Ok(())
            }),
            Self::PerChannel { scales, zero_points, axis, float_zero_points } => {
                writer.tuple(4, |writer| {
                    let scheme = if *float_zero_points {
                        "per_channel_affine_float_qparams"
                    } else {
                        "per_channel_affine"
                    };
                    writer.global("torch", scheme);
                    scales.try_write(writer)?;
                    zero_points.try_write(writer)?;
                    writer.uint(*axis);
                    Ok(())
                })
            }
        }
    }
}

/// The empty `OrderedDict` of backward hooks.
fn no_hooks(writer: &mut Writer) {
    writer.global("collections", "OrderedDict");
    writer.empty_tuple();
    writer.call();
}
