//! The tracker of a run, which names its latest checkpoint.

use dcp_core::error::error_chain;
use dcp_core::format::{FormatRegistry, Place, RunTracker};

use super::list_run::RunListing;

/// The tracker of a run; one that cannot be read is noted, and does not keep the others from being listed.
pub(super) async fn tracker(
    formats: &FormatRegistry,
    place: &Place,
    run: &mut RunListing,
) -> Option<RunTracker> {
    for format in formats.formats() {
        match format.tracker(place).await {
            Ok(None) => {}
            Ok(tracker) => return tracker,
            Err(error) => {
                run.tracker_problem = Some(error_chain(&error));
                return None;
            }
        }
    }
    None
}
