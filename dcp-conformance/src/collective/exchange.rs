//! Clauses on groups in which every rank does as it should.

use bytes::Bytes;

use super::Subject;
use super::group::{PATIENT, bulk, in_rank_order, message, shown};
use crate::case::{Outcome, ensure};

super::clauses![
    members_know_their_rank_and_the_world_size,
    gather_brings_every_message_to_the_root_in_rank_order,
    scatter_hands_each_rank_its_message,
    broadcast_hands_every_rank_the_message_of_the_root,
    all_gather_brings_every_message_to_every_rank_in_rank_order,
    barrier_waits_until_every_rank_is_here,
    messages_may_be_empty,
    messages_may_be_large,
    operations_follow_each_other_without_mixing,
    a_rank_may_leave_after_the_last_operation,
    groups_do_not_disturb_each_other,
];

/// Group sizes that every operation is tried with: alone, powers of two, and between.
const SIZES: std::ops::RangeInclusive<u32> = 1..=8;

fn members_know_their_rank_and_the_world_size(subject: &Subject) -> Outcome {
    for world_size in SIZES {
        subject.on_ranks(world_size, PATIENT, |member| {
            let (rank, size) = (member.collective.rank(), member.collective.world_size());
            ensure!(rank == member.rank, "its rank is {rank}");
            ensure!(size == world_size, "its world size is {size}");
            Ok(())
        })?;
    }
    Ok(())
}

fn gather_brings_every_message_to_the_root_in_rank_order(subject: &Subject) -> Outcome {
    for world_size in SIZES {
        subject.on_ranks(world_size, PATIENT, |member| {
            for root in 0..world_size {
                let mine = message(root, member.rank, root);
                let got = member.collective.gather(root, mine)?;
                ensure!(
                    got.is_some() == (member.rank == root),
                    "in a gather to rank {root} it got {got:?}"
                );
                if let Some(got) = got {
                    in_rank_order(&got, world_size, |from| message(root, from, root))?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn scatter_hands_each_rank_its_message(subject: &Subject) -> Outcome {
    for world_size in SIZES {
        subject.on_ranks(world_size, PATIENT, |member| {
            for root in 0..world_size {
                let all = (member.rank == root)
                    .then(|| (0..world_size).map(|to| message(to, root, to)).collect());
                let got = member.collective.scatter(root, all)?;
                let expected = message(member.rank, root, member.rank);
                ensure!(got == expected, "from root {root} it got {}", shown(&got));
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn broadcast_hands_every_rank_the_message_of_the_root(subject: &Subject) -> Outcome {
    for world_size in SIZES {
        subject.on_ranks(world_size, PATIENT, |member| {
            for root in 0..world_size {
                let mine = (member.rank == root).then(|| message(root, root, 0));
                let got = member.collective.broadcast(root, mine)?;
                let expected = message(root, root, 0);
                ensure!(got == expected, "from root {root} it got {}", shown(&got));
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn all_gather_brings_every_message_to_every_rank_in_rank_order(subject: &Subject) -> Outcome {
    for world_size in SIZES {
        subject.on_ranks(world_size, PATIENT, |member| {
            for turn in 0..3 {
                let got = member.collective.all_gather(message(turn, member.rank, 0))?;
                in_rank_order(&got, world_size, |from| message(turn, from, 0))?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn barrier_waits_until_every_rank_is_here(subject: &Subject) -> Outcome {
    use std::sync::atomic::{AtomicU32, Ordering};

    for world_size in SIZES {
        let arrived = AtomicU32::new(0);
        subject.on_ranks(world_size, PATIENT, |member| {
            for turn in 1..=3 {
                if member.rank == turn % world_size {
                    // Late: after the others, unless one of them has failed.
                    let others = turn * world_size - 1;
                    let alone = || arrived.load(Ordering::SeqCst) < others;
                    (0..10_000).take_while(|_| alone()).for_each(|_| std::thread::yield_now());
                    (0..100).for_each(|_| std::thread::yield_now());
                }
                arrived.fetch_add(1, Ordering::SeqCst);
                member.collective.barrier()?;
                let here = arrived.load(Ordering::SeqCst);
                ensure!(
                    here >= turn * world_size,
                    "barrier {turn} opened after {here} arrivals of {}",
                    turn * world_size
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn messages_may_be_empty(subject: &Subject) -> Outcome {
    for world_size in [1, 2, 5] {
        subject.on_ranks(world_size, PATIENT, |member| {
            let collective = &member.collective;
            let root = world_size - 1;
            let is_root = member.rank == root;
            let empty = Bytes::new;
            let nothing = |_| Bytes::new();
            if let Some(got) = collective.gather(root, empty())? {
                in_rank_order(&got, world_size, nothing)?;
            }
            let all = is_root.then(|| vec![empty(); world_size as usize]);
            ensure!(collective.scatter(root, all)?.is_empty(), "scatter made bytes of nothing");
            let got = collective.broadcast(root, is_root.then(empty))?;
            ensure!(got.is_empty(), "broadcast made bytes of nothing");
            in_rank_order(&collective.all_gather(empty())?, world_size, nothing)
        })?;
    }
    Ok(())
}

fn messages_may_be_large(subject: &Subject) -> Outcome {
    const LEN: usize = 5 << 20;
    for world_size in [2, 3] {
        subject.on_ranks(world_size, PATIENT, |member| {
            let collective = &member.collective;
            let root = 1;
            let is_root = member.rank == root;
            let mine = bulk(LEN, member.rank);
            if let Some(got) = collective.gather(root, mine.clone())? {
                in_rank_order(&got, world_size, |from| bulk(LEN, from))?;
            }
            let all = is_root.then(|| (0..world_size).map(|to| bulk(LEN + 1, to)).collect());
            let got = collective.scatter(root, all)?;
            ensure!(got == bulk(LEN + 1, member.rank), "scatter gave {}", shown(&got));
            let got = collective.broadcast(root, is_root.then(|| mine.clone()))?;
            ensure!(got == bulk(LEN, root), "broadcast gave {}", shown(&got));
            let got = collective.all_gather(mine)?;
            in_rank_order(&got, world_size, |from| bulk(LEN, from))
        })?;
    }
    Ok(())
}

fn operations_follow_each_other_without_mixing(subject: &Subject) -> Outcome {
    const WORLD_SIZE: u32 = 4;
    subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
        let collective = &member.collective;
        for turn in 0..100 {
            let root = turn % WORLD_SIZE;
            let is_root = member.rank == root;
            match turn % 5 {
                0 => {
                    if let Some(got) = collective.gather(root, message(turn, member.rank, root))? {
                        in_rank_order(&got, WORLD_SIZE, |from| message(turn, from, root))?;
                    }
                }
                1 => {
                    let all = is_root
                        .then(|| (0..WORLD_SIZE).map(|to| message(turn, root, to)).collect());
                    let got = collective.scatter(root, all)?;
                    ensure!(got == message(turn, root, member.rank), "it got {}", shown(&got));
                }
                2 => {
                    let mine = is_root.then(|| message(turn, root, 0));
                    let got = collective.broadcast(root, mine)?;
                    ensure!(got == message(turn, root, 0), "it got {}", shown(&got));
                }
                3 => {
                    let got = collective.all_gather(message(turn, member.rank, 0))?;
                    in_rank_order(&got, WORLD_SIZE, |from| message(turn, from, 0))?;
                }
                _ => collective.barrier()?,
            }
        }
        Ok(())
    })?;
    Ok(())
}

fn a_rank_may_leave_after_the_last_operation(subject: &Subject) -> Outcome {
    const WORLD_SIZE: u32 = 5;
    for turn in 0..15 {
        let root = turn % WORLD_SIZE;
        subject.on_ranks(WORLD_SIZE, PATIENT, |member| {
            let collective = &member.collective;
            let is_root = member.rank == root;
            let mine = message(turn, member.rank, root);
            match turn % 5 {
                0 => collective.gather(root, mine).map(drop)?,
                1 => {
                    let all = is_root.then(|| vec![mine; WORLD_SIZE as usize]);
                    collective.scatter(root, all).map(drop)?;
                }
                2 => collective.broadcast(root, is_root.then_some(mine)).map(drop)?,
                3 => collective.all_gather(mine).map(drop)?,
                _ => collective.barrier()?,
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn groups_do_not_disturb_each_other(subject: &Subject) -> Outcome {
    std::thread::scope(|scope| {
        let groups = [2_u32, 3, 4].map(|world_size| {
            scope.spawn(move || {
                subject.on_ranks(world_size, PATIENT, |member| {
                    for turn in 0..20 {
                        let mine = message(turn, member.rank, world_size);
                        let got = member.collective.all_gather(mine)?;
                        in_rank_order(&got, world_size, |from| message(turn, from, world_size))?;
                    }
                    Ok(())
                })
            })
        });
        for group in groups {
            match group.join() {
                Ok(outcome) => drop(outcome?),
                Err(_) => return Err(crate::case::Failure::new("a group panicked")),
            }
        }
        Ok(())
    })
}
