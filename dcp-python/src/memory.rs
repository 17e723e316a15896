//! Memory of Python's tensors as [`HostMemory`]: the only module of this crate with `unsafe`.
//!
//! Python describes a tensor by a pointer, the number of bytes from it, and the object that keeps them valid: a
//! `torch.Tensor` on the CPU or a NumPy array. The Rust side lends these bytes to reads and writes that run without
//! the GIL.
//!
//! # Safety
//!
//! 1. The bytes are valid as long as the object lives: PyTorch's storages and NumPy's arrays do not move, and the
//!    package's Python code, the only caller, takes pointer and length of the object that it passes. The memory owns a
//!    reference to the object, which is dropped with the last loan.
//! 2. All bytes are initialized in the sense of the machine: they are numbers of any bits.
//! 3. Nobody else writes while a loan is out. Python code can break this, as it can with PyTorch's own saves, by
//!    changing a tensor in another thread during a save of it. The elements are then torn, which is why a background
//!    save copies first; no code of Rust makes a decision on an element.

#![allow(unsafe_code, reason = "the leaf module that takes pointers of Python, see above")]

use std::ptr::NonNull;

use dcp::core::HostMemory;
use pyo3::prelude::*;

/// The `byte_len` bytes at `address`, which `owner` keeps valid.
pub(crate) fn of_object(address: usize, byte_len: usize, owner: Py<PyAny>) -> HostMemory {
    let Some(ptr) = NonNull::new(address as *mut u8).filter(|_| byte_len > 0) else {
        return HostMemory::zeroed(0);
    };
    // SAFETY: points 1 to 3 of the module.
    unsafe { HostMemory::from_raw_parts(ptr, byte_len, owner) }
}
