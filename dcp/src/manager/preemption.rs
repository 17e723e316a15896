//! The request to save now, before the machine is taken away.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGTERM;
use signal_hook::flag;

/// A request to save now and stop, as a scheduler makes it before it takes the machine away.
///
/// The trainer polls it with [`CheckpointManager::should_save`](super::CheckpointManager::should_save).
/// Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct Preemption(Arc<AtomicBool>);

impl Preemption {
    /// Nothing requested. The program calls [`request`](Self::request) when it learns of a preemption,
    /// such as from the metadata server of a cloud.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The first SIGTERM of the process requests it, and a second one ends the process as it does by
    /// default. The handler is that of the whole process and stays until its end.
    ///
    /// # Errors
    ///
    /// When the handler cannot be installed.
    pub fn on_sigterm() -> io::Result<Self> {
        let preemption = Self::new();
        // In this order, the first signal finds the flag unset.
        flag::register_conditional_default(SIGTERM, Arc::clone(&preemption.0))?;
        flag::register(SIGTERM, Arc::clone(&preemption.0))?;
        Ok(preemption)
    }

    /// Requests a save.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a save was requested.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn the_first_sigterm_is_a_request() {
        let preemption = Preemption::on_sigterm().unwrap();
        assert!(!preemption.is_requested());
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert!(preemption.is_requested() && preemption.clone().is_requested());
    }
}
