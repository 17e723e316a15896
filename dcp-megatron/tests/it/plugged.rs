//! A backend of a plug-in: registered, saved to, loaded from, and used by every function that
//! opens a checkpoint.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageWriter, Value};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_jobs::JobOptions;
use dcp_megatron::contents::{
    load_common_state_dict, load_common_state_dict_with, load_content_metadata_with,
    load_plain_tensors_with, load_sharded_metadata_with, load_tensors_metadata_with,
};
use dcp_megatron::disk::{Backend, COMMON_STATE, CheckpointingConfig, TRACKER};
use dcp_megatron::jobs::verify_with;
use dcp_megatron::sharded::{
    LocalTensor, ObjectKey, ShardedObject, ShardedStateDict, ShardedTensor, ShardedValue,
};
use dcp_megatron::strategy::{LoadStrategy, Opened, SaveStrategy, Strategies, WriterSettings};
use dcp_megatron::{
    MegatronCheckpoint, MegatronError, MegatronLoadOptions, MegatronOpenOptions, MegatronRun,
    MegatronSaveOptions, StoredFormat, Tracked, load, save, verify,
};

use crate::small_model::{memory, on_ranks, tensors, view};
use crate::support::{block_on, get, put};

const COMMON: &str = "common.mine";

fn backend() -> Backend {
    Backend { name: "mine".into(), version: 4 }
}

fn strategies() -> Strategies {
    Strategies::default().with_save(backend(), Arc::new(Mine)).with_load(backend(), Arc::new(Mine))
}

/// Tensors as PyTorch has them, the common state in a file of its own.
#[derive(Debug)]
struct Mine;

impl SaveStrategy for Mine {
    fn writer(
        &self,
        storage: &Arc<dyn Storage>,
        settings: WriterSettings,
    ) -> Result<Arc<dyn StorageWriter>, MegatronError> {
        let tensors = DcpWriter::new(Arc::clone(storage));
        let (storage, common) = (Arc::clone(storage), settings.common);
        Ok(Arc::new(MineWriter { storage, tensors, common }))
    }
}

#[async_trait]
impl LoadStrategy for Mine {
    async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        _: &MegatronOpenOptions,
    ) -> Result<Opened, MegatronError> {
        let bytes = storage.read_all(&Key::new(COMMON).unwrap()).await?;
        let Value::Dict(common) = Value::from_wire(&bytes).unwrap() else { panic!("no dict") };
        Ok(Opened::new(Arc::new(DcpReader::new(Arc::clone(storage))), common))
    }
}

#[derive(Debug)]
struct MineWriter {
    storage: Arc<dyn Storage>,
    tensors: DcpWriter,
    common: Dict,
}

#[async_trait]
impl StorageWriter for MineWriter {
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        self.tensors.encode_object(fqn, value)
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        self.tensors.begin().await
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        self.tensors.place(session, locals, global)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        self.tensors.renamed(file, generation)
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        self.tensors.write(local, plan, data).await
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        self.tensors.commit(session, metadata, reports).await?;
        let put = async |name: &str, bytes: Bytes| {
            let key = Key::new(name).unwrap();
            self.storage.put(&key, bytes.into(), PutMode::Overwrite).await.map(drop)
        };
        put(COMMON, Value::Dict(self.common.clone()).to_wire()?).await?;
        let config = CheckpointingConfig::new(backend()).with_common(Backend::first("mine"));
        Ok(put("metadata.json", config.to_json().into()).await?)
    }

    async fn abandon(&self, plan: &WritePlan) {
        self.tensors.abandon(plan).await;
    }
}

fn shard(rank: u64, local: LocalTensor) -> ShardedTensor {
    ShardedTensor::from_rank_offsets("w", local).offset(0, rank, 2).build().unwrap()
}

fn saved(storage: &Arc<dyn Storage>) {
    on_ranks(2, |rank, group| {
        let bytes = vec![u8::try_from(rank).unwrap() + 1; 8];
        let mut state = ShardedStateDict::from([("w", shard(rank, view(&[2], bytes).into()))]);
        let object = ShardedObject::new("rng", Value::Int(5 + rank as i64), [2], [rank]).unwrap();
        state.insert("rng", object);
        state.insert("iteration", Value::Int(3));
        let content = Dict::from([("kind", "mine")]);
        state.insert("content_metadata", Value::Dict(content));
        let options = MegatronSaveOptions::new().group(group).strategy(strategies(), backend());
        block_on(save(&state, storage, &options)).unwrap();
    });
}

fn loads(storage: &Arc<dyn Storage>, options: &MegatronLoadOptions) {
    on_ranks(2, |rank, group| {
        // The other rank requests the halves.
        let other = 1 - rank;
        let wanted = LocalTensor::described(dcp_core::DType::Int32, [2]);
        let rng = ObjectKey::new("rng", [2], [other]).unwrap();
        let request: ShardedStateDict = [
            ("w", ShardedValue::from(shard(other, wanted))),
            ("rng", ShardedObject::request(rng).into()),
        ]
        .into_iter()
        .collect();
        let loaded = block_on(load(&request, storage, &options.clone().group(group))).unwrap();
        let bytes = vec![u8::try_from(other).unwrap() + 1; 8];
        assert_eq!(tensors(&loaded.state), [(".w".to_owned(), bytes)]);
        assert_eq!(loaded.state.get("rng").and_then(Value::as_int), Some(5 + other as i64));
        assert_eq!(loaded.state.get("iteration").and_then(Value::as_int), Some(3));
    });
}

#[test]
fn a_checkpoint_of_another_backend_comes_and_goes() {
    let storage = memory();
    saved(&storage);
    let json = String::from_utf8(get(&*storage, "metadata.json").unwrap()).unwrap();
    assert!(json.contains(r#""sharded_backend": "mine", "sharded_backend_version": 4"#), "{json}");
    assert!(get(&*storage, "common.pt").is_none());
    loads(&storage, &MegatronLoadOptions::new().strategies(strategies()));
    let open = MegatronOpenOptions::default().with_strategies(strategies());
    loads(&storage, &MegatronLoadOptions::new().open_options(open));
    let nothing = ShardedStateDict::new();
    let error = block_on(load(&nothing, &storage, &MegatronLoadOptions::new())).unwrap_err();
    assert!(matches!(error, MegatronError::NoStrategy { .. }), "{error}");
}

#[test]
fn every_way_in_asks_the_strategies_it_is_given() {
    let storage = memory();
    saved(&storage);
    let options = MegatronOpenOptions::default().with_strategies(strategies());
    let checkpoint = block_on(MegatronCheckpoint::open(&storage, &options)).unwrap();
    assert_eq!(*checkpoint.format(), StoredFormat::Plugged { backend: backend() });
    assert_eq!(checkpoint.format().name(), "mine");
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    assert!(metadata.get(COMMON_STATE).is_some());
    block_on(checkpoint.describe()).unwrap();

    let common = block_on(load_common_state_dict_with(&storage, &options)).unwrap();
    assert_eq!(common.get("iteration").and_then(Value::as_int), Some(3));
    let content = block_on(load_content_metadata_with(&storage, &options)).unwrap().unwrap();
    assert_eq!(content.get("kind").and_then(Value::as_str), Some("mine"));
    let listed = block_on(load_tensors_metadata_with(&storage, &options)).unwrap();
    let shapes: Vec<_> =
        listed.iter().map(|(key, t)| (&**key, t.global_shape().to_vec())).collect();
    assert_eq!(shapes, [("w", vec![4])]);
    let listed = block_on(load_sharded_metadata_with(&storage, &options)).unwrap();
    let mut keys: Vec<_> = listed.keys().map(|key| &**key).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["rng/shard_0_2", "rng/shard_1_2", "w"]);
    let plain = block_on(load_plain_tensors_with(&storage, &options)).unwrap();
    let whole = plain.get("w").and_then(Value::as_tensor).unwrap().to_vec().unwrap();
    assert_eq!(whole, [[1; 8], [2; 8]].concat());
    for deep in [false, true] {
        let report = block_on(verify_with(&storage, deep, &options)).unwrap();
        assert!(report.ok && report.format == "mine", "{:?}", report.problems);
    }
    // Without them it is an unknown backend.
    let error = block_on(load_common_state_dict(&storage)).unwrap_err();
    assert!(matches!(error, MegatronError::UnknownBackend { .. }), "{error}");
    assert!(block_on(verify(&storage, false, &JobOptions::default())).is_err());
}

#[test]
fn a_run_of_another_backend_is_opened_by_its_tracker() {
    let storage = memory();
    let run = MegatronRun::new(Arc::clone(&storage));
    saved(&run.checkpoint(Tracked::Iteration(3)).unwrap());
    put(&*storage, TRACKER, b"3".to_vec());
    loads(&storage, &MegatronLoadOptions::new().strategies(strategies()));
    let options = MegatronOpenOptions::default().with_strategies(strategies());
    let opened = block_on(MegatronCheckpoint::open(&storage, &options)).unwrap();
    assert_eq!(opened.which(), Some(Tracked::Iteration(3)));
}

/// One that opens what is there already and changes it.
#[derive(Debug)]
struct Renamed;

#[async_trait]
impl LoadStrategy for Renamed {
    async fn open(
        &self,
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Opened, MegatronError> {
        let checkpoint = MegatronCheckpoint::open(storage, options).await?;
        let mut common = checkpoint.common().clone();
        common.insert("renamed", Value::Bool(true));
        Ok(Opened::new(Arc::clone(&checkpoint.source().reader), common))
    }
}

#[test]
fn a_strategy_may_stand_on_the_one_that_it_replaces() {
    let storage = memory();
    let weight = ShardedTensor::from_rank_offsets("w", view(&[1], vec![1; 4])).build().unwrap();
    let state = ShardedStateDict::from([("w", weight)]);
    block_on(save(&state, &storage, &MegatronSaveOptions::new())).unwrap();
    let torch_dist = Backend::first("torch_dist");
    let strategies = Strategies::default().with_load(torch_dist, Arc::new(Renamed));
    let options = MegatronOpenOptions::default().with_strategies(strategies);
    let common = block_on(load_common_state_dict_with(&storage, &options)).unwrap();
    assert!(common.get("renamed").is_some());
    let loaded =
        block_on(load(&state, &storage, &MegatronLoadOptions::new().open_options(options)));
    assert!(loaded.unwrap().state.get("renamed").is_some());
    let none = MegatronOpenOptions::default().with_strategies(Strategies::empty());
    let error = block_on(MegatronCheckpoint::open(&storage, &none)).unwrap_err();
    assert!(matches!(error, MegatronError::NoStrategy { .. }), "{error}");
}
