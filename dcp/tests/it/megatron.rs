//! Ranks as processes that save a run of Megatron-Core over TCP, and one of them dies.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use dcp::collectives::TcpConfig;
use dcp::core::registry::Access;
use dcp::jobs::JobOptions;
use dcp::megatron::disk::METADATA_JSON;
use dcp::megatron::sharded::{LocalTensor, ShardedObject, ShardedStateDict, ShardedTensor};
use dcp::megatron::{
    MegatronLoadOptions, MegatronRun, MegatronSaveOptions, Tracked, load, save, verify,
    write_tracker,
};
use dcp::{DType, Storage, Tensor, Value};

use crate::child::{STEP, STOP, say, stopping};
use crate::ranks::killed_before;
use dcp_testing::{Tortured, block_on};

/// In whose storage a rank stops: that of the checkpoint, or that of the tracker.
const STOP_IN: &str = "DCP_TEST_STOP_IN";

/// Rows that a rank has, and elements of a row.
const ROWS: u64 = 8;
const COLUMNS: u64 = 4096;

pub(crate) fn open(place: &str, access: Access) -> Arc<dyn Storage> {
    dcp::block_on(dcp::default_storages().open(place, access)).unwrap().unwrap()
}

/// The state of save number `step`, as `rank` of `world` holds it.
pub(crate) fn state(step: u8, rank: u32, world: u32) -> ShardedStateDict {
    let bytes = vec![step; usize::try_from(ROWS * COLUMNS).unwrap()];
    let tensor = Tensor::replicated(DType::UInt8, [ROWS, COLUMNS], bytes).unwrap();
    let view = tensor.shards()[0].view().unwrap().clone();
    let weight = ShardedTensor::from_rank_offsets("weight", view)
        .offset(0, rank.into(), world.into())
        .build()
        .unwrap();
    let object = Value::Int(step.into());
    let rng = ShardedObject::new("rng", object, [u64::from(world)], [u64::from(rank)]).unwrap();
    let mut state = ShardedStateDict::from([("weight", weight)]);
    state.insert("rng", rng);
    state.insert("iteration", Value::Int(step.into()));
    state
}

/// What a process does until one of the ranks is gone.
pub(crate) fn save_as_a_rank(place: &str) {
    let config = TcpConfig::from_env().unwrap().deadline(Duration::from_secs(120));
    let group = config.connect().unwrap();
    let (rank, world) = (dcp::Collective::rank(&group), dcp::Collective::world_size(&group));
    let options = MegatronSaveOptions::new().group(Arc::new(group));
    let run = open(place, Access::Write);
    let stop_in = std::env::var(STOP_IN).unwrap_or_default();
    let opened = |storage: Arc<dyn Storage>, step, what: &str| {
        if step == STEP && stop_in == what { stopping(storage) } else { storage }
    };
    for step in 1.. {
        let which = Tracked::Iteration(step.into());
        let storage = open(&format!("{place}/iter_{step:07}"), Access::Write);
        let storage = opened(storage, step, "checkpoint");
        if let Err(error) = block_on(save(&state(step, rank, world), &storage, &options)) {
            return say(&format!("error {}", dcp::core::error::error_chain(&error)));
        }
        if rank == 0 {
            let run = opened(Arc::clone(&run), step, "tracker");
            block_on(write_tracker(&*run, which)).unwrap();
        }
        say(&format!("saved {step}"));
    }
}

#[test]
fn when_a_rank_of_megatron_is_killed_at_any_operation_the_tracker_names_a_whole_checkpoint() {
    for (victim, what) in [(0, "checkpoint"), (0, "tracker"), (1, "checkpoint"), (2, "checkpoint")]
    {
        let how = match victim {
            0 => format!("SIGKILL of the coordinator in the {what}"),
            _ => "SIGKILL of a rank".to_owned(),
        };
        let mut row = Tortured::new("Megatron-Core: next iteration, 3 processes over TCP", &how);
        for operation in 1.. {
            let folder = tempfile::tempdir().unwrap();
            let place = folder.path().join("run").display().to_string();
            let stop = [(STOP, operation.to_string()), (STOP_IN, what.to_owned())];
            if !killed_before("megatron_rank", &place, victim, &stop) {
                assert!(operation > 1, "rank {victim} writes nothing");
                row.report();
                break;
            }
            let run = MegatronRun::new(open(&place, Access::Read));
            let Some(Tracked::Iteration(latest)) = block_on(run.tracked()).unwrap() else {
                panic!("the tracker names no iteration")
            };
            let steps = u64::from(STEP) - 1..=u64::from(STEP);
            assert!(steps.contains(&latest), "{latest} at operation {operation}");
            assert_whole(&place, u8::try_from(latest).unwrap());
            row.points += 1;
            row.count(if latest == u64::from(STEP) { "new" } else { "old" });
            for entry in fs::read_dir(&place).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let Some(step) = name.strip_prefix("iter_") else { continue };
                if fs::exists(format!("{place}/{name}/{METADATA_JSON}")).unwrap() {
                    assert_whole(&place, step.parse().unwrap());
                }
            }
        }
    }
}

/// The number of the save in which all is that a checkpoint of two ranks has.
pub(crate) fn load_value(url: &str) -> Result<u8, String> {
    let url = url.to_owned();
    // Not on the runtime of the caller.
    std::thread::spawn(move || {
        let storage = open(&url, Access::Read);
        let whole = LocalTensor::described(DType::UInt8, [2 * ROWS, COLUMNS]);
        let whole = ShardedTensor::from_rank_offsets("weight", whole).build().unwrap();
        let request = ShardedStateDict::from([("weight", whole)]);
        let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new()))
            .map_err(|error| dcp::core::error::error_chain(&error))?;
        let value = loaded.state.get("iteration").and_then(Value::as_int);
        let value = u8::try_from(value.ok_or("no iteration")?).unwrap();
        let weight = loaded.state.get("weight").and_then(Value::as_tensor).and_then(Tensor::to_vec);
        assert!(weight.unwrap().iter().all(|byte| *byte == value), "parts of another save");
        Ok(value)
    })
    .join()
    .unwrap()
}

/// Every byte of the checkpoint is that of the one save.
fn assert_whole(run: &str, step: u8) {
    let storage = open(&format!("{run}/iter_{step:07}"), Access::Read);
    let report = block_on(verify(&storage, true, &JobOptions::default())).unwrap();
    assert!(report.ok, "{report:?}");
    let whole = LocalTensor::described(DType::UInt8, [3 * ROWS, COLUMNS]);
    let whole = ShardedTensor::from_rank_offsets("weight", whole).build().unwrap();
    let request = ShardedStateDict::from([("weight", whole)]);
    let loaded = block_on(load(&request, &storage, &MegatronLoadOptions::new())).unwrap().state;
    assert_eq!(loaded.get("iteration").and_then(Value::as_int), Some(step.into()));
    let weight = loaded.get("weight").and_then(Value::as_tensor).and_then(Tensor::to_vec);
    assert!(weight.unwrap().iter().all(|byte| *byte == step), "parts of another save");
}
