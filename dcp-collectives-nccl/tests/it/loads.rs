//! Loads of replicas, whose tensors go over the network.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dcp_collectives_nccl::BulkCollective;
use dcp_core::{Collective, DType, StateDict, StorageReader, Tensor, Value};
use dcp_engine::{BroadcastReader, Exchange, Loader, ParallelReader, ReadSharing, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_testing::{block_on, memory, on_ranks};

use crate::fake::{FakeNetwork, Fault, Hub};

const LEN: usize = 300_000;

#[test]
fn replicas_receive_tensors_over_the_network() {
    let whole: Vec<u8> = (0..LEN).map(|at| (at.wrapping_mul(31) ^ (at >> 8)) as u8).collect();
    let tensor = Tensor::replicated(DType::UInt8, [LEN as u64], whole.clone()).unwrap();
    let state = StateDict::from([("weight", Value::from(tensor)), ("step", Value::from(3))]);
    let storage = memory();
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    for way in 0..3 {
        let hub = Arc::new(Hub::default());
        on_ranks(3, |rank, inner| {
            let network = FakeNetwork::new(&hub, Fault::None);
            let group = BulkCollective::builder(inner, network).threshold(10_000);
            let group: Arc<dyn Collective> = Arc::new(group.chunk_bytes(4096).connect().unwrap());
            let reader: Arc<dyn StorageReader> = Arc::new(DcpReader::new(Arc::clone(&storage)));
            let reader: Arc<dyn StorageReader> = match way {
                0 => Arc::new(
                    ParallelReader::new(reader, Arc::clone(&group)).sharing(ReadSharing::Always),
                ),
                1 => Arc::new(
                    ParallelReader::new(reader, Arc::clone(&group))
                        .sharing(ReadSharing::Always)
                        .exchange(Exchange::GatherRounds),
                ),
                _ => {
                    let inner = (rank == 1).then_some(reader);
                    Arc::new(BroadcastReader::new(inner, Arc::clone(&group), 1))
                }
            };
            let zeros = Tensor::zeros(DType::UInt8, [LEN as u64]).unwrap();
            let mut into = StateDict::from([("weight", Value::from(zeros))]);
            into.insert("step", 0);
            block_on(Loader::with_settings(Settings::in_group(group)).load(&mut into, &reader))
                .unwrap();
            let loaded = into.at("weight").unwrap().as_tensor().unwrap().to_vec().unwrap();
            assert!(loaded == whole);
        });
        // All of the tensor, and the small messages on the inner group.
        let sent = hub.sent_bytes.load(Ordering::SeqCst);
        assert!(sent >= LEN as u64 * 9 / 10 && sent < LEN as u64 * 11 / 10, "{sent}");
    }
}
