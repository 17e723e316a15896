//! What is fuzzed: trace files.

use dcp_trace::{Trace, TraceSummary};

/// A file that is a trace has a summary, and is the same after it is written again.
pub(crate) fn trace(bytes: &[u8]) {
    let Ok(trace) = Trace::parse(bytes) else { return };
    let summary = TraceSummary::of(&trace);
    assert!(summary.ranks.len() <= trace.events.len());
    let mut written = Vec::new();
    if trace.write(&mut written).is_ok() {
        let again = Trace::parse(&written).map(|again| again.events.len());
        assert_eq!(again.ok(), Some(trace.events.len()));
    }
}
