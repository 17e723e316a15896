//! A save that dies at any operation leaves the old checkpoint or the new one, whole.

use std::sync::Arc;

use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
use dcp_core::{DType, Storage, StorageErrorKind};
use dcp_formats::dcp::{DcpWriter, FileLayout};

use crate::harness::{Loaded, State, get, load, names, put, save};

fn state(seed: u8) -> State {
    State::new(2).rows("w", DType::Float32, &[6, 5], seed).object("step", i64::from(seed))
}

fn place_of_an_old_one() -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::new());
    save(&DcpWriter::new(storage.clone()), &state(1)).unwrap();
    storage
}

fn copy(storage: &dyn Storage) -> Arc<MemoryStorage> {
    let copy = MemoryStorage::new();
    for name in names(storage) {
        put(&copy, &name, get(storage, &name).to_vec());
    }
    Arc::new(copy)
}

fn whole(storage: &Arc<MemoryStorage>) -> Loaded {
    load(storage.clone()).unwrap()
}

/// Saves over `old` with the fault at each operation in turn, until one is past the end.
fn at_every_operation(
    old: Option<&Arc<MemoryStorage>>,
    inject: impl Fn(FaultStorage, u64) -> FaultStorage,
    check: impl Fn(&Arc<MemoryStorage>, bool, &str),
) {
    for n in 1..200 {
        let inner = old.map_or_else(|| Arc::new(MemoryStorage::new()), |old| copy(&**old));
        let storage = inject(FaultStorage::new(inner.clone()), n);
        let writer = DcpWriter::builder(Arc::new(storage.clone())).files(FileLayout::OnePerItem);
        let saved = save(&writer.build(), &state(2)).is_ok();
        check(&inner, saved, &format!("fault at operation {n}"));
        // Whatever is left there, the next save gets through and cleans up.
        save(&DcpWriter::new(inner.clone()), &state(3)).unwrap();
        assert!(whole(&inner).same(&state(3).loaded()), "after a fault at operation {n}");
        let data = names(&*inner).iter().filter(|name| name.ends_with(".distcp")).count();
        assert_eq!(data, 2, "{:?} after a fault at operation {n}", names(&*inner));
        if storage.operations() < n {
            assert!(n > 8, "only {n} operations were tried");
            return;
        }
    }
    panic!("the save never got through");
}

#[test]
fn t02_a_save_that_dies_leaves_the_old_checkpoint() {
    let old = place_of_an_old_one();
    let kill = |storage: FaultStorage, n| storage.dying_after(n - 1);
    let tear = |storage: FaultStorage, n| storage.fault(n, Fault::Tear);
    let check = |inner: &Arc<MemoryStorage>, saved: bool, when: &str| {
        let found = whole(inner);
        if saved {
            assert!(found.same(&state(2).loaded()), "{when}");
        } else {
            let either = found.same(&state(1).loaded()) || found.same(&state(2).loaded());
            assert!(either, "{when}");
        }
    };
    at_every_operation(Some(&old), kill, check);
    at_every_operation(Some(&old), tear, check);
}

#[test]
fn t03_a_first_save_that_dies_is_no_checkpoint_or_a_whole_one() {
    let kill = |storage: FaultStorage, n| storage.dying_after(n - 1);
    at_every_operation(None, kill, |inner, saved, when| match load(inner.clone()) {
        Ok(found) => assert!(found.same(&state(2).loaded()), "{when}"),
        Err(error) => {
            assert!(!saved, "{when}");
            assert!(error.to_string().starts_with("not a checkpoint"), "{when}: {error}");
        }
    });
}

#[test]
fn a_save_that_fails_removes_what_it_wrote() {
    let old = place_of_an_old_one();
    let before = names(&*old);
    let fail = |storage: FaultStorage, n| storage.fault(n, Fault::Fail(StorageErrorKind::Full));
    at_every_operation(Some(&old), fail, |inner, saved, when| {
        if saved {
            assert!(whole(inner).same(&state(2).loaded()), "{when}");
            return;
        }
        assert!(whole(inner).same(&state(1).loaded()), "{when}");
        // A sidecar of metadata that never came may stay: it belongs to nothing.
        let data = |names: &[String]| {
            names.iter().filter(|name| !name.ends_with(".cbor")).cloned().collect::<Vec<_>>()
        };
        assert_eq!(data(&names(&**inner)), data(&before), "{when}");
    });
}

#[test]
fn a_lost_reply_never_makes_a_mix() {
    let old = place_of_an_old_one();
    let lose = |storage: FaultStorage, n| storage.fault(n, Fault::LoseReply);
    at_every_operation(Some(&old), lose, |inner, saved, when| {
        let found = whole(inner);
        let old = !saved && found.same(&state(1).loaded());
        assert!(old || found.same(&state(2).loaded()), "{when}");
    });
}
