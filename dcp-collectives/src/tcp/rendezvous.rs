//! The rendezvous of the processes: rank 0 listens, the others connect, and all get the addresses of
//! all.
//!
//! Each rank connects to rank 0, sends the port at which it listens, and waits on that connection. When rank 0
//! has a connection of every rank, it probes all of them, and sends the table of addresses only if all
//! answer. It drops the ranks that do not, and waits for their successors. An open connection alone is no
//! sign of life: the end of a process may arrive after the connection of its successor. For the same reason,
//! a second connection of a rank is refused only if the first one answers a probe.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use dcp_core::{CollectiveError, Rank};

use super::config::TcpConfig;
use super::dial::{DialError, dial};
use super::node::{Desk, Joiner, Node, answer, refuse};
use super::wire::{self, Hello, MAX_TABLE, Presence, Purpose, Reply};
use crate::deadline::Deadline;
use crate::mesh::Patience;
use crate::mesh::frame::MAX_ITEM;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The time in which a rank that waits must answer that it is there. One that is late connects again.
const PROBE: Duration = Duration::from_secs(5);

/// The time in which rank 0 must at first greet a rank that connects to one of several ports. A stranger
/// there may say nothing; rank 0 on a busy machine gets twice as long at each attempt.
const GREETING: Duration = Duration::from_secs(1);
const LONGEST_GREETING: Duration = Duration::from_secs(16);

/// Finds the other ranks.
pub(super) fn meet(config: &mut TcpConfig) -> Result<Node, CollectiveError> {
    let deadline = Deadline::after(config.connect_timeout);
    if config.rank == 0 { host(config, deadline) } else { join(config, deadline) }
}

fn failed(message: String) -> CollectiveError {
    CollectiveError::Rendezvous { message }
}

fn host(config: &mut TcpConfig, deadline: Deadline) -> Result<Node, CollectiveError> {
    let (address, is_bound) = (config.masters(), config.bind.is_some());
    let cannot_listen = |error: io::Error| {
        let elsewhere = error.kind() == io::ErrorKind::AddrNotAvailable && is_bound;
        let variable = if elsewhere { "DCP_BIND_ADDR" } else { "DCP_MASTER_PORT" };
        let (address, message) = (address.clone(), error.to_string());
        CollectiveError::CannotListen { address, message, variable }
    };
    let listener = match config.listener.take() {
        Some(listener) => listener,
        None => listen_patiently(config, deadline).map_err(&cannot_listen)?,
    };
    let (joiners, arrivals) = mpsc::channel();
    let mut node =
        Node::start(listener, Desk::new(config, Some(joiners))).map_err(&cannot_listen)?;
    let joined = collect(&arrivals, config, deadline)?;
    node.close_desk();
    let own = config.advertise.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut addresses = vec![SocketAddr::new(own, node.local().port())];
    addresses.extend((1..config.world_size).filter_map(|rank| Some(joined.get(&rank)?.address)));
    let table = Reply::Table(addresses.clone());
    for (rank, joiner) in &joined {
        wire::send(&*joiner.channel, &table, Patience::until(deadline)).map_err(|error| {
            CollectiveError::PeerLost { rank: *rank, op: "rendezvous", message: error.to_string() }
        })?;
    }
    node.set_addresses(addresses);
    Ok(node)
}

/// Opens the master port, or the first of the other ports that is free. One that was closed a moment ago can still
/// be taken: a process that is being started holds it open until it runs its own program.
fn listen_patiently(config: &TcpConfig, deadline: Deadline) -> io::Result<TcpListener> {
    let until = Deadline::after(config.taken.min(deadline.left().unwrap_or_default()));
    let mut pause = FIRST_PAUSE;
    loop {
        let mut opened = listen_as_master(config, config.master_port);
        for port in &config.other_ports {
            match opened {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    opened = listen_as_master(config, *port);
                }
                _ => break,
            }
        }
        match (opened, until.left()) {
            (Err(error), Some(left)) if error.kind() == io::ErrorKind::AddrInUse => {
                thread::sleep(pause.min(left));
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            (done, _) => return done,
        }
    }
}

fn listen_as_master(config: &TcpConfig, port: u16) -> io::Result<TcpListener> {
    if let Some(address) = config.bind {
        return TcpListener::bind((address, port));
    }
    let resolved = (config.master_host.as_str(), port)
        .to_socket_addrs()
        .map(Iterator::collect::<Vec<_>>)
        .unwrap_or_default();
    if config.is_on_one_host() {
        return TcpListener::bind(&*resolved);
    }
    let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    if resolved.iter().any(SocketAddr::is_ipv6) {
        let with_ipv6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        return TcpListener::bind(&[with_ipv6, everywhere][..]);
    }
    TcpListener::bind(everywhere)
}

/// Waits until every other rank has come and is still there.
fn collect(
    arrivals: &Receiver<Joiner>,
    config: &TcpConfig,
    deadline: Deadline,
) -> Result<HashMap<Rank, Joiner>, CollectiveError> {
    let mut joined = HashMap::<Rank, Joiner>::new();
    loop {
        if joined.len() as u64 == u64::from(config.world_size) - 1 {
            keep_those_here(&mut joined, deadline);
            if joined.len() as u64 == u64::from(config.world_size) - 1 {
                return Ok(joined);
            }
        }
        let Some(left) = deadline.left() else {
            return Err(give_up(config, &joined));
        };
        let joiner = match arrivals.recv_timeout(left.min(Duration::from_secs(60))) {
            Ok(joiner) => joiner,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return Err(give_up(config, &joined)),
        };
        let rank = joiner.rank;
        let is_taken = rank == 0
            || joined.remove(&rank).is_some_and(|earlier| {
                let mut earlier = HashMap::from([(rank, earlier)]);
                keep_those_here(&mut earlier, deadline);
                let is_here = !earlier.is_empty();
                joined.extend(earlier);
                is_here
            });
        if is_taken {
            drop(refuse(&*joiner.channel, format!("there is a rank {rank} already"), false));
        } else if answer(&*joiner.channel, &Reply::Welcome).is_ok() {
            joined.insert(rank, joiner);
        }
    }
}

/// Sends the missing ranks to those that joined.
fn give_up(config: &TcpConfig, joined: &HashMap<Rank, Joiner>) -> CollectiveError {
    const SHOWN: usize = 10;
    let missing = (1..config.world_size).filter(|rank| !joined.contains_key(rank));
    let names = missing.clone().take(SHOWN).map(|rank| rank.to_string()).collect::<Vec<_>>();
    let count = missing.count();
    let more = if count > SHOWN { format!(" and {} more", count - SHOWN) } else { String::new() };
    let message = format!(
        "after {:?}, {count} of {} ranks are missing: {}{more}",
        config.connect_timeout,
        config.world_size,
        names.join(", ")
    );
    for joiner in joined.values() {
        drop(refuse(&*joiner.channel, message.clone(), false));
    }
    failed(message)
}

/// Drops the ranks that are no longer there. A connection alone does not show it: the end of a
/// process may arrive after what its successor sends. So each rank has to answer.
fn keep_those_here(joined: &mut HashMap<Rank, Joiner>, deadline: Deadline) {
    let until = Deadline::after(PROBE.min(deadline.left().unwrap_or_default()));
    let patience = Patience::until(until);
    joined.retain(|_, joiner| wire::send(&*joiner.channel, &Reply::Probe, patience).is_ok());
    joined.retain(|_, joiner| {
        let answer = wire::receive(&*joiner.channel, MAX_ITEM, patience);
        matches!(answer, Ok(Presence::Here))
    });
}

fn join(config: &TcpConfig, deadline: Deadline) -> Result<Node, CollectiveError> {
    let (mut pause, mut greeting, mut earlier) = (FIRST_PAUSE, GREETING, None);
    loop {
        let problem = match attempt(config, greeting, deadline) {
            Ok(node) => return Ok(node),
            Err(DialError::Refused { reason, retry: false }) => return Err(failed(reason)),
            Err(DialError::Stranger(reason)) if config.other_ports.is_empty() => {
                return Err(failed(reason));
            }
            // Rank 0 may still come, at the port that a stranger has left or at another one.
            Err(DialError::Refused { reason, .. } | DialError::Stranger(reason)) => reason,
            Err(DialError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                format!("rank 0 does not listen there ({error}); start it, or see why it ended")
            }
            Err(DialError::Io(error) | DialError::Ended(error)) => error.to_string(),
        };
        match deadline.left() {
            Some(left) => thread::sleep(pause.min(left)),
            None => {
                // The last attempt most likely ended with the time, and says no more.
                let problem = earlier.unwrap_or(problem);
                return Err(failed(format!(
                    "rank {} cannot join rank 0 at {} within {:?}: {problem}",
                    config.rank,
                    config.masters(),
                    config.connect_timeout
                )));
            }
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
        greeting = (2 * greeting).min(LONGEST_GREETING);
        earlier = Some(problem);
    }
}

/// Tries each address of the master once. What listens at one of several ports may be anything.
fn attempt(config: &TcpConfig, greeting: Duration, deadline: Deadline) -> Result<Node, DialError> {
    let mut problem = DialError::Io(io::Error::other("its name has no address"));
    for port in config.ports() {
        for master in (config.master_host.as_str(), port).to_socket_addrs()? {
            match join_at(config, master, greeting, deadline) {
                Err(error @ DialError::Refused { retry: false, .. }) => return Err(error),
                // Someone's answer says more than that nobody listens at another port.
                Err(DialError::Io(_)) if is_answer(&problem) => {}
                Err(error) => problem = error,
                done => return done,
            }
        }
    }
    Err(problem)
}

fn is_answer(problem: &DialError) -> bool {
    matches!(problem, DialError::Refused { .. } | DialError::Stranger(_))
}

fn join_at(
    config: &TcpConfig,
    master: SocketAddr,
    greeting: Duration,
    deadline: Deadline,
) -> Result<Node, DialError> {
    let listen_at = match (config.bind, master.ip()) {
        (Some(address), _) => address,
        (None, ip) if config.is_on_one_host() => ip,
        (None, IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        (None, IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let listener = TcpListener::bind((listen_at, 0))?;
    // Rank 0 sees every rank of its host at 127.0.0.1, at whatever loopback address it listens.
    let own = config.is_on_one_host().then_some(listen_at).or(config.bind);
    let own = own.filter(|address| !address.is_unspecified());
    let hello = Hello {
        job: config.job.clone(),
        world_size: config.world_size,
        rank: config.rank,
        to: 0,
        purpose: Purpose::Join {
            port: listener.local_addr()?.port(),
            ip: config.advertise.or(own),
        },
    };
    let patience = Patience::until(deadline);
    let greeting = match config.other_ports.is_empty() {
        true => patience,
        false => {
            Patience::until(Deadline::after(greeting.min(deadline.left().unwrap_or_default())))
        }
    };
    let channel = dial(master, &config.security, &hello, greeting, patience)?;
    let reply = loop {
        match wire::receive(&*channel, MAX_TABLE, patience)? {
            Reply::Probe => wire::send(&*channel, &Presence::Here, patience)?,
            reply => break reply,
        }
    };
    let addresses = match reply {
        Reply::Table(addresses) if addresses.len() as u64 == u64::from(config.world_size) => {
            addresses
        }
        Reply::Refused { reason, retry, .. } => return Err(DialError::Refused { reason, retry }),
        _ => return Err(wire::invalid("rank 0 sent no address table").into()),
    };
    let mut node = Node::start(listener, Desk::new(config, None))?;
    node.set_addresses(addresses.into_iter().map(|at| seen_from_here(at, master)).collect());
    Ok(node)
}

/// Rank 0 does not know under which address it is reached, and sees ranks on its own host at a
/// loopback address; both are where this rank found the master.
fn seen_from_here(address: SocketAddr, master: SocketAddr) -> SocketAddr {
    let ip = address.ip();
    let is_with_master = ip.is_unspecified() || (ip.is_loopback() && !master.ip().is_loopback());
    if is_with_master { SocketAddr::new(master.ip(), address.port()) } else { address }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use dcp_core::Collective;
    use dcp_testing::{loopback, on_each, reserved_port};

    use super::*;

    /// A rank that waits as long for a port as for all else.
    fn patient(rank: Rank, world_size: u32, port: u16) -> TcpConfig {
        let patience = Duration::from_secs(120);
        let config = TcpConfig::new(rank, world_size, loopback().to_string(), port);
        let mut config = config.deadline(patience).connect_timeout(patience);
        config.taken = patience;
        config
    }

    #[test]
    fn a_port_that_is_closed_a_moment_later_is_taken_over() {
        let (_reserved, port) = reserved_port();
        let earlier = TcpListener::bind((loopback(), port)).unwrap();
        let results = thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || patient(rank, 2, port).connect()));
            // Rank 1 has come, so rank 0 most likely has tried to listen.
            let mut stream = earlier.accept().unwrap().0;
            stream.read_exact(&mut [0; 1]).unwrap();
            drop((stream, earlier));
            on_each(ranks.map(|rank| rank.join().unwrap()).into(), |rank| rank?.barrier())
        });
        assert_eq!(results, [Ok(()), Ok(())]);
    }

    /// The first port is that of another job, which answers, the second one of a program that says nothing.
    #[test]
    fn a_taken_port_is_passed_over_by_all_ranks() {
        let ports = [reserved_port(), reserved_port()];
        let [taken, free] = [ports[0].1, ports[1].1];
        let (_says_nothing, silent) = dcp_testing::listener();
        let (listener, other) = (TcpListener::bind((loopback(), taken)).unwrap(), "another job");
        let stranger = patient(0, 2, taken).job(other).listener(listener);
        let (stranger, results) = thread::scope(|scope| {
            let stranger = scope.spawn(|| stranger.connect()?.barrier());
            let results = on_each(vec![0, 1, 2], |rank| {
                let config = patient(rank, 3, taken).other_ports(vec![silent, free]);
                config.job("mine").connect()?.barrier()
            });
            let last = patient(1, 2, taken).job(other).connect().and_then(|last| last.barrier());
            (last.and(stranger.join().unwrap()), results)
        });
        assert_eq!((stranger, results), (Ok(()), vec![Ok(()); 3]));
    }

    #[test]
    fn where_every_port_is_taken_the_error_names_them_and_the_variable() {
        let listeners = [dcp_testing::listener(), dcp_testing::listener()];
        let mut config = patient(0, 2, listeners[0].1).other_ports(vec![listeners[1].1]);
        config.taken = Duration::ZERO;
        let error = config.connect().unwrap_err();
        let CollectiveError::CannotListen { address, variable, .. } = &error else {
            panic!("{error}");
        };
        let both = listeners.iter().map(|(_, port)| format!("{}:{port}", loopback()));
        assert_eq!(*address, both.collect::<Vec<_>>().join(", "));
        assert_eq!(*variable, "DCP_MASTER_PORT");
        assert!(error.to_string().contains("set DCP_MASTER_PORT to a free port"), "{error}");
    }

    #[test]
    fn one_port_serves_one_group_after_the_other() {
        let (_reserved, port) = reserved_port();
        let results = on_each(vec![0, 1, 2], |rank| {
            for _ in 0..5 {
                patient(rank, 3, port).connect()?.barrier()?;
            }
            Ok::<_, CollectiveError>(())
        });
        assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn ranks_beside_the_master_are_reached_where_the_master_is() {
        let seen = |address: &str, master: &str| {
            seen_from_here(address.parse().unwrap(), master.parse().unwrap()).to_string()
        };
        assert_eq!(seen("0.0.0.0:7", "10.0.0.1:1"), "10.0.0.1:7");
        assert_eq!(seen("127.0.0.1:7", "10.0.0.1:1"), "10.0.0.1:7");
        assert_eq!(seen("127.0.0.1:7", "127.0.0.1:1"), "127.0.0.1:7");
        assert_eq!(seen("10.0.0.2:7", "10.0.0.1:1"), "10.0.0.2:7");
    }
}
