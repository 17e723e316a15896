//! Memory that is borrowed for the time of a closure.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use super::HostMemory;
use super::element::{NumericElement, TensorElement};

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
    pub fn borrow<T: TensorElement>(&self, elements: &'env [T]) -> HostMemory {
        let ptr = NonNull::from(elements).cast::<u8>();
        self.add(HostMemory::borrowed(ptr, size_of_val(elements), true))
    }

    /// Borrows numbers for reading and writing, as those of tensors that are loaded.
    pub fn borrow_mut<T: NumericElement>(&self, elements: &'env mut [T]) -> HostMemory {
        let len = size_of_val(elements);
        let ptr = NonNull::from(elements).cast::<u8>();
        self.add(HostMemory::borrowed(ptr, len, false))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::memory::LoanError;

    #[test]
    fn a_scope_revokes_what_it_borrowed() {
        let (mut written, read) = (vec![0_i16; 3], [7_u8; 2]);
        let (a, b, empty) = scope(|scope| {
            let a = scope.borrow_mut(&mut written);
            let b = scope.borrow(&read);
            a.lend(2..4).unwrap().fill(1);
            assert_eq!(b.read().unwrap(), [7, 7][..]);
            assert_eq!(b.lend(0..1).unwrap_err(), LoanError::ReadOnly);
            let empty = a.lend(6..6).unwrap();
            (a, b, empty)
        });
        assert_eq!(written, [0, 0x101, 0]);
        drop(written);
        assert_eq!(a.lend(0..1).unwrap_err(), LoanError::Revoked);
        assert_eq!(a.read().unwrap_err(), LoanError::Revoked);
        assert_eq!(b.read().unwrap_err(), LoanError::Revoked);
        assert!(empty.is_empty() && empty.freeze().is_empty());
    }

    #[test]
    fn a_scope_waits_for_the_loans_of_other_threads() {
        let mut numbers = [0_u32; 4];
        let (ended, at_work) = std::sync::mpsc::channel::<()>();
        scope(|scope| {
            let memory = scope.borrow_mut(&mut numbers);
            let (mut front, back) = (memory.lend(0..8).unwrap(), memory.lend(8..16).unwrap());
            std::thread::spawn(move || {
                let _ = at_work.recv();
                front.fill(2);
                drop((front, back));
            });
            // From here on the loans end at any time, before or after the closure.
            drop(ended);
        });
        assert_eq!(numbers, [0x0202_0202, 0x0202_0202, 0, 0]);
    }

    #[test]
    fn a_panic_in_a_scope_revokes_as_well() {
        let numbers = [1_u8; 4];
        let kept = Mutex::new(None);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            scope(|scope| {
                *kept.lock().unwrap() = Some(scope.borrow(&numbers));
                panic!("in the scope");
            })
        }));
        assert!(panicked.is_err());
        let memory = kept.into_inner().unwrap().unwrap();
        assert_eq!(memory.read().unwrap_err(), LoanError::Revoked);
    }
}
