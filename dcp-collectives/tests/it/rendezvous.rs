//! Forming a group over TCP when ranks are missing, late or foreign.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use crate::groups::{config, listener, loopback, reserved_port, tcp_group, with_growing_deadline};
use dcp_collectives::TcpCollective;
use dcp_core::{Collective, CollectiveError};
use dcp_testing::on_each;

type Connected = Result<TcpCollective, CollectiveError>;

fn barriers(group: Vec<Connected>) {
    let group = group.into_iter().map(Result::unwrap).collect();
    let results = on_each(group, |rank| rank.barrier());
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// The greeting of a rank without a secret: magic, version, protection and a number.
const GREETING: [u8; 48] = {
    let mut greeting = [0; 48];
    let (head, _) = greeting.split_at_mut(12);
    head.copy_from_slice(b"dcp-coll\x03\0\0\0");
    greeting
};

/// Exchanges greetings.
fn greet(stream: &mut TcpStream) {
    stream.write_all(&GREETING).unwrap();
    stream.read_exact(&mut [0; 48]).unwrap();
}

/// One item of a handshake: its length, then CBOR.
fn item(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; head[0].into()];
    stream.read_exact(&mut body).unwrap();
    body
}

/// Joins as rank 1 of 3 and returns the connection once rank 0 has welcomed it.
fn one_that_joins(port: u16) -> TcpStream {
    let body = b"\xa5\x63job\x60\x6aworld_size\x03\x64rank\x01\
        \x62to\x00\x67purpose\xa1\x64Join\xa2\x64port\x01\x62ip\xf6";
    let len = u32::try_from(body.len()).unwrap();
    let mut stream = TcpStream::connect((loopback(), port)).unwrap();
    greet(&mut stream);
    stream.write_all(&[&len.to_le_bytes(), &body[..]].concat()).unwrap();
    let reply = item(&mut stream);
    assert!(reply.ends_with(b"Welcome"), "{reply:?}");
    stream
}

fn refusal(connected: Connected) -> String {
    match connected {
        Err(CollectiveError::Rendezvous { message }) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_late_master_is_waited_for() {
    let (_reserved, port) = reserved_port();
    // It hangs up on every rank, and so shows that both ranks have come.
    let door = TcpListener::bind((loopback(), port)).unwrap();
    let group = thread::scope(|scope| {
        let early = [1, 2].map(|rank| scope.spawn(move || config(rank, 3, port).connect()));
        let mut seen = BTreeSet::new();
        while seen.len() < 2 {
            let mut stream = door.accept().unwrap().0;
            greet(&mut stream);
            let hello = item(&mut stream);
            let at = hello.windows(4).position(|bytes| bytes == b"rank").unwrap();
            seen.insert(hello[at + 4]);
        }
        drop(door);
        let master = config(0, 3, port).connect();
        std::iter::once(master).chain(early.map(|rank| rank.join().unwrap())).collect()
    });
    barriers(group);
}

#[test]
fn strangers_disturb_nobody() {
    let (listener, port) = listener();
    let strangers = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        Vec::new(),
        b"dcp-coll".to_vec(),
        [&b"dcp-coll\x01\0\0\0"[..], &[0; 100]].concat(),
        [&GREETING[..], &[0xff; 4]].concat(),
        [&GREETING[..], b"\x04\0\0\0\xff\xff\xff\xff"].concat(),
        vec![0xff; 5000],
    ]
    .map(|bytes| {
        let mut stranger = TcpStream::connect((loopback(), port)).unwrap();
        stranger.write_all(&bytes).unwrap();
        stranger
    });
    let group = thread::scope(|scope| {
        let others = [1, 2].map(|rank| scope.spawn(move || config(rank, 3, port).connect()));
        let master = config(0, 3, port).listener(listener).connect();
        std::iter::once(master).chain(others.map(|rank| rank.join().unwrap())).collect()
    });
    drop(strangers);
    barriers(group);
}

#[test]
fn who_does_not_belong_is_told_why_and_the_group_forms() {
    let (listener, port) = listener();
    thread::scope(|scope| {
        let master = scope.spawn(move || config(0, 3, port).listener(listener).connect());
        // Rank 2 is still missing, so of two that say they are rank 1 only the refused one returns.
        let (sender, outcomes) = mpsc::channel();
        for _ in 0..2 {
            let sender = sender.clone();
            scope.spawn(move || sender.send(config(1, 3, port).connect()).unwrap());
        }
        let message = refusal(outcomes.recv().unwrap());
        assert!(message.contains("a rank 1 already"), "{message}");
        let message = refusal(config(2, 4, port).connect());
        assert!(message.contains("WORLD_SIZE 4"), "{message}");
        let message = refusal(config(2, 3, port).job("other").connect());
        assert!(message.contains("DCP_JOB_ID"), "{message}");
        let two = config(2, 3, port).connect();
        barriers(vec![master.join().unwrap(), outcomes.recv().unwrap(), two]);
    });
    let message = refusal(config(3, 3, port).connect());
    assert!(message.contains("no rank 3 of 3"), "{message}");
}

#[test]
fn missing_ranks_are_named_to_everybody() {
    with_growing_deadline(|timeout| {
        let (listener, port) = listener();
        let (zero, two) = thread::scope(|scope| {
            let two = config(2, 4, port).connect_timeout(16 * timeout);
            let two = scope.spawn(move || two.connect());
            let zero = config(0, 4, port).listener(listener).connect_timeout(timeout).connect();
            (refusal(zero), refusal(two.join().unwrap()))
        });
        for message in [zero, two] {
            assert!(message.contains("2 of 4 ranks are missing: 1, 3"), "{message}");
        }
    });
}

#[test]
fn a_master_that_never_listened_is_named_with_its_address() {
    with_growing_deadline(|timeout| {
        let (_reserved, port) = reserved_port();
        let message = refusal(config(1, 2, port).connect_timeout(timeout).connect());
        assert!(message.contains(&format!("{}:{port}", loopback())), "{message}");
        assert!(message.contains("rank 0 does not listen there"), "{message}");
    });
}

#[test]
fn a_master_that_is_something_else_is_named() {
    let timeout = Duration::from_millis(300);
    // Answers until the end: a port that is free again may become that of another group.
    let (other, port) = listener();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok((mut stream, _)) = other.accept() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let _ = stream.read(&mut [0; 1000]);
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
        let outcome = config(1, 2, port).connect_timeout(timeout).connect();
        is_over.store(true, Ordering::Relaxed);
        TcpStream::connect((loopback(), port)).unwrap();
        let message = refusal(outcome);
        assert!(message.contains("cannot join rank 0"), "{message}");
    });
}

#[test]
fn a_taken_port_is_an_error_that_says_what_to_do() {
    let (_taken, port) = listener();
    let error = config(0, 2, port).connect().unwrap_err();
    let CollectiveError::CannotListen { address, variable, .. } = &error else { panic!("{error}") };
    assert_eq!((&**address, *variable), (&*format!("{}:{port}", loopback()), "DCP_MASTER_PORT"));
    assert_eq!(error.rank(), Some(0));
}

#[test]
fn a_rank_that_died_while_waiting_can_come_again() {
    let (listener, port) = listener();
    thread::scope(|scope| {
        let master = scope.spawn(move || config(0, 3, port).listener(listener).connect());
        let mut dead = one_that_joins(port);
        let one = scope.spawn(move || config(1, 3, port).connect());
        // The end of the first arrives after its successor.
        let probe = item(&mut dead);
        assert!(probe.ends_with(b"Probe"), "{probe:?}");
        drop(dead);
        let two = config(2, 3, port).connect();
        barriers(vec![master.join().unwrap(), one.join().unwrap(), two]);
    });
}

#[test]
fn alone_there_is_nothing_to_wait_for() {
    let alone = config(0, 1, 1).connect().unwrap();
    assert_eq!(alone.all_gather("x".into()), Ok(vec!["x".into()]));
    assert_eq!(alone.subgroup(&[0]).unwrap().barrier(), Ok(()));
}

#[test]
fn subgroups_count_their_own_ranks_and_calls() {
    let results: Vec<Result<_, CollectiveError>> =
        on_each(tcp_group(6, |config| config), |group| {
            let rank = group.rank();
            let ranks: &[u32] = if rank % 2 == 1 { &[5, 1, 3] } else { &[0, 2, 4] };
            let half = group.subgroup(ranks)?;
            let again = group.subgroup(ranks)?;
            if rank % 2 == 1 {
                half.barrier()?;
            }
            let all = half.all_gather(vec![rank as u8].into())?;
            assert!(all.iter().map(|message| u32::from(message[0])).eq(ranks.iter().copied()));
            let got = again.gather(2, vec![again.rank() as u8].into())?;
            assert_eq!(got.is_some(), rank == ranks[2]);
            let pair = if rank < 2 { Some(half.subgroup(&[rank; 1]).is_ok()) } else { None };
            drop(half);
            group.barrier()?;
            Ok(pair)
        });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_subgroup_fails_with_its_member_and_the_group_goes_on() {
    let results = on_each(tcp_group(4, |config| config), |group| {
        if group.rank() == 0 {
            group.barrier()?;
            return Ok(());
        }
        let subgroup = group.subgroup(&[1, 2, 3])?;
        if group.rank() == 2 {
            drop(subgroup);
        } else {
            match subgroup.barrier() {
                Err(CollectiveError::PeerLost { rank: 1, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        group.barrier()
    });
    assert_eq!(results, vec![Ok(()); 4]);
}

#[test]
fn a_rank_that_does_not_join_a_subgroup_is_named_as_the_group_counts() {
    with_growing_deadline(|timeout| {
        let group = tcp_group(4, |config| config.connect_timeout(timeout));
        let over = Barrier::new(4);
        let results = on_each(group, |group| {
            let joined = match group.rank() {
                0 | 3 => Ok(()),
                _ => group.subgroup(&[2, 1, 3]).map(drop),
            };
            over.wait();
            joined
        });
        let late = CollectiveError::Timeout { rank: 3, op: "rendezvous", deadline: timeout };
        assert_eq!(results, [Ok(()), Err(late.clone()), Err(late), Ok(())]);
    });
}

#[test]
fn a_member_that_aborts_the_group_ends_the_wait_for_a_subgroup() {
    let results = on_each(tcp_group(3, |config| config), |group| {
        if group.rank() == 2 {
            group.abort("out of memory");
            return Ok(());
        }
        group.subgroup(&[0, 1, 2]).map(drop)
    });
    let aborted = CollectiveError::Aborted { rank: 2, reason: "out of memory".to_owned() };
    assert_eq!(results, [Err(aborted.clone()), Err(aborted), Ok(())]);
}
