//! Vocabulary and contracts of distributed checkpoints.
mod collective;
mod dims;
mod dtype;
mod error;
mod key;
mod memory;
mod payload;
mod region;
mod storage;
mod tensor;
mod value;

pub use collective::Collective;
pub use dims::{Dims, checked_volume};
pub use dtype::{DType, UnknownDType};
pub use error::*;
pub use key::{InvalidKey, Key};
pub use memory::{Buffer, HostMemory, LoanError};
pub use payload::Payload;
pub use region::{Region, RegionError, Runs};
pub use storage::*;
pub use tensor::{Shard, Tensor, TensorView};
pub use value::{BigInt, Dict, Global, Object, Opaque, Value};
