//! A process that is killed while it saves: this program, started again.

use std::process::{Command, Stdio};
use std::time::Duration;

use dcp_conformance::http::{FaultRule, HttpFault};
use dcp_core::storage::LeftoverAction;

use crate::checkpoint::{loaded, save_on_one};
use crate::place::{Answers, Place, Store, block_on};

const URL: &str = "DCP_TEST_CHILD_URL";
const ENDPOINT: &str = "DCP_TEST_CHILD_ENDPOINT";
const STORE: &str = "DCP_TEST_CHILD_STORE";

pub(crate) fn is_child() -> bool {
    std::env::var_os(URL).is_some()
}

/// Saves step 2.
pub(crate) fn save_as_child() {
    let [url, endpoint, store] = [URL, ENDPOINT, STORE].map(|name| std::env::var(name).unwrap());
    let storage = Store::named(&store).open(&url, &endpoint, Answers::All);
    save_on_one(&storage, 2).unwrap();
}

/// The process stops in each of its requests in turn, which the store has answered, and is killed
/// there.
pub(crate) fn killed_saves(place: &Place) {
    let store = place.store;
    save_on_one(&place.storage(), 1).unwrap();
    place.proxy.clear();
    save_on_one(&place.storage(), 2).unwrap();
    let requests = place.proxy.traffic().requests;
    let mut loaded_before = 1;
    for request in 0..requests {
        let place = Place::new(store);
        save_on_one(&place.storage(), 1).unwrap();
        place.proxy.add(FaultRule::new(HttpFault::Stall).after(request));
        let (url, endpoint) = place.address();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .envs([(URL, url), (ENDPOINT, endpoint)])
            .env(STORE, store.name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let is_stalled = place.proxy.kill_when_stalled(&mut child).unwrap();
        assert!(is_stalled, "the save ended before request {request}");

        let step = loaded(&place.storage()).unwrap();
        assert!(step == 2 || step == loaded_before, "step {step} at request {request}");
        loaded_before = step;
        save_on_one(&place.storage(), 3).unwrap();
        assert_eq!(loaded(&place.storage()).unwrap(), 3);
        let names = place.names();
        assert_eq!(names.len(), 3, "data, metadata and sidecar: {names:?}");
        let storage = place.storage();
        let remove =
            || block_on(storage.leftovers(None, Duration::ZERO, LeftoverAction::Remove)).unwrap();
        remove();
        assert_eq!(remove(), [], "uploads are left");
    }
    assert_eq!(loaded_before, 2);
}
