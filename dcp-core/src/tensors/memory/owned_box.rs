//! A boxed slice of which others have pointers.

/// Frees a boxed slice on drop and never accesses its elements before, so that pointers derived
/// from it stay valid.
pub(super) struct OwnedBox<T>(*mut [T]);

impl<T> OwnedBox<T> {
    /// # Safety
    ///
    /// `raw` must come from `Box::into_raw` and be freed by nobody else.
    pub(super) unsafe fn new(raw: *mut [T]) -> Self {
        Self(raw)
    }
}

impl<T> Drop for OwnedBox<T> {
    fn drop(&mut self) {
        // SAFETY: by the promise of `new`, and `drop` runs once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

// SAFETY: a boxed slice of elements may be sent to and shared with other threads as they may.
unsafe impl<T: Send> Send for OwnedBox<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for OwnedBox<T> {}
