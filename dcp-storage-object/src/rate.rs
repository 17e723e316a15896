//! The slowest answer that is waited for.

use std::time::Duration;

use tokio::time::Instant;

/// The bytes that an answer brings in a second at least, on average of the time of a stall. 32 requests
/// that share a line of one megabit have four times as many.
const BYTES_PER_SECOND_MIN: u64 = 1024;

/// The rate of an answer.
pub(crate) struct Rate {
    span: Duration,
    since: Instant,
    bytes: u64,
}

impl Rate {
    /// The rate from now on, on average of spans of this time.
    pub(crate) fn over(span: Duration) -> Self {
        Self { span, since: Instant::now(), bytes: 0 }
    }

    /// Counts bytes. Returns those of a span that were too few.
    pub(crate) fn count(&mut self, bytes: usize) -> Result<(), u64> {
        self.bytes += bytes as u64;
        if self.since.elapsed() < self.span {
            return Ok(());
        }
        let bytes = self.bytes;
        *self = Self::over(self.span);
        let min = self.span.as_millis().saturating_mul(BYTES_PER_SECOND_MIN.into()) / 1000;
        if u128::from(bytes) < min { Err(bytes) } else { Ok(()) }
    }
}

/// The additional time that an answer of `len` bytes may take, compared with one of none.
pub(crate) fn time_for(len: u64) -> Duration {
    Duration::from_secs(len / BYTES_PER_SECOND_MIN)
}
