//! Overwrites that die at any operation, and what is read of the folder then.

use std::sync::Arc;

use dcp_conformance::{Fault, FaultStorage, MemoryStorage};
use dcp_core::{Storage, Value};
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::disk::{recovered, verify_integrity};
use dcp_megatron::sharded::ShardedStateDict;
use dcp_megatron::{
    MegatronCheckpoint, MegatronForm, MegatronLoadOptions, MegatronOpenOptions, MegatronWriter,
    load as load_state,
};

use crate::ranks::on_boxed_ranks;
use crate::support::{block_on, copy, names, objects};
use crate::writer::{FORMS, Found, common, load, other_source, save, source, writer};

/// What dcp finds, also where the process that wrote it died.
fn load_recovered(storage: &Arc<MemoryStorage>) -> Option<Found> {
    let shown = block_on(recovered(&(Arc::clone(storage) as Arc<dyn Storage>))).unwrap();
    load(&copy(&*shown))
}

#[test]
fn trap_10_a_save_that_dies_is_the_old_checkpoint_the_new_one_or_none() {
    let reference = |source: &Source, form, seed| {
        let storage = Arc::new(MemoryStorage::new());
        save(source, &writer(storage.clone(), form, seed)).unwrap();
        (load(&storage).unwrap(), storage)
    };
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        let (old, place) = reference(&source(), from, 1);
        let (new, _) = reference(&other_source(), to, 2);
        // What was found of the objects that a death left.
        let mut known = Vec::new();
        for torn in [false, true] {
            let mut seen = [false; 3];
            let mut n = 0;
            loop {
                n += 1;
                let inner = copy(&*place);
                let storage = FaultStorage::new(inner.clone());
                let storage = match torn {
                    true => storage.fault(n, Fault::Tear),
                    false => storage.dying_after(n - 1),
                };
                let saved = save(&other_source(), &writer(Arc::new(storage.clone()), to, 2));
                let when = format!("{from:?} to {to:?}, dead at operation {n}, torn: {torn}");
                let left = objects(&*inner);
                let passed = storage.operations() < n;
                if let Some((_, which)) = known.iter().find(|(objects, _)| *objects == left) {
                    seen[*which] = true;
                    assert!(saved.is_err() || *which == 2, "{when}");
                    if passed {
                        break;
                    }
                    continue;
                }
                let (found, ours) = (load(&inner), load_recovered(&inner));
                let which = match &found {
                    None => 0,
                    Some(found) if *found == old => 1,
                    Some(found) => {
                        assert_eq!(*found, new, "{when}");
                        2
                    }
                };
                seen[which] = true;
                known.push((left, which));
                assert!(saved.is_err() || which == 2, "{when}");
                if from == MegatronForm::CommonInside && to == from {
                    assert!(found.is_some(), "a moment without a checkpoint: {when}");
                }
                assert!(ours == Some(old.clone()) || ours == Some(new.clone()), "{when}");
                assert!(found.is_none() || found == ours, "{when}");
                let unwilling = MegatronWriter::builder(inner.clone()).common(common(4)).form(to);
                assert!(
                    save(&source(), &unwilling.build()).is_err(),
                    "it is not to be lost: {when}"
                );
                assert_eq!(load_recovered(&inner), ours, "{when}");
                let opened = inner.clone() as Arc<dyn Storage>;
                let opened =
                    block_on(MegatronCheckpoint::open(&opened, &MegatronOpenOptions::default()));
                let common = opened.unwrap().common().clone();
                let seed = common.get("iteration").and_then(Value::as_int);
                assert_eq!(seed, ours.map(|ours| ours.1), "{when}");
                // Whatever is left there, the next save gets through and cleans up.
                save(&source(), &writer(inner.clone(), to, 3)).unwrap();
                assert_eq!(load(&inner).unwrap(), (old.0.clone(), 3), "{when}");
                let data = names(&*inner).iter().filter(|name| name.ends_with(".distcp")).count();
                let expected = if to == MegatronForm::CommonInside { 3 } else { 2 };
                assert_eq!(data, expected, "{when}: {:?}", names(&*inner));
                if passed {
                    break;
                }
            }
            assert!(n > 15, "only {n} operations were tried");
            let gap = !(from == MegatronForm::CommonInside && to == from);
            assert_eq!(seen, [gap, true, true], "{from:?} to {to:?}");
        }
    }
}

/// The hashes of the files go with the checkpoint: the old one keeps its own until `.metadata` is
/// replaced, whatever the place of the common state, and none are of other files.
#[test]
fn an_overwrite_that_dies_keeps_the_hashes_of_the_old_checkpoint() {
    let with_hashes = |storage: Arc<dyn Storage>, form, seed| {
        let writer = MegatronWriter::builder(storage).common(common(seed)).form(form);
        writer.overwrite(true).integrity(true).build()
    };
    for (from, to) in FORMS.iter().flat_map(|from| FORMS.map(|to| (*from, to))) {
        let place = Arc::new(MemoryStorage::new());
        save(&source(), &with_hashes(place.clone(), from, 1)).unwrap();
        let mut last = None;
        for n in 1.. {
            let inner = copy(&*place);
            let storage = FaultStorage::new(inner.clone()).dying_after(n - 1);
            let saved = save(&other_source(), &with_hashes(Arc::new(storage.clone()), to, 2));
            let left = Some(objects(&*inner));
            if saved.is_err() && left == last {
                continue;
            }
            last = left;
            let shown = block_on(recovered(&(Arc::clone(&inner) as Arc<dyn Storage>))).unwrap();
            let when = format!("{from:?} to {to:?}, dead at operation {n}");
            let wrong = block_on(verify_integrity(&shown, &JobOptions::default())).unwrap();
            let is_old = load(&copy(&*shown)).unwrap().1 == 1;
            assert!(wrong.is_some() || !is_old && saved.is_err(), "no hashes: {when}");
            assert!(wrong.is_none_or(|wrong| wrong.is_empty()), "{when}");
            if storage.operations() < n {
                break;
            }
        }
    }
}

/// The ranks of a group see the same, although only the first one opens the folder.
#[test]
fn the_ranks_of_a_group_load_what_an_overwrite_that_died_left() {
    let place = Arc::new(MemoryStorage::new());
    save(&source(), &writer(place.clone(), MegatronForm::CommonFile, 1)).unwrap();
    let mut left = 0;
    for n in 1.. {
        let inner = copy(&*place);
        let storage = FaultStorage::new(inner.clone()).dying_after(n);
        let writer = writer(Arc::new(storage.clone()), MegatronForm::CommonFile, 2);
        if save(&other_source(), &writer).is_ok() {
            break;
        }
        if names(&*inner).contains(&"metadata.json".to_owned()) {
            continue;
        }
        left += 1;
        let loaded = on_boxed_ranks(2, |_, group| {
            let inner = inner.clone() as Arc<dyn Storage>;
            let options = MegatronLoadOptions::new().group(group.into());
            block_on(load_state(&ShardedStateDict::new(), &inner, &options)).unwrap().state
        });
        let seeds: Vec<_> = loaded
            .iter()
            .map(|state| state.get("iteration").and_then(Value::as_int).unwrap())
            .collect();
        assert!(seeds == [1, 1] || seeds == [2, 2], "dead after {n} operations: {seeds:?}");
    }
    assert!(left > 1, "no death left a folder without metadata.json");
}
