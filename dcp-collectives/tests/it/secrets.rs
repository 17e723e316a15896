//! Groups with a shared secret, and those who do not have it.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use dcp_collectives::{Secret, TcpConfig};
use dcp_core::{Collective, CollectiveError};
use dcp_testing::on_each;

use crate::groups::{config, listener, loopback, tcp_group, with_growing_deadline};

/// The first bytes of a rank with a secret, up to its random number.
const HEAD: &[u8; 16] = b"dcp-coll\x03\0\0\0\x01\0\0\0";
const GREETING: usize = 48;
const PROOF: usize = 32;

fn secret() -> Secret {
    Secret::new([7; 32]).unwrap()
}

fn secured(rank: u32, world_size: u32, port: u16) -> TcpConfig {
    config(rank, world_size, port).secret(secret())
}

fn connect(port: u16) -> TcpStream {
    TcpStream::connect((loopback(), port)).unwrap()
}

/// What the other side sends until it hangs up.
fn all_of(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A connection that is reset ends, too.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// Forms a group of three whose ranks reach rank 0 at `at`, and makes calls. Rank 0 listens before
/// `meanwhile` begins.
fn works<T>(master: TcpListener, at: u16, meanwhile: impl FnOnce() -> T) -> T {
    let port = master.local_addr().unwrap().port();
    let (group, done) = thread::scope(|scope| {
        let zero = scope.spawn(move || secured(0, 3, port).listener(master).connect());
        let done = meanwhile();
        let others = [1, 2].map(|rank| scope.spawn(move || secured(rank, 3, at).connect()));
        let all = std::iter::once(zero).chain(others).map(|rank| rank.join().unwrap().unwrap());
        (all.collect(), done)
    });
    let results = on_each(group, |group| {
        let large = vec![group.rank() as u8; 300_000];
        let all = group.all_gather(large.into())?;
        assert!(all.iter().zip(0..).all(|(message, rank)| message.iter().all(|b| *b == rank)));
        group.barrier()
    });
    assert_eq!(results, vec![Ok(()); 3]);
    done
}

#[test]
fn ranks_with_the_secret_form_a_group_and_subgroups() {
    let group = tcp_group(4, |config| config.secret(secret()));
    let results = on_each(group, |group| {
        let pair = if group.rank() < 2 { [0, 1] } else { [2, 3] };
        group.subgroup(&pair)?.broadcast(1, (group.rank() % 2 == 1).then(|| "x".into()))?;
        group.barrier()
    });
    assert_eq!(results, vec![Ok(()); 4]);
}

#[test]
fn another_secret_or_none_is_refused_with_the_variable_to_set() {
    let (listener, port) = listener();
    let message = |config: TcpConfig| match config.connect() {
        Err(CollectiveError::Rendezvous { message }) => message,
        other => panic!("{other:?}"),
    };
    thread::scope(|scope| {
        let zero = scope.spawn(move || secured(0, 2, port).listener(listener).connect());
        let other = message(config(1, 2, port).secret(Secret::new([8; 32]).unwrap()));
        assert!(other.contains("DCP_SECRET"), "{other}");
        let none = message(config(1, 2, port));
        assert!(none.contains("DCP_SECRET_FILE"), "{none}");
        let one = secured(1, 2, port).connect().unwrap();
        drop((zero.join().unwrap().unwrap(), one));
    });
    let open = dcp_testing::listener();
    thread::scope(|scope| {
        let zero = scope.spawn(|| config(0, 2, open.1).listener(open.0).connect());
        let secured = message(secured(1, 2, open.1));
        assert!(secured.contains("the peer has none"), "{secured}");
        let one = config(1, 2, open.1).connect().unwrap();
        drop((zero.join().unwrap().unwrap(), one));
    });
}

/// More silent and babbling strangers than handshakes may be under way.
#[test]
fn strangers_neither_block_the_others_nor_get_more_than_a_greeting() {
    let (listener, port) = listener();
    let greeting = [&HEAD[..], &[5; 32]].concat();
    let stranger = |number: usize| {
        let mut stranger = connect(port);
        let bytes = match number % 4 {
            0 => Vec::new(),
            1 => greeting.clone(),
            2 => vec![0xff; 5000],
            // A wrong proof, then an announcement of 4 GiB.
            _ => [&greeting[..], &[9; PROOF], &[0xff; 4]].concat(),
        };
        // An earlier stranger may have been hung up on.
        let _ = stranger.write_all(&bytes);
        stranger
    };
    let strangers: Vec<_> = works(listener, port, || (0..200).map(stranger).collect());
    for stranger in strangers {
        let _ = stranger.shutdown(Shutdown::Write);
        let heard = all_of(stranger);
        // A greeting, and that the proof is wrong.
        assert!(heard.is_empty() || heard.starts_with(HEAD), "{heard:?}");
        assert!(heard.len() <= GREETING + PROOF, "{}", heard.len());
        assert!(heard.iter().skip(GREETING).all(|byte| *byte == 0));
    }
}

/// Passes the bytes of connections on, and keeps those of the first that reaches rank 0.
fn recorder(to: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let (door, port) = listener();
    let record = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&record);
    thread::spawn(move || {
        for (number, stream) in door.incoming().enumerate() {
            let (mut here, mut there) = (stream.unwrap(), connect(to));
            let (mut back, mut forth) = (here.try_clone().unwrap(), there.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut forth, &mut back));
            let kept = Arc::clone(&kept);
            thread::spawn(move || {
                let mut piece = [0; 4096];
                while let Ok(len @ 1..) = here.read(&mut piece) {
                    if number == 0 {
                        kept.lock().unwrap().extend_from_slice(&piece[..len]);
                    }
                    if there.write_all(&piece[..len]).is_err() {
                        break;
                    }
                }
                let _ = there.shutdown(Shutdown::Write);
            });
        }
    });
    (port, record)
}

#[test]
fn a_recorded_handshake_is_of_no_use() {
    let (listener_0, port_0) = listener();
    let (at, record) = recorder(port_0);
    works(listener_0, at, || ());
    let recorded = record.lock().unwrap().clone();
    assert!(recorded.starts_with(HEAD) && recorded.len() > GREETING + PROOF);
    // Another group with the same secret: everything that a rank said, once more.
    let (listener, port) = listener();
    let replay = works(listener, port, || {
        let mut replay = connect(port);
        replay.write_all(&recorded).unwrap();
        replay
    });
    let _ = replay.shutdown(Shutdown::Write);
    let heard = all_of(replay);
    assert!(heard.starts_with(HEAD));
    assert!(heard[GREETING..].iter().all(|byte| *byte == 0), "a proof for a replay");
}

#[test]
fn what_a_rank_says_is_no_proof_when_it_is_reflected() {
    // Who dials receives its own bytes.
    let (echo, port) = listener();
    let dialer = thread::spawn(move || secured(1, 2, port).connect());
    let (mut stream, _) = echo.accept().unwrap();
    let mut bytes = [0; GREETING + PROOF];
    stream.read_exact(&mut bytes[..GREETING]).unwrap();
    stream.write_all(&bytes[..GREETING]).unwrap();
    stream.read_exact(&mut bytes[GREETING..]).unwrap();
    stream.write_all(&bytes[GREETING..]).unwrap();
    match dialer.join().unwrap() {
        Err(CollectiveError::Rendezvous { message }) => {
            assert!(message.contains("another one"), "{message}");
        }
        other => panic!("{other:?}"),
    }

    // Who listens receives its own greeting, and the proof of that which it gives to a rank.
    let (listener, port) = listener();
    let mut stranger = connect(port);
    stranger.write_all(&[&HEAD[..], &[5; 32]].concat()).unwrap();
    let mut greeting = [0; GREETING];
    let group = thread::scope(|scope| {
        let zero = scope.spawn(|| secured(0, 2, port).listener(listener).connect());
        stranger.read_exact(&mut greeting).unwrap();
        let mut mirror = connect(port);
        mirror.write_all(&greeting).unwrap();
        let mut second = [0; GREETING];
        mirror.read_exact(&mut second).unwrap();
        mirror.write_all(&second[16..]).unwrap();
        let heard = all_of(mirror);
        assert!(heard.iter().all(|byte| *byte == 0), "{heard:?}");
        let one = secured(1, 2, port).connect().unwrap();
        [zero.join().unwrap().unwrap(), one]
    });
    drop(group);
}

/// Passes on what a rank sends to the port, with one bit changed after the handshake, and what comes
/// back.
fn change_a_bit(mut here: TcpStream, port: u16) -> std::io::Result<()> {
    let mut there = connect(port);
    let (mut back, mut forth) = (here.try_clone()?, there.try_clone()?);
    thread::spawn(move || std::io::copy(&mut forth, &mut back));
    let mut bytes = [0; GREETING + PROOF + 30];
    here.read_exact(&mut bytes[..GREETING])?;
    there.write_all(&bytes[..GREETING])?;
    let (proof, record) = bytes[GREETING..].split_at_mut(PROOF);
    for part in [proof, record] {
        here.read_exact(part)?;
        part[20] ^= u8::from(part.len() < PROOF);
        there.write_all(part)?;
    }
    let _ = std::io::copy(&mut here, &mut there);
    Ok(())
}

#[test]
fn a_changed_byte_breaks_the_connection_and_is_never_read() {
    with_growing_deadline(|timeout| {
        let (listener, port) = listener();
        let (door, at) = dcp_testing::listener();
        let outcome = thread::scope(|scope| {
            // There is no second attempt: the door closes.
            let changed = scope.spawn(move || {
                let (here, _) = door.accept().unwrap();
                drop(door);
                change_a_bit(here, port)
            });
            let one = scope.spawn(move || secured(1, 2, at).connect_timeout(timeout).connect());
            let zero = secured(0, 2, port).listener(listener).connect_timeout(timeout).connect();
            assert!(one.join().unwrap().is_err());
            // A rank that has given up before it came leaves the door open.
            drop(TcpStream::connect((loopback(), at)));
            changed.join().unwrap().unwrap();
            zero
        });
        match outcome {
            Err(CollectiveError::Rendezvous { message }) => assert!(message.contains("missing: 1")),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_rank_listens_where_it_is_bound() {
    let (_free, port) = crate::groups::reserved_port();
    let elsewhere = std::net::IpAddr::from([127, 0, 0, 93]);
    let bound = |rank| {
        TcpConfig::new(rank, 2, elsewhere.to_string(), port).bind(elsewhere).secret(secret())
    };
    let results = on_each(vec![0, 1], |rank| bound(rank).connect()?.barrier());
    assert_eq!(results, vec![Ok(()); 2]);
}

#[test]
fn the_corpus_of_the_handshake_is_read() {
    for name in ["bye", "greeting", "hello", "welcome"] {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/handshake");
        dcp_collectives::fuzzing::handshake(&std::fs::read(format!("{corpus}/{name}")).unwrap());
    }
}
