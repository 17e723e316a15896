//! Which path the messages of a group take, and what is left of a group that failed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use dcp_collectives::LocalGroup;
use dcp_collectives_nccl::{BulkBuilder, BulkCollective};
use dcp_core::{Collective, CollectiveError};
use dcp_testing::{on_each, with_growing_deadline};

use crate::fake::{FakeLink, FakeNetwork, Fault, Hub};

/// Longer than any test takes.
const PATIENT: Duration = Duration::from_secs(120);
/// For what never comes.
const SHORT: Duration = Duration::from_millis(300);

fn noise(len: usize, seed: u32) -> Bytes {
    (0..len as u32).map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed) as u8).collect()
}

/// Forms a group with a fault on each rank, and runs `main` on its members.
fn run<T: Send>(
    faults: &[Fault],
    options: impl Fn(BulkBuilder<FakeNetwork>) -> BulkBuilder<FakeNetwork> + Sync,
    main: impl Fn(BulkCollective<FakeLink>) -> T + Sync,
) -> (Vec<T>, Arc<Hub>) {
    let hub = Arc::new(Hub::default());
    let group = LocalGroup::new(faults.len() as u32).deadline(PATIENT).build();
    let outcomes = on_each(group, |member| {
        let network = FakeNetwork::new(&hub, faults[member.rank() as usize]);
        let builder = BulkCollective::builder(Arc::new(member), network).deadline(PATIENT);
        main(options(builder).connect().unwrap())
    });
    (outcomes, hub)
}

#[test]
fn large_messages_go_over_the_network_in_chunks_and_small_ones_do_not() {
    let small = |builder: BulkBuilder<_>| builder.threshold(1000).chunk_bytes(300);
    let (_, hub) = run(&[Fault::None; 3], small, |group| {
        assert!(group.is_bulk() && group.unavailable().is_empty());
        for root in 0..3 {
            for len in [0, 999, 1000, 1001, 5000] {
                let mine = (group.rank() == root).then(|| noise(len, root));
                assert_eq!(group.broadcast(root, mine).unwrap(), noise(len, root));
            }
        }
        // One sends a large message, another a small one, the last one none.
        let lens = [2000, 10, 0];
        let all = group.all_gather(noise(lens[group.rank() as usize], group.rank())).unwrap();
        assert_eq!(all, (0..3).map(|rank| noise(lens[rank as usize], rank)).collect::<Vec<_>>());
        let gathered = group.gather(1, noise(5000, group.rank())).unwrap();
        assert_eq!(gathered.is_some(), group.rank() == 1);
    });
    let expected = 3 * (1000 + 1001 + 5000) + 2000;
    assert_eq!(hub.sent_bytes.load(Ordering::SeqCst), expected);
    assert_eq!(hub.largest.load(Ordering::SeqCst), 300);
    assert_eq!(hub.chunks.load(Ordering::SeqCst), 3 * (4 + 4 + 17) + 7);
    assert_eq!(hub.aborts.load(Ordering::SeqCst), 0);
}

#[test]
fn the_options_of_rank_0_count() {
    let hub = Arc::new(Hub::default());
    on_each(LocalGroup::new(2).deadline(PATIENT).build(), |member| {
        let (rank, network) = (member.rank(), FakeNetwork::new(&hub, Fault::None));
        let builder = BulkCollective::builder(Arc::new(member), network);
        let builder = builder.threshold(100 + u64::from(rank)).chunk_bytes(10 + rank as usize);
        let group = builder.connect().unwrap();
        let mine = (rank == 1).then(|| noise(100, 1));
        assert_eq!(group.broadcast(1, mine).unwrap(), noise(100, 1));
    });
    assert_eq!(hub.chunks.load(Ordering::SeqCst), 10);
}

#[test]
fn all_ranks_use_the_inner_group_where_one_lacks_the_network() {
    for (fault, reason) in
        [(Fault::NoLibrary, "there is no libfake.so"), (Fault::NoJoin, "two ranks have one device")]
    {
        for culprit in 0..3 {
            let mut faults = [Fault::None; 3];
            faults[culprit] = fault;
            let within = if fault == Fault::NoJoin { SHORT } else { PATIENT };
            let options = |builder: BulkBuilder<_>| builder.threshold(0).deadline(within);
            let (unavailable, hub) = run(&faults, options, |group| {
                assert!(!group.is_bulk());
                let mine = (group.rank() == 2).then(|| noise(5000, 2));
                assert_eq!(group.broadcast(2, mine).unwrap(), noise(5000, 2));
                assert_eq!(group.all_gather(noise(9, group.rank())).unwrap()[1], noise(9, 1));
                group.barrier().unwrap();
                group.unavailable().to_vec()
            });
            assert!(unavailable.iter().all(|all| *all == unavailable[0]));
            assert!(unavailable[0].contains(&(culprit as u32, reason.to_owned())));
            assert_eq!(hub.sent_bytes.load(Ordering::SeqCst), 0);
        }
    }
    let faults = [Fault::NoGroup, Fault::None];
    let (unavailable, _) = run(
        &faults,
        |builder| builder,
        |group| {
            assert!(!group.is_bulk());
            group.barrier().unwrap();
            group.unavailable().to_vec()
        },
    );
    assert!(unavailable[1].contains(&(0, "no address to listen at".to_owned())));
}

#[test]
fn a_group_of_one_has_no_network() {
    let (_, hub) = run(
        &[Fault::NoLibrary],
        |builder| builder.threshold(0),
        |group| {
            assert!(!group.is_bulk() && group.unavailable().is_empty());
            assert_eq!(group.broadcast(0, Some(noise(9, 0))).unwrap(), noise(9, 0));
        },
    );
    assert_eq!(hub.joined.load(Ordering::SeqCst), 0);
}

#[test]
fn a_device_that_fails_ends_the_group_on_all_ranks_with_its_rank_and_reason() {
    let fails = |culprit: u32, within| {
        let mut faults = [Fault::None; 3];
        faults[culprit as usize] = Fault::Fails(3);
        let options =
            |builder: BulkBuilder<_>| builder.threshold(0).chunk_bytes(100).deadline(within);
        let (errors, hub) = run(&faults, options, |group| {
            let mine = (group.rank() == 0).then(|| noise(1000, 0));
            // The root may have sent all before it finds out.
            let first = group.broadcast(0, mine).map(drop);
            let later = group.barrier().and_then(|()| group.barrier()).unwrap_err();
            assert!(first.is_ok() || first == Err(later.clone()), "{first:?}, {later:?}");
            assert!(group.all_gather(noise(9, 0)).is_err());
            first.err().unwrap_or(later)
        });
        let reason = "the device fell off the bus".to_owned();
        let expected = CollectiveError::Aborted { rank: culprit, reason };
        assert_eq!(errors, vec![expected; 3]);
        assert!(hub.aborts.load(Ordering::SeqCst) > 0);
    };
    // What the root does not send, the others wait for; what they do not receive, nobody does.
    with_growing_deadline(SHORT, |within| fails(0, within));
    fails(1, PATIENT);
    fails(2, PATIENT);
}

#[test]
fn a_message_that_is_lost_ends_every_call_after_the_deadline() {
    let faults = [Fault::None, Fault::Loses(2), Fault::None];
    with_growing_deadline(SHORT, |within| {
        let options =
            |builder: BulkBuilder<_>| builder.threshold(0).chunk_bytes(100).deadline(within);
        let (errors, hub) = run(&faults, options, |group| {
            let mine = (group.rank() == 1).then(|| noise(1000, 0));
            let first = group.broadcast(1, mine).map(drop);
            // A device that sends may be done before the others have received.
            assert!(first.is_err() || group.rank() == 1, "{first:?}");
            let later = group.barrier().and_then(|()| group.barrier());
            first.and(later).unwrap_err()
        });
        let late =
            |error: &CollectiveError| matches!(error, CollectiveError::Timeout { rank: 1, .. });
        assert!(errors.iter().any(late), "{errors:?}");
        assert_eq!(hub.aborts.load(Ordering::SeqCst), 2);
    });
}

#[test]
fn an_abort_ends_this_ranks_wait_for_the_network() {
    let faults = [Fault::None, Fault::Loses(0)];
    let options = |builder: BulkBuilder<_>| builder.threshold(0);
    let (errors, _) = run(&faults, options, |group| {
        if group.rank() == 1 {
            let _sent = group.broadcast(1, Some(noise(1000, 0)));
            return group.barrier().unwrap_err();
        }
        let group = &group;
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| group.broadcast(1, None).unwrap_err());
            group.abort("the disk is full");
            waits.join().unwrap()
        })
    });
    for error in errors {
        assert!(matches!(error, CollectiveError::Aborted { rank: 0, .. }), "{error}");
    }
}

#[test]
fn longer_messages_than_agreed_are_refused_before_they_are_allocated() {
    let options = |builder: BulkBuilder<_>| builder.threshold(0).max_message(999);
    let (_, hub) = run(&[Fault::None; 2], options, |group| {
        let mine = (group.rank() == 0).then(|| noise(1000, 0));
        let error = group.broadcast(0, mine).unwrap_err();
        assert!(error.to_string().contains("1000 bytes"), "{error}");
        assert!(group.barrier().is_err());
    });
    assert_eq!(hub.sent_bytes.load(Ordering::SeqCst), 0);
}
