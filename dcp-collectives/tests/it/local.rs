//! `LocalCollective` with ranks that disagree, die, hang and panic.

use std::thread;

use bytes::Bytes;
use dcp_collectives::{LocalCollective, LocalGroup};
use dcp_core::{Collective, CollectiveError};

use crate::groups::{PATIENT, with_growing_deadline};

type Outcome<T> = Result<T, CollectiveError>;

fn run<T: Send>(
    world_size: u32,
    rank_main: impl Fn(LocalCollective) -> Outcome<T> + Sync,
) -> Vec<Outcome<T>> {
    LocalGroup::new(world_size).deadline(PATIENT).run(rank_main)
}

fn text(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

#[test]
fn a_rank_that_drops_its_handle_is_named_at_once() {
    let results = run(4, |group| if group.rank() == 2 { Ok(()) } else { group.barrier() });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(()) => assert_eq!(rank, 2),
            Err(CollectiveError::PeerLost { rank: 2, op: "barrier", .. }) => {}
            Err(other) => panic!("rank {rank}: {other}"),
        }
    }
}

#[test]
fn dropping_after_the_last_call_disturbs_nobody() {
    for _ in 0..50 {
        let results =
            run(5, |group| group.gather(0, text("x")).map(|all| all.map(|all| all.len())));
        assert_eq!(results, [Ok(Some(5)), Ok(None), Ok(None), Ok(None), Ok(None)]);
    }
}

#[test]
fn a_panic_aborts_the_group_with_its_message() {
    let results = run(3, |group| {
        assert!(group.rank() != 1, "disk on fire");
        group.barrier()
    });
    let aborted = CollectiveError::Aborted { rank: 1, reason: "panicked: disk on fire".to_owned() };
    assert_eq!(results, vec![Err(aborted); 3]);
}

#[test]
fn a_panic_on_a_thread_of_the_callers_own_is_a_lost_peer() {
    let mut group = LocalGroup::new(2).deadline(PATIENT).build().into_iter();
    let (zero, one) = (group.next().unwrap(), group.next().unwrap());
    let thread = thread::spawn(move || {
        let _one = one;
        panic!("on purpose");
    });
    match zero.barrier() {
        Err(CollectiveError::PeerLost { rank: 1, message, .. }) => {
            assert_eq!(message, "its thread panicked");
        }
        other => panic!("{other:?}"),
    }
    assert!(thread.join().is_err());
}

#[test]
fn a_silent_rank_is_named_after_the_deadline() {
    with_growing_deadline(|deadline| {
        let group = LocalGroup::new(3).deadline(deadline).build();
        let late = CollectiveError::Timeout { rank: 1, op: "all_gather", deadline };
        thread::scope(|scope| {
            for rank in [0, 2] {
                let (group, late) = (&group, &late);
                scope.spawn(move || {
                    assert_eq!(group[rank].all_gather(text("")).as_ref(), Err(late));
                });
            }
        });
        assert_eq!(group[1].barrier(), Err(late), "the group stays poisoned");
    });
}

#[test]
fn different_calls_are_a_mismatch_on_every_rank() {
    let results = run(3, |group| match group.rank() {
        2 => group.broadcast(2, Some(text("x"))).map(drop),
        _ => group.gather(0, text("x")).map(drop),
    });
    for (rank, result) in (0..).zip(results) {
        match result {
            Err(CollectiveError::Mismatch { rank: peer, .. }) => assert_ne!(peer, rank),
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn an_abort_reaches_who_waits_and_who_comes_later() {
    let results = run(3, |group| {
        if group.rank() == 0 {
            group.abort("no space");
        }
        group.barrier().and_then(|()| group.barrier())
    });
    let aborted = CollectiveError::Aborted { rank: 0, reason: "no space".to_owned() };
    assert_eq!(results, vec![Err(aborted); 3]);
}

#[test]
fn subgroups_count_their_own_ranks_and_calls() {
    let results = run(5, |group| {
        let label = text(&group.rank().to_string());
        if group.rank() % 2 == 1 {
            let odd = group.subgroup(&[3, 1])?;
            odd.barrier()?;
            let all = odd.all_gather(label)?;
            let again = group.subgroup(&[3, 1])?;
            assert_eq!(again.all_gather(text(&again.rank().to_string()))?, [text("0"), text("1")]);
            group.barrier()?;
            return Ok(all);
        }
        let even = group.subgroup(&[0, 2, 4])?;
        let all = even.all_gather(label)?;
        group.barrier()?;
        Ok(all)
    });
    let (odd, even) = (vec![text("3"), text("1")], vec![text("0"), text("2"), text("4")]);
    assert_eq!(results, [Ok(even.clone()), Ok(odd.clone()), Ok(even.clone()), Ok(odd), Ok(even)]);
}

#[test]
fn a_rank_that_never_joins_its_subgroup_is_named_when_it_leaves() {
    let results = run(3, |group| {
        if group.rank() == 1 {
            return Ok(());
        }
        let subgroup = group.subgroup(&[0, 1, 2])?;
        subgroup.barrier()
    });
    assert!(matches!(results[0], Err(CollectiveError::PeerLost { rank: 1, .. })), "{results:?}");
    assert_eq!(results[0], results[2]);
    let results = run(2, |group| {
        assert!(group.rank() == 0, "early");
        group.subgroup(&[1, 0])?.barrier()
    });
    assert!(matches!(results[0], Err(CollectiveError::Aborted { .. })), "{results:?}");
}

#[test]
fn a_wrong_subgroup_is_refused() {
    let group = LocalCollective::group(2);
    for ranks in [&[][..], &[1], &[0, 0], &[0, 2]] {
        let error = group[0].subgroup(ranks).unwrap_err();
        assert!(matches!(error, CollectiveError::Rendezvous { .. }), "{error}");
    }
}
