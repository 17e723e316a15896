//! Random sequences of operations give what a model on plain vectors gives, on threads and on
//! sockets, for every root.

use bytes::Bytes;
use dcp_collectives::LocalCollective;
use dcp_core::{Collective, CollectiveError};
use dcp_testing::on_each;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::groups::tcp_group;

#[derive(Clone, Copy, Debug)]
enum Step {
    Gather { root: u32, len: usize },
    Scatter { root: u32, len: usize },
    Broadcast { root: u32, len: usize },
    AllGather { len: usize },
    Barrier,
}

/// Lengths around nothing, around the buffers (16 KiB) and around the chunks (256 KiB).
fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0_usize..100,
        2 => 16_300_usize..16_500,
        1 => 262_000_usize..263_000,
    ]
}

fn steps(world_size: u32) -> impl Strategy<Value = Vec<Step>> {
    let root = 0..world_size;
    vec(
        prop_oneof![
            (root.clone(), lens()).prop_map(|(root, len)| Step::Gather { root, len }),
            (root.clone(), lens()).prop_map(|(root, len)| Step::Scatter { root, len }),
            (root, lens()).prop_map(|(root, len)| Step::Broadcast { root, len }),
            lens().prop_map(|len| Step::AllGather { len }),
            Just(Step::Barrier),
        ],
        1..16,
    )
}

/// A message that differs by step, sender and receiver, and whose length does.
fn message(step: usize, from: u32, to: u32, len: usize) -> Bytes {
    let seed = step * 31 + from as usize * 7 + to as usize * 3;
    let pattern = (0..997).map(|at| (at / 5 + seed) as u8).collect::<Vec<_>>();
    let len = len + from as usize + to as usize;
    let mut message = pattern.repeat(len / pattern.len() + 1);
    message.truncate(len);
    message.into()
}

fn run(collective: &dyn Collective, steps: &[Step]) -> Result<(), CollectiveError> {
    let (rank, world_size) = (collective.rank(), collective.world_size());
    for (at, step) in steps.iter().enumerate() {
        match *step {
            Step::Gather { root, len } => {
                let got = collective.gather(root, message(at, rank, root, len))?;
                let expected = (rank == root).then(|| {
                    (0..world_size).map(|from| message(at, from, root, len)).collect::<Vec<_>>()
                });
                assert!(got == expected, "step {at} on rank {rank}: {step:?}");
            }
            Step::Scatter { root, len } => {
                let all = (rank == root)
                    .then(|| (0..world_size).map(|to| message(at, root, to, len)).collect());
                let got = collective.scatter(root, all)?;
                assert!(got == message(at, root, rank, len), "step {at} on rank {rank}: {step:?}");
            }
            Step::Broadcast { root, len } => {
                let mine = (rank == root).then(|| message(at, root, root, len));
                let got = collective.broadcast(root, mine)?;
                assert!(got == message(at, root, root, len), "step {at} on rank {rank}: {step:?}");
            }
            Step::AllGather { len } => {
                let got = collective.all_gather(message(at, rank, 0, len))?;
                let expected = (0..world_size).map(|from| message(at, from, 0, len));
                assert!(got.into_iter().eq(expected), "step {at} on rank {rank}: {step:?}");
            }
            Step::Barrier => collective.barrier()?,
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 20, ..Default::default() })]

    #[test]
    fn sequences_of_operations_equal_a_model(
        steps in (1_u32..=9).prop_flat_map(|world_size| (Just(world_size), steps(world_size)))
    ) {
        let (world_size, steps) = steps;
        let local = on_each(LocalCollective::group(world_size), |rank| run(&rank, &steps));
        prop_assert_eq!(local, vec![Ok(()); world_size as usize]);
        let tcp = on_each(tcp_group(world_size, |config| config), |rank| run(&rank, &steps));
        prop_assert_eq!(tcp, vec![Ok(()); world_size as usize]);
    }
}

#[test]
fn every_root_of_two_to_nine_ranks() {
    for world_size in 2..=9 {
        let steps = (0..world_size)
            .flat_map(|root| {
                [
                    Step::Gather { root, len: 20_000 },
                    Step::Scatter { root, len: 300_000 },
                    Step::Broadcast { root, len: 300_000 },
                ]
            })
            .chain([Step::AllGather { len: 100_000 }, Step::Barrier])
            .collect::<Vec<_>>();
        let results = on_each(tcp_group(world_size, |config| config), |rank| run(&rank, &steps));
        assert_eq!(results, vec![Ok(()); world_size as usize]);
    }
}
