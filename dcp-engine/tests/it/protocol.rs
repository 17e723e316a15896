//! Groups of every kind: subsets, other coordinators, no group at all.

use std::sync::Arc;
use std::time::Duration;

use dcp_collectives::LocalGroup;
use dcp_core::error::FailureKind;
use dcp_core::value::{Dict, Global, Object};
use dcp_core::{
    CheckpointError, Collective, HostMemory, Region, Shard, StateDict, Stateful, Tensor,
    TensorView, Value,
};
use dcp_engine::{AppState, BackgroundSaver, Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::harness::{
    blank, block_on, counting_whole, elements, holds_sample, load, memory, on_ranks, same, sample,
    save, save_sample,
};

#[test]
fn any_rank_can_coordinate() {
    for coordinator in 0..3 {
        let storage = memory();
        let summaries = on_ranks(3, |rank, group| {
            let writer = DcpWriter::new(Arc::clone(&storage));
            let saver = Saver::with_settings(Settings::in_group(group).coordinator(coordinator));
            block_on(saver.save(&sample(rank, 3, 5), &writer))
        });
        for (rank, summary) in (0..).zip(summaries) {
            let summary = summary.unwrap();
            assert_eq!(summary.entries, 4);
            assert_eq!(summary.metadata().is_some(), rank == coordinator);
        }
        assert!(holds_sample(&storage, 5));
    }
    let beyond = on_ranks(2, |rank, group| {
        let writer = DcpWriter::new(memory());
        block_on(
            Saver::with_settings(Settings::in_group(group).coordinator(2))
                .save(&sample(rank, 2, 0), &writer),
        )
    });
    assert!(beyond.iter().all(Result::is_err));
}

#[test]
fn a_subset_of_the_ranks_can_save() {
    let storage = memory();
    let group = LocalGroup::new(5).deadline(Duration::from_secs(120)).build();
    std::thread::scope(|scope| {
        for collective in group {
            let storage = &storage;
            scope.spawn(move || {
                if [1, 4].contains(&collective.rank()) {
                    let pair: Arc<dyn Collective> = Arc::new(collective.subgroup(&[1, 4]).unwrap());
                    save(Arc::clone(&pair), &sample(pair.rank(), 2, 9), storage).unwrap();
                }
            });
        }
    });
    assert!(holds_sample(&storage, 9));
}

#[test]
fn the_same_state_gives_the_same_bytes() {
    let all = |storage: &Arc<dyn dcp_core::Storage>| {
        use dcp_core::storage::StorageExt;
        use futures_util::StreamExt;
        block_on(async {
            let mut files = Vec::new();
            let mut listed = storage.list(None);
            while let Some(meta) = listed.next().await {
                let key = meta.unwrap().key;
                let bytes = storage.read_all(&key).await.unwrap();
                files.push((key, bytes));
            }
            files.sort();
            files
        })
    };
    let (a, b) = (memory(), memory());
    save_sample(4, &a, 3);
    save_sample(4, &b, 3);
    assert!(all(&a).len() >= 5);
    assert_eq!(all(&a), all(&b));
}

#[derive(Debug)]
struct Model {
    weight: Tensor,
    epoch: i64,
}

impl Stateful for Model {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let mut state = StateDict::new();
        state.insert("weight", self.weight.clone());
        state.insert("epoch", self.epoch);
        Ok(state)
    }

    fn load_state_dict(&mut self, state: StateDict) -> Result<(), CheckpointError> {
        self.epoch = state.get("epoch").and_then(Value::as_int).unwrap_or(-1);
        Ok(())
    }
}

#[test]
fn stateful_parts_are_expanded_and_restored() {
    let storage = memory();
    let mut model = Model { weight: counting_whole(&[3], 4), epoch: 12 };
    let saved = AppState::new().with("model", &mut model).state_dict().unwrap();
    block_on(Saver::new().save(&saved, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let mut other = Model { weight: counting_whole(&[3], 0), epoch: 0 };
    let mut app = AppState::new().with("model", &mut other);
    let mut state = app.state_dict().unwrap();
    block_on(Loader::new().load(&mut state, &DcpReader::new(storage))).unwrap();
    app.load_state_dict(state).unwrap();
    assert_eq!(other.epoch, 12);
    assert!(other.weight.same(&model.weight), "filled in place");
}

#[test]
fn a_strided_shard_is_saved_and_loaded_in_place() {
    let shape = [4, 3];
    let region = Region::full(shape).unwrap();
    // A column-major buffer with a byte of padding in front of nothing: strides (1, 4).
    let columns: Vec<u8> = (0..3)
        .flat_map(|c| (0..4).flat_map(move |r| (r * 3 + c + 100_i32).to_le_bytes()))
        .collect();
    let view = |bytes: Vec<u8>| {
        let memory = HostMemory::from_vec(bytes);
        let view =
            TensorView::strided(memory, dcp_core::DType::Int32, shape, vec![1, 4], 0).unwrap();
        let shard = Shard::with_view(region.clone(), view).unwrap();
        Tensor::sharded(dcp_core::DType::Int32, shape, vec![shard]).unwrap()
    };
    let storage = memory();
    let state = StateDict::from([("t", view(columns.clone()))]);
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();

    let mut row_major = StateDict::from([("t", counting_whole(&shape, 0))]);
    block_on(Loader::new().load(&mut row_major, &DcpReader::new(Arc::clone(&storage)))).unwrap();
    let loaded = row_major.get("t").unwrap().as_tensor().unwrap();
    assert_eq!(loaded.to_vec().unwrap(), elements(&shape, &region, 100));

    let target = view(vec![0; 48]);
    let mut column_major = StateDict::from([("t", target.clone())]);
    block_on(Loader::new().load(&mut column_major, &DcpReader::new(storage))).unwrap();
    assert_eq!(target.shards()[0].view().unwrap().memory().to_vec().unwrap(), columns);
}

#[test]
fn a_background_save_keeps_the_state_of_its_start() {
    let storage = memory();
    block_on(async {
        let state = sample(0, 1, 40);
        let writer = Arc::new(DcpWriter::new(Arc::clone(&storage)));
        let pending = BackgroundSaver::new(Saver::new()).start(&state, writer).unwrap();
        // Training goes on before the save had any chance to run.
        let model = state.get("model").unwrap().as_dict().unwrap();
        let bias = model.get("bias").unwrap().as_tensor().unwrap();
        bias.shards()[0].view().unwrap().fill_from(&[0; 20]).unwrap();
        pending.wait().await.unwrap();
    });
    assert!(holds_sample(&storage, 40));
}

/// The bytes of all tensors in a value.
fn bytes_in(value: &Value) -> Vec<Vec<u8>> {
    match value.view() {
        Value::Tensor(tensor) => vec![tensor.to_vec().unwrap()],
        Value::Dict(dict) => dict.iter().flat_map(|(_, value)| bytes_in(value)).collect(),
        Value::Tuple(items) | Value::List(items) | Value::Set(items) | Value::FrozenSet(items) => {
            items.iter().flat_map(bytes_in).collect()
        }
        Value::Object(object) => {
            let parts = object.args.iter().chain(&object.state).chain(&object.items);
            parts.chain(object.entries.iter().map(|(_, value)| value)).flat_map(bytes_in).collect()
        }
        _ => Vec::new(),
    }
}

/// Tensors lie in objects and sets, too.
#[test]
fn a_background_save_keeps_tensors_inside_of_any_value() {
    let storage = memory();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tensor = counting_whole(&[2], 7);
    let value = || Value::Tensor(tensor.clone());
    let mut object = Object::new(Global::new("collections", "Thing"), vec![value()]);
    object.state = Some(Dict::from([("t", value())]).into());
    object.items = vec![value()];
    object.entries = vec![("k".into(), value())];
    let sets = [Value::Set(vec![value()]), Value::FrozenSet(vec![value()])];
    let all = [Value::Object(Box::new(object))].into_iter().chain(sets);
    let state = StateDict::from([("o", Value::Tuple(all.collect()))]);
    let expected = vec![tensor.to_vec().unwrap(); 6];
    assert_eq!(bytes_in(state.get("o").unwrap()), expected);
    let mut loaded = StateDict::from([("o", Value::None)]);
    runtime.block_on(async {
        let writer = Arc::new(DcpWriter::new(Arc::clone(&storage)));
        let pending = BackgroundSaver::new(Saver::new()).start(&state, writer).unwrap();
        tensor.shards()[0].view().unwrap().fill_from(&[0; 8]).unwrap();
        pending.wait().await.unwrap();
        let reader = DcpReader::new(Arc::clone(&storage));
        Loader::new().load(&mut loaded, &reader).await.unwrap();
    });
    assert_eq!(bytes_in(loaded.get("o").unwrap()), expected);
}

/// Tasks may run in any order; saves may not.
#[test]
fn background_saves_keep_the_order_of_their_starts() {
    let storage = memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let saver = BackgroundSaver::new(Saver::new());
        let start = |step| {
            let writer = Arc::new(DcpWriter::new(Arc::clone(&storage)));
            saver.start(&sample(0, 1, step), writer).unwrap()
        };
        let pending: Vec<_> = (0..20).map(start).collect();
        for save in pending {
            save.wait().await.unwrap();
        }
    });
    assert!(holds_sample(&storage, 19));
}

/// T14: PyTorch 2.15 reports success of staging although it failed.
#[test]
fn t14_failed_staging_is_an_error_of_the_call() {
    block_on(async {
        let tensor = counting_whole(&[4], 0);
        let _writer_at_work = tensor.shards()[0].view().unwrap().lend().unwrap();
        let state = StateDict::from([("model", StateDict::from([("t", tensor.clone())]))]);
        let writer = Arc::new(DcpWriter::new(memory()));
        let error = BackgroundSaver::new(Saver::new()).start(&state, writer).unwrap_err();
        assert!(error.to_string().contains("model.t"), "{error}");
    });
}

#[test]
fn failed_staging_on_one_rank_fails_the_background_save_on_all_ranks() {
    let storage = memory();
    let kinds = on_ranks(2, |rank, group| {
        let saver = BackgroundSaver::new(Saver::with_settings(Settings::in_group(group)));
        let tensor = counting_whole(&[4], 0);
        let _writer_at_work =
            (rank == 1).then(|| tensor.shards()[0].view().unwrap().lend().unwrap());
        let state = StateDict::from([("t", tensor.clone())]);
        let writer = Arc::new(DcpWriter::new(Arc::clone(&storage)));
        let saved = saver.start(&state, writer).and_then(|pending| block_on(pending.wait()));
        saved.unwrap_err().kind()
    });
    assert_eq!(kinds, [FailureKind::MemoryInUse; 2]);
}

#[test]
fn nothing_at_all_can_be_saved_and_loaded() {
    let storage = memory();
    for result in on_ranks(2, |_, group| save(group, &StateDict::new(), &storage)) {
        assert_eq!(result.unwrap().entries, 0);
    }
    for result in on_ranks(3, |_, group| load(group, &mut StateDict::new(), &storage)) {
        assert!(result.unwrap().metadata.is_empty());
    }
}

#[test]
fn a_load_on_other_ranks_restores_everything() {
    let storage = memory();
    save_sample(4, &storage, 21);
    for n in [1, 2, 3, 5] {
        for (rank, result) in (0..).zip(on_ranks(n, |rank, group| {
            let mut state = blank(rank, n);
            load(group, &mut state, &storage).map(|_| state)
        })) {
            assert!(same(&result.unwrap(), &sample(rank, n, 21)), "rank {rank} of {n}");
        }
    }
}
