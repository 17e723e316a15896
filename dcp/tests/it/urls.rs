//! One chain from a URL, with schemes and settings of the caller's own, in a group.

use std::sync::Arc;

use dcp::core::StorageErrorKind;
use dcp::core::error::FailureKind;
use dcp::core::error::StorageOp;
use dcp::{
    AppState, CheckpointError, Checkpointer, DType, Settings, StateDict, Stateful, StorageRegistry,
};
use dcp_conformance::{FaultStorage, MemoryStorage};
use dcp_testing::on_ranks;

use crate::state::{blank, state, step_of};

/// A checkpointer with the scheme `mem`.
fn checkpointer(storage: &MemoryStorage, settings: Settings) -> Checkpointer {
    Checkpointer::with_settings(settings).storages(storages(storage, false))
}

/// Storages with the scheme `mem`, whose storage is gone for `broken` ranks.
fn storages(storage: &MemoryStorage, broken: bool) -> StorageRegistry {
    let mut storages = dcp::default_storages();
    let storage = storage.clone();
    storages.register("mem", move |request| {
        if broken {
            let full = dcp::core::StorageError::new(StorageErrorKind::Full, StorageOp::Open, None);
            return Err(full.with_message(&*request.url));
        }
        Ok(Arc::new(storage.clone()))
    });
    storages
}

#[test]
fn a_scheme_of_the_caller_serves_saves_loads_and_background_saves() {
    let storage = MemoryStorage::new();
    on_ranks(3, |_, group| {
        let (rank, world) = (group.rank(), group.world_size());
        let checkpointer = checkpointer(&storage, Settings::in_group(group));
        let plain = checkpointer.save(&state(1, rank, world), "mem://run").blocking().unwrap();
        assert!(!plain.reused_plan);
        let saving = checkpointer.save(&state(2, rank, world), "mem://run").background().unwrap();
        // It waits for the save, with which it shares the group.
        let mut loaded = blank(rank, world);
        checkpointer.load(&mut loaded, "mem://run").blocking().unwrap();
        assert_eq!(step_of(&loaded), 2);
        assert!(dcp::block_on(saving.wait()).unwrap().unwrap().reused_plan);
    });
    #[cfg(feature = "jobs")]
    {
        let opener = dcp::opener(checkpointer_storages(&storage));
        dcp::block_on(opener.open("mem://run")).unwrap().unwrap();
    }
}

/// The rank that cannot open its storage must not leave the others waiting.
#[test]
fn a_storage_that_does_not_open_on_one_rank_fails_every_entry_point_on_all_ranks() {
    let storage = MemoryStorage::new();
    let healthy = checkpointer(&storage, Settings::new());
    healthy.save(&state(1, 0, 1), "mem://run").blocking().unwrap();
    let results = on_ranks(3, |_, group| {
        let (rank, world) = (group.rank(), group.world_size());
        let checkpointer = Checkpointer::in_group(group).storages(storages(&storage, rank == 2));
        let save = || checkpointer.save(&state(2, rank, world), "mem://run");
        let mut loaded = blank(rank, world);
        [
            save().blocking().unwrap_err(),
            checkpointer.load(&mut loaded, "mem://run").blocking().unwrap_err(),
            save().background().and_then(|save| dcp::block_on(save.wait())?).unwrap_err(),
        ]
    });
    for error in results.into_iter().flatten() {
        let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
        let kind = FailureKind::Storage(StorageErrorKind::Full);
        assert_eq!((failures.len(), failures[0].rank, failures[0].kind), (1, 2, kind));
        assert_eq!((error.kind(), error.is_retryable()), (kind, false));
    }
}

#[test]
fn a_disk_that_fills_up_on_one_rank_is_a_full_disk_on_every_rank() {
    let storage = MemoryStorage::new();
    let kinds = on_ranks(3, |_, group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut storages = checkpointer_storages(&storage);
        if rank == 1 {
            storages = storages.layer(|inner, _| Arc::new(FaultStorage::new(inner).full_after(0)));
        }
        let checkpointer = Checkpointer::in_group(group).storages(storages);
        checkpointer.save(&state(2, rank, world), "mem://run").blocking().unwrap_err().kind()
    });
    assert_eq!(kinds, [FailureKind::Storage(StorageErrorKind::Full); 3]);
}

fn checkpointer_storages(storage: &MemoryStorage) -> StorageRegistry {
    let mut storages = StorageRegistry::empty();
    let storage = storage.clone();
    storages.register("mem", move |_| Ok(Arc::new(storage.clone())));
    storages
}

struct Optimizer(i64);

impl Stateful for Optimizer {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        if self.0 < 0 {
            return Err(CheckpointError::Plugin("the optimizer has no state yet".into()));
        }
        Ok(StateDict::from([("lr", dcp::Value::Int(self.0))]))
    }

    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError> {
        self.0 = state.get("lr").and_then(dcp::Value::as_int).unwrap_or(-1);
        Ok(())
    }
}

#[test]
fn parts_of_an_application_are_saved_and_loaded_by_name() {
    let storage = MemoryStorage::new();
    let checkpointer = checkpointer(&storage, Settings::new().cast(DType::BFloat16));
    let (mut model, mut optimizer) = (state(3, 0, 1), Optimizer(7));
    let app = AppState::new().with("model", &mut model).with("optimizer", &mut optimizer);
    checkpointer.save(&app, "mem://app").blocking().unwrap();
    let (mut model, mut optimizer) = (blank(0, 1), Optimizer(0));
    let mut app = AppState::new().with("model", &mut model).with("optimizer", &mut optimizer);
    checkpointer.load(&mut app, "mem://app").blocking().unwrap();
    assert_eq!((step_of(&model), optimizer.0), (3, 7));
}

#[test]
fn a_part_without_a_state_fails_the_save_on_all_ranks() {
    let storage = MemoryStorage::new();
    let errors = on_ranks(2, |_, group| {
        let optimizer = Optimizer(i64::from(group.rank()) - 1);
        let checkpointer = checkpointer(&storage, Settings::in_group(group));
        checkpointer.save(&optimizer, "mem://run").blocking().unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0: the optimizer has no state yet"), "{error}");
    }
}

/// A part that refuses what it loads on rank 1.
struct Picky(u32);

impl Stateful for Picky {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        Ok(StateDict::from([("lr", dcp::Value::Int(0))]))
    }

    fn load_state_dict(&mut self, _: StateDict) -> Result<(), CheckpointError> {
        match self.0 {
            1 => Err(CheckpointError::Plugin("the schedule is of another model".into())),
            _ => Ok(()),
        }
    }
}

#[test]
fn a_part_that_refuses_its_state_fails_the_load_on_all_ranks() {
    let storage = MemoryStorage::new();
    checkpointer(&storage, Settings::new()).save(&Picky(0), "mem://run").blocking().unwrap();
    let errors = on_ranks(2, |_, group| {
        let mut part = Picky(group.rank());
        let checkpointer = checkpointer(&storage, Settings::in_group(group));
        checkpointer.load(&mut part, "mem://run").blocking().unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1: the schedule is of another model"), "{error}");
    }
}

#[test]
fn the_next_save_of_any_kind_returns_the_error_of_a_background_save() {
    let storage = MemoryStorage::new();
    let results = on_ranks(2, |_, group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut storages = checkpointer_storages(&storage);
        storages.register("full", |_| {
            Ok(Arc::new(FaultStorage::new(Arc::new(MemoryStorage::new())).full_after(0)))
        });
        let checkpointer = Checkpointer::in_group(group).storages(storages);
        let state = state(1, rank, world);
        drop(checkpointer.save(&state, "full://run").background().unwrap());
        let next = || checkpointer.save(&state, "mem://run").blocking();
        (next().unwrap_err(), next().is_ok())
    });
    for (error, is_saved) in results {
        let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
        assert_eq!(failures.len(), 2, "{error}");
        assert!(error.to_string().contains("an earlier background save failed"), "{error}");
        assert_eq!(error.kind(), FailureKind::Storage(StorageErrorKind::Full));
        assert!(is_saved, "the save after it");
    }
}

#[test]
fn a_process_alone_that_holds_a_part_of_a_tensor_is_refused() {
    let storage = MemoryStorage::new();
    let checkpointer = checkpointer(&storage, Settings::new());
    let half = || checkpointer.save(&state(1, 0, 2), "mem://half");
    let error = half().blocking().unwrap_err().to_string();
    assert!(error.contains("saves alone and holds") && error.contains("\"sharded\""), "{error}");
    assert!(half().background().and_then(|save| save.blocking()).is_err());
    assert!(checkpointer.load(&mut blank(0, 2), "mem://half").blocking().is_err());
    let allowed = self::checkpointer(&storage, Settings::new().allow_parts(true));
    allowed.save(&state(1, 0, 2), "mem://half").blocking().unwrap();
    let mut mine = blank(0, 2);
    checkpointer.load(&mut mine, "mem://half").blocking().unwrap();
    assert_eq!(step_of(&mine), 1);
}

#[test]
fn a_scheme_that_the_build_leaves_out_names_its_feature() {
    let error = dcp::load(&mut StateDict::new(), "abfss://c@a/x").blocking().unwrap_err();
    let said = dcp::core::error::error_chain(&error);
    let is_built = cfg!(feature = "azure");
    assert!(is_built || said.contains("with the feature \"azure\""), "{said}");
}
