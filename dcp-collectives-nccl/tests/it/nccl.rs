//! Groups over NCCL, where there are two devices; where there are none, the reason.

use std::sync::Arc;

use bytes::Bytes;
use dcp_collectives::LocalGroup;
use dcp_collectives_nccl::{BulkCollective, NcclNetwork};
use dcp_core::Collective as _;
use dcp_testing::on_each;

#[test]
fn ranks_send_over_nccl_or_all_of_them_over_the_inner_group() {
    let group = LocalGroup::new(2).build();
    let unavailable = on_each(group, |member| {
        let network = NcclNetwork::new(member.rank() as usize);
        let builder = BulkCollective::builder(Arc::new(member), network).threshold(10);
        let group = builder.chunk_bytes(1000).connect().unwrap();
        assert_eq!(group.is_bulk(), group.unavailable().is_empty());
        let whole: Bytes = (0..100_000_u32).map(|at| (at ^ (at >> 8)) as u8).collect();
        for root in 0..2 {
            let mine = (group.rank() == root).then(|| whole.clone());
            assert_eq!(group.broadcast(root, mine).unwrap(), whole);
        }
        assert_eq!(group.all_gather(whole.clone()).unwrap(), [whole.clone(), whole]);
        group.unavailable().to_vec()
    });
    assert_eq!(unavailable[0], unavailable[1]);
    for (rank, reason) in &unavailable[0] {
        assert!(reason.contains("CUDA") || reason.contains("NCCL"), "{reason}");
        println!("SKIPPED: NCCL on rank {rank}: {reason}");
    }
}
