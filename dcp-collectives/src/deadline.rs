//! The deadline of a call.

use std::time::{Duration, Instant};

/// The time for which a call waits for its peers by default: 30 minutes, the default of
/// PyTorch's `init_process_group` for gloo.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// The moment at which one call times out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    until: Option<Instant>,
}

impl Deadline {
    /// `duration` from now; a duration that the clock cannot hold is no deadline.
    pub(crate) fn after(duration: Duration) -> Self {
        Self { until: Instant::now().checked_add(duration) }
    }

    /// The time that is left, or `None` once it is over.
    pub(crate) fn left(self) -> Option<Duration> {
        match self.until {
            None => Some(Duration::MAX),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                (!left.is_zero()).then_some(left)
            }
        }
    }
}
