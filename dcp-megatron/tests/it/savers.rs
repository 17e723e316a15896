//! Two savers in one folder: one wins, and its checkpoint is whole.

use std::sync::Arc;
use std::task::{Context, Waker};

use dcp_conformance::{MemoryStorage, StallStorage};
use dcp_core::error::error_chain;
use dcp_jobs::JobOptions;
use dcp_jobs::reshard::reshard;

use crate::support::block_on;
use crate::writer::{FORMS, load, other_source, save, source, writer};

#[test]
fn of_two_savers_stopped_at_any_step_one_wins_and_its_checkpoint_is_whole() {
    for form in FORMS {
        let mut refused = 0;
        for stop in 1.. {
            let memory = Arc::new(MemoryStorage::new());
            save(&source(), &writer(memory.clone(), form, 9)).unwrap();
            let stalled = StallStorage::new(memory.clone(), stop);
            let (source, other) = (source(), other_source());
            let late = writer(Arc::new(stalled.clone()), form, 1);
            let options = JobOptions::default();
            let mut late = Box::pin(reshard(&source, &late, 2, &options));
            let mut context = Context::from_waker(Waker::noop());
            if late.as_mut().poll(&mut context).is_ready() {
                assert!(refused > 10, "{refused}");
                break;
            }
            let second = save(&other, &writer(memory.clone(), form, 2));
            stalled.resume();
            let first = block_on(late).map(|_| ());
            let outcomes = [first, second];
            for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
                // The late saver may look at the folder before it holds the claim. Then the file that it
                // creates is one of the other saver's.
                let chain = error_chain(error);
                let refusals = ["another writer", "it exists already"];
                assert!(refusals.iter().any(|refusal| chain.contains(refusal)), "{chain}");
                refused += 1;
            }
            let (_, winner) = load(&memory).unwrap_or_else(|| panic!("stopped at {stop}"));
            assert!(outcomes[winner as usize - 1].is_ok(), "stopped at {stop}: {outcomes:?}");
        }
    }
}
