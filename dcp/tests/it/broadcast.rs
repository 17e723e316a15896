//! A file of `torch.save`, which only one rank reads, straight into a sharded state dict.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dcp::collectives::LocalGroup;
use dcp::core::{Key, StorageReader};
use dcp::engine::BroadcastReader;
use dcp::formats::safetensors::{Header, PREFIX_LEN, TensorInfo, header_len};
use dcp::formats::torch_save::TorchSaveReader;
use dcp::{Checkpointer, Collective, DType, Region, StateDict, Tensor, Value};

const RANKS: u64 = 4;

fn fixture() -> PathBuf {
    dcp_testing::fixture("torch_save/t215")
}

/// The rows of a tensor that fall to a rank; everything to every rank when it has no axis.
fn part(shape: &[u64], rank: u64) -> Region {
    let mut region = (vec![0; shape.len()], shape.to_vec());
    if let Some(rows) = shape.first() {
        let step = rows.div_ceil(RANKS);
        region.0[0] = (step * rank).min(*rows);
        region.1[0] = step.min(rows - region.0[0]);
    }
    Region::new(region.0, region.1).unwrap()
}

/// The elements of `region`.
fn elements(info: &TensorInfo, data: &[u8], region: &Region) -> Vec<u8> {
    let size = info.dtype.size() as u64;
    let start = info.byte_range.start;
    let runs = region.runs_in(&info.shape);
    let bytes = |(at, len): (u64, u64)| {
        let at = start + at * size;
        data[at as usize..(at + len * size) as usize].to_vec()
    };
    runs.flat_map(bytes).collect()
}

#[test]
fn a_torch_save_file_is_loaded_straight_into_a_sharded_state_dict() {
    let expected = fs::read(fixture().join("expected.safetensors")).unwrap();
    let len = header_len(&expected[..8], expected.len() as u64).unwrap();
    let (head, data) = expected.split_at(usize::try_from(PREFIX_LEN + len).unwrap());
    let header = Header::parse(&head[8..], data.len() as u64).unwrap();
    for file in ["zip.pt", "legacy.pt"] {
        let group = LocalGroup::new(4).deadline(Duration::from_secs(120)).build();
        let ranks = group.into_iter().map(|member| {
            let group: Arc<dyn Collective> = Arc::new(member);
            let header = &header;
            move || {
                let rank = u64::from(group.rank());
                let mut state = StateDict::new();
                for (fqn, info) in header.tensors() {
                    let shard = [part(&info.shape, rank)];
                    let zeros = Tensor::zeros_sharded(info.dtype, info.shape.clone(), shard);
                    state.insert(Arc::clone(fqn), zeros.unwrap());
                }
                state.insert("epoch", Value::None);
                state.insert("optim.param_groups.0.betas", Value::None);
                let members = Arc::clone(&group);
                let checkpointer = Checkpointer::in_group(group).reader(move |storage| {
                    let inner = (rank == 1).then(|| {
                        let key = Key::new(file).unwrap();
                        Arc::new(TorchSaveReader::new(storage, key)) as Arc<dyn StorageReader>
                    });
                    BroadcastReader::new(inner, Arc::clone(&members), 1)
                });
                let folder = fixture().display().to_string();
                checkpointer.load(&mut state, folder).blocking().unwrap();
                for (fqn, info) in header.tensors() {
                    let tensor = state.get(fqn).unwrap().as_tensor().unwrap();
                    let shard = &tensor.shards()[0];
                    let found = shard.view().unwrap().payload().unwrap().to_bytes();
                    assert_eq!(found, elements(info, data, shard.region()), "{file} {fqn}");
                }
                assert_eq!(state.get("epoch").unwrap().as_int(), Some(3));
                let betas = Value::Tuple(vec![Value::Float(0.9), Value::Float(0.999)]);
                assert!(state.get("optim.param_groups.0.betas").unwrap().same(&betas));
                assert_eq!(header.tensors().filter(|(_, i)| i.dtype == DType::Int64).count(), 1);
            }
        });
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks.map(|rank| scope.spawn(rank)).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
