//! Memory that is borrowed for the time of a closure.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use super::HostMemory;
use super::element::{Element, Number};

/// Calls `body` with a [`Scope`] that borrows slices as [`HostMemory`].
///
/// When `body` ends, also by a panic, the memories of the scope are revoked: a later loan is
/// [`LoanError::Revoked`](super::LoanError::Revoked). Then the scope waits until the last loan has
/// ended, such as one of a write under way on another thread. So a loan that `body` returns, or
/// that is never dropped, makes it wait forever.
///
/// ```
/// use dcp_core::memory::{LoanError, scope};
/// use dcp_core::{DType, Tensor};
///
/// let mut weight = [1.0_f32, 2.0];
/// let memory = scope(|scope| {
///     let memory = scope.borrow_mut(&mut weight);
///     let tensor = Tensor::replicated(DType::Float32, [2], memory.clone())?;
///     assert_eq!(tensor.elements::<f32>()?[1], 2.0);
///     // A load fills the memory of the tensor.
///     memory.lend(0..4).unwrap().fill(0);
///     Ok::<_, dcp_core::PlanError>(memory)
/// })?;
/// assert_eq!(weight, [0.0, 2.0]);
/// assert_eq!(memory.read().unwrap_err(), LoanError::Revoked);
/// # Ok::<(), dcp_core::PlanError>(())
/// ```
pub fn scope<'env, T>(body: impl FnOnce(&Scope<'env>) -> T) -> T {
    let scope = Scope { borrowed: Mutex::default(), env: PhantomData };
    body(&scope)
}

/// Borrows slices as [`HostMemory`] until its [`scope`] ends.
///
/// On machines that are not little-endian, as the elements of checkpoints are, it does not exist.
#[derive(Debug)]
pub struct Scope<'env> {
    borrowed: Mutex<Vec<HostMemory>>,
    /// Invariant: a scope of a long borrow is none of a short one, nor the reverse.
    env: PhantomData<&'env mut &'env ()>,
}

#[cfg(target_endian = "little")]
impl<'env> Scope<'env> {
    /// Borrows elements for reading, as those of tensors that are saved.
    pub fn borrow<T: Element>(&self, elements: &'env [T]) -> HostMemory {
        let ptr = NonNull::from(elements).cast::<u8>();
        self.add(HostMemory::new(ptr, size_of_val(elements), true, Box::new(())))
    }

    /// Borrows numbers for reading and writing, as those of tensors that are loaded.
    pub fn borrow_mut<T: Number>(&self, elements: &'env mut [T]) -> HostMemory {
        let len = size_of_val(elements);
        let ptr = NonNull::from(elements).cast::<u8>();
        self.add(HostMemory::new(ptr, len, false, Box::new(())))
    }

    /// Keeps a memory for the end. Its pointer is valid until then by `'env`, which outlives the
    /// call of [`scope`], and nobody else writes to it (or accesses it, by `&mut`); any bytes are
    /// valid numbers. No loan exists after the end (invariant 4).
    fn add(&self, memory: HostMemory) -> HostMemory {
        self.borrowed().push(memory.clone());
        memory
    }
}

impl Scope<'_> {
    fn borrowed(&self) -> std::sync::MutexGuard<'_, Vec<HostMemory>> {
        self.borrowed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        for HostMemory(memory) in self.borrowed().drain(..) {
            memory.revoke();
        }
    }
}
