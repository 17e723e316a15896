//! The listener and the addresses of the other ranks, which a process shares among its groups.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dcp_core::Rank;

use super::config::TcpConfig;
use super::dial::{self, DialError};
use super::lobby::{Guest, Lobby};
use super::security::Security;
use super::wire::{self, Hello, Purpose, Reply};
use crate::deadline::Deadline;
use crate::mesh::frame::{MAX_ITEM, is_pause};
use crate::mesh::{Arrivals, Channel, Kind, OpenError, Opening, Patience, TICK, Transport};

/// The deadline for the first message of an unknown connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The pause before a connection is made again to a peer that hung up.
const AGAIN: Duration = Duration::from_millis(20);

/// A rank that joins, and where it listens.
#[derive(Debug)]
pub(super) struct Joiner {
    pub(super) rank: Rank,
    pub(super) address: SocketAddr,
    pub(super) channel: Arc<dyn Channel>,
}

/// The state that the threads of the handshakes share.
#[derive(Debug)]
pub(super) struct Desk {
    job: String,
    rank: Rank,
    world_size: u32,
    security: Security,
    stop: AtomicBool,
    joiners: Mutex<Option<Sender<Joiner>>>,
    arrivals: Arrivals,
    lobby: Lobby,
}

impl Desk {
    /// `joiners` receives the ranks that join, until [`Node::close_desk`].
    pub(super) fn new(config: &TcpConfig, joiners: Option<Sender<Joiner>>) -> Self {
        Self {
            job: config.job.clone(),
            rank: config.rank,
            world_size: config.world_size,
            security: config.security.clone(),
            stop: AtomicBool::new(false),
            joiners: Mutex::new(joiners),
            arrivals: Arrivals::new(config.world_size),
            lobby: Lobby::default(),
        }
    }
}

/// This process among the others. Dropping it closes the listener.
#[derive(Debug)]
pub(super) struct Node {
    desk: Arc<Desk>,
    local: SocketAddr,
    /// The address at which each rank listens.
    addresses: Vec<SocketAddr>,
    acceptor: Option<JoinHandle<()>>,
}

impl Node {
    /// Begins to accept connections.
    pub(super) fn start(listener: TcpListener, desk: Desk) -> io::Result<Self> {
        let desk = Arc::new(desk);
        listener.set_nonblocking(false)?;
        let local = listener.local_addr()?;
        let acceptor = thread::Builder::new().name(format!("dcp accept {}", desk.rank)).spawn({
            let desk = Arc::clone(&desk);
            move || accept(&desk, &listener)
        })?;
        Ok(Self { desk, local, addresses: Vec::new(), acceptor: Some(acceptor) })
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn set_addresses(&mut self, addresses: Vec<SocketAddr>) {
        self.addresses = addresses;
    }

    /// Refuses new connections from now on.
    pub(super) fn close_desk(&self) {
        *self.desk.joiners() = None;
    }
}

impl Transport for Node {
    fn open(
        &self,
        to: Rank,
        opening: Opening,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn Channel>, OpenError> {
        let failed = |message| Err(OpenError::Failed(message));
        let Some(address) = self.addresses.get(to as usize) else {
            return failed("it has no address".to_owned());
        };
        let Opening { group, world_size, rank, kind } = opening;
        let purpose = match kind {
            Kind::Control => Purpose::Control { group },
            Kind::Data => Purpose::Data { group },
        };
        let hello = Hello { job: self.desk.job.clone(), world_size, rank, to, purpose };
        match dial::dial(*address, &self.desk.security, &hello, patience, patience) {
            Ok(channel) => Ok(channel),
            Err(DialError::Ended(_)) => {
                thread::sleep(AGAIN);
                Err(OpenError::Slow)
            }
            Err(DialError::Io(error)) if is_pause(&error) => Err(OpenError::Slow),
            Err(DialError::Io(error)) => failed(format!("it cannot be reached: {error}")),
            Err(DialError::Refused { reason, .. } | DialError::Stranger(reason)) => {
                failed(format!("it refuses to talk: {reason}"))
            }
        }
    }

    fn arrivals(&self) -> &Arrivals {
        &self.desk.arrivals
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.desk.stop.store(true, Ordering::SeqCst);
        let mut wake = self.local;
        if wake.ip().is_unspecified() {
            wake.set_ip(match wake {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            });
        }
        let woken = TcpStream::connect_timeout(&wake, Duration::from_secs(1)).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| woken) {
            drop(acceptor.join());
        }
    }
}

fn accept(desk: &Arc<Desk>, listener: &TcpListener) {
    while !desk.stop.load(Ordering::SeqCst) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(TICK);
                continue;
            }
        };
        let Some(guest) = desk.lobby.enter(&stream, || desk.stop.load(Ordering::SeqCst)) else {
            continue;
        };
        let inside = Arc::clone(desk);
        let spawned = thread::Builder::new().name("dcp handshake".to_owned()).spawn(move || {
            if let Err(error) = inside.admit(stream, guest) {
                tracing::debug!(%error, "turned a connection away");
            }
            inside.lobby.leave(guest);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot answer a connection");
            desk.lobby.leave(guest);
        }
    }
}

impl Desk {
    fn joiners(&self) -> MutexGuard<'_, Option<Sender<Joiner>>> {
        self.joiners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the purpose of a connection and passes it on.
    fn admit(&self, stream: TcpStream, guest: Guest) -> io::Result<()> {
        let patience = Patience {
            deadline: Deadline::after(HANDSHAKE),
            give_up: &|| self.stop.load(Ordering::SeqCst),
        };
        dial::configure(&stream)?;
        let peer = stream.peer_addr()?.ip().to_canonical();
        let channel = self.security.accept(stream, patience)?;
        if self.security.is_strict() {
            self.lobby.trust(guest);
        }
        let hello: Hello = wire::receive(&*channel, MAX_ITEM, patience)?;
        if hello.job != self.job {
            return turn_away(&*channel, "this is another job (DCP_JOB_ID)".to_owned());
        }
        if hello.to != self.rank {
            return turn_away(&*channel, format!("this is rank {}", self.rank));
        }
        match hello.purpose {
            Purpose::Join { port, ip } => {
                self.admit_joiner(&hello, SocketAddr::new(ip.unwrap_or(peer), port), channel)
            }
            Purpose::Control { group } => self.admit_peer(&hello, group, Kind::Control, &channel),
            Purpose::Data { group } => self.admit_peer(&hello, group, Kind::Data, &channel),
        }
    }

    fn admit_joiner(
        &self,
        hello: &Hello,
        address: SocketAddr,
        channel: Arc<dyn Channel>,
    ) -> io::Result<()> {
        if hello.world_size != self.world_size {
            let reason = format!(
                "rank {} has WORLD_SIZE {}, rank {} has {}",
                hello.rank, hello.world_size, self.rank, self.world_size
            );
            return refuse(&*channel, reason, false);
        }
        if hello.rank >= self.world_size {
            let reason = format!("there is no rank {} of {}", hello.rank, self.world_size);
            return refuse(&*channel, reason, false);
        }
        let joiner = Joiner { rank: hello.rank, address, channel };
        let joiner = match &*self.joiners() {
            Some(joiners) => joiners.send(joiner).err().map(|error| error.0),
            None => Some(joiner),
        };
        match joiner {
            Some(joiner) => refuse(&*joiner.channel, "all ranks have joined already", true),
            None => Ok(()),
        }
    }

    fn admit_peer(
        &self,
        hello: &Hello,
        group: u64,
        kind: Kind,
        channel: &Arc<dyn Channel>,
    ) -> io::Result<()> {
        let (world_size, rank) = (hello.world_size, hello.rank);
        let opening = Opening { group, world_size, rank, kind };
        let turned_away = self.arrivals.put(opening, || {
            answer(&**channel, &Reply::Welcome)?;
            Ok(Arc::clone(channel))
        })?;
        match turned_away {
            Some(away) => refuse(&**channel, away.reason, away.retry),
            None => Ok(()),
        }
    }
}

/// Sends an answer that fits the socket's buffer.
pub(super) fn answer(channel: &dyn Channel, reply: &Reply) -> io::Result<()> {
    wire::send(channel, reply, Patience::until(Deadline::after(HANDSHAKE)))
}

pub(super) fn refuse(
    channel: &dyn Channel,
    reason: impl Into<String>,
    retry: bool,
) -> io::Result<()> {
    let reason = reason.into();
    tracing::debug!(%reason, "refused a connection");
    answer(channel, &Reply::Refused { reason, retry, stranger: false })
}

/// Answers a process that looks for another one.
fn turn_away(channel: &dyn Channel, reason: String) -> io::Result<()> {
    tracing::debug!(%reason, "turned a stranger away");
    answer(channel, &Reply::Refused { reason, retry: false, stranger: true })
}
