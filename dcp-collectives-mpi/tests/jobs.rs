//! Whole jobs under `mpirun -n 4`: a checkpoint saved and loaded, a process that dies.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test")]

mod job;

use std::process::ExitCode;
use std::sync::Arc;

use bytes::Bytes;
use dcp_collectives_mpi::{MpiCollective, MpiConfig};
use dcp_core::{
    Collective, CollectiveError, DType, HostMemory, Region, Shard, StateDict, Storage, Tensor,
};
use dcp_engine::{Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_storage_fs::FsStorage;
use dcp_testing::block_on;

const RANKS: u32 = 4;
const SIDE: u64 = 64;

/// What each rank of a job does.
type Case = fn(MpiCollective);

/// Cases, and whether their jobs end well.
const CASES: [(&str, Case, bool); 3] = [
    ("a_checkpoint_is_saved_and_loaded_on_four_ranks", saves_and_loads, true),
    ("mpi_is_initialized_once", initializes_twice, true),
    ("a_process_that_dies_ends_the_job", dies, false),
];

fn main() -> ExitCode {
    if let Some(name) = job::case() {
        let (_, run, _) = *CASES.iter().find(|(case, ..)| *case == name).unwrap();
        run(MpiConfig::new().connect().unwrap());
        return ExitCode::SUCCESS;
    }
    let mut code = ExitCode::SUCCESS;
    for (name, _, succeeds) in CASES {
        if job::verdict(name, &job::run(RANKS, name), succeeds) != ExitCode::SUCCESS {
            code = ExitCode::FAILURE;
        }
    }
    code
}

/// The elements of a region of a square matrix that count up.
fn elements(region: &Region) -> Vec<u8> {
    let runs = region.runs_in(&[SIDE, SIDE]);
    runs.flat_map(|(at, len)| at..at + len).flat_map(|at| (at as i32).to_le_bytes()).collect()
}

fn state(region: &Region, bytes: Vec<u8>, step: i64) -> StateDict {
    let shard = Shard::new(DType::Int32, region.clone(), HostMemory::from_vec(bytes)).unwrap();
    let mut state = StateDict::new();
    state.insert("weight", Tensor::sharded(DType::Int32, [SIDE, SIDE], vec![shard]).unwrap());
    state.insert("step", step);
    state
}

/// Rows are saved, columns are loaded.
fn saves_and_loads(group: MpiCollective) {
    let share = SIDE / u64::from(RANKS);
    let at = share * u64::from(group.rank());
    let rows = Region::new([at, 0], [share, SIDE]).unwrap();
    let columns = Region::new([0, at], [SIDE, share]).unwrap();
    // The folder of rank 0, by name.
    let folder = (group.rank() == 0).then(|| tempfile::tempdir().unwrap());
    let name = folder.as_ref().map(|folder| folder.path().to_str().unwrap().to_owned());
    let name = group.broadcast(0, name.map(Bytes::from)).unwrap();
    let name = String::from_utf8(name.to_vec()).unwrap();
    let storage: Arc<dyn Storage> = Arc::new(FsStorage::open(name).unwrap());
    let group: Arc<dyn Collective> = Arc::new(group);

    let saved = state(&rows, elements(&rows), 7);
    let writer = DcpWriter::new(Arc::clone(&storage));
    block_on(Saver::with_settings(Settings::in_group(Arc::clone(&group))).save(&saved, &writer))
        .unwrap();

    let mut loaded = state(&columns, vec![0; elements(&columns).len()], 0);
    let reader = DcpReader::new(Arc::clone(&storage));
    block_on(
        Loader::with_settings(Settings::in_group(Arc::clone(&group))).load(&mut loaded, &reader),
    )
    .unwrap();
    let expected = state(&columns, elements(&columns), 7);
    assert!(dcp_core::Value::Dict(loaded).same(&dcp_core::Value::Dict(expected)));
    group.barrier().unwrap();
}

fn initializes_twice(group: MpiCollective) {
    match MpiConfig::new().connect() {
        Err(CollectiveError::Rendezvous { message }) => assert!(message.contains("initialized")),
        other => panic!("{other:?}"),
    }
    group.barrier().unwrap();
}

/// `mpirun` kills the ranks that wait for it.
fn dies(group: MpiCollective) {
    if group.rank() == 2 {
        std::process::exit(1);
    }
    drop(group.barrier());
}
