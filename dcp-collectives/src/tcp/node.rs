//! What a process shares among its groups: a listener, and the addresses of the other ranks.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dcp_core::Rank;

use super::dial::{self, DialError};
use super::wire::{self, Hello, Purpose, Reply};
use crate::deadline::Deadline;
use crate::mesh::frame::{MAX_ITEM, is_pause};
use crate::mesh::socket::Socket;
use crate::mesh::{Arrivals, Channel, Kind, OpenError, Opening, Patience, TICK, Transport};

/// The deadline for the first message of an unknown connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Handshakes that go on at the same time.
const MAX_HANDSHAKES: u32 = 128;

/// A rank that joins, and where it listens.
#[derive(Debug)]
pub(super) struct Joiner {
    pub(super) rank: Rank,
    pub(super) address: SocketAddr,
    pub(super) stream: TcpStream,
}

/// What the threads that shake hands know.
#[derive(Debug)]
struct Desk {
    job: String,
    rank: Rank,
    world_size: u32,
    stop: AtomicBool,
    joiners: Mutex<Option<Sender<Joiner>>>,
    arrivals: Arrivals,
    handshakes: Mutex<u32>,
    finished: Condvar,
}

/// This process among the others. Dropping it closes the listener.
#[derive(Debug)]
pub(super) struct Node {
    desk: Arc<Desk>,
    local: SocketAddr,
    /// Where each rank listens.
    addresses: Vec<SocketAddr>,
    acceptor: Option<JoinHandle<()>>,
}

impl Node {
    /// Begins to accept connections; `joiners` receives the ranks that join, until
    /// [`close_desk`](Self::close_desk).
    pub(super) fn start(
        listener: TcpListener,
        job: &str,
        rank: Rank,
        world_size: u32,
        joiners: Option<Sender<Joiner>>,
    ) -> io::Result<Self> {
        let desk = Arc::new(Desk {
            job: job.to_owned(),
            rank,
            world_size,
            stop: AtomicBool::new(false),
            joiners: Mutex::new(joiners),
            arrivals: Arrivals::new(world_size),
            handshakes: Mutex::new(0),
            finished: Condvar::new(),
        });
        listener.set_nonblocking(false)?;
        let local = listener.local_addr()?;
        let acceptor = thread::Builder::new().name(format!("dcp accept {rank}")).spawn({
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
        let hello = Hello { job: self.desk.job.clone(), world_size, rank, purpose };
        match dial::dial(*address, &hello, patience) {
            Ok(stream) => Ok(Arc::new(Socket::new(stream))),
            Err(DialError::Io(error)) if is_pause(&error) => Err(OpenError::Slow),
            Err(DialError::Io(error)) => failed(format!("it cannot be reached: {error}")),
            Err(DialError::Refused { reason, .. }) => {
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
        desk.begin_handshake();
        let guest = Arc::clone(desk);
        let spawned = thread::Builder::new().name("dcp handshake".to_owned()).spawn(move || {
            if let Err(error) = guest.admit(stream) {
                tracing::debug!(%error, "turned a connection away");
            }
            guest.end_handshake();
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot answer a connection");
            desk.end_handshake();
        }
    }
}

impl Desk {
    fn joiners(&self) -> MutexGuard<'_, Option<Sender<Joiner>>> {
        self.joiners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_handshake(&self) {
        let count = self.handshakes.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = |count: &mut u32| *count >= MAX_HANDSHAKES && !self.stop.load(Ordering::SeqCst);
        let mut count =
            self.finished.wait_while(count, busy).unwrap_or_else(PoisonError::into_inner);
        *count += 1;
    }

    fn end_handshake(&self) {
        *self.handshakes.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.finished.notify_one();
    }

    /// Reads the purpose of a connection and passes it on.
    fn admit(&self, stream: TcpStream) -> io::Result<()> {
        let patience = Patience {
            deadline: Deadline::after(HANDSHAKE),
            give_up: &|| self.stop.load(Ordering::SeqCst),
        };
        let hello: Hello = wire::receive(&stream, MAX_ITEM, patience)?;
        if hello.job != self.job {
            return refuse(&stream, "this is another job (DCP_JOB_ID)", false);
        }
        dial::configure(&stream)?;
        match hello.purpose {
            Purpose::Join { port, ip } => self.admit_joiner(&hello, port, ip, stream),
            Purpose::Control { group } => self.admit_peer(&hello, group, Kind::Control, stream),
            Purpose::Data { group } => self.admit_peer(&hello, group, Kind::Data, stream),
        }
    }

    fn admit_joiner(
        &self,
        hello: &Hello,
        port: u16,
        ip: Option<IpAddr>,
        stream: TcpStream,
    ) -> io::Result<()> {
        if hello.world_size != self.world_size {
            let reason = format!(
                "rank {} has WORLD_SIZE {}, rank {} has {}",
                hello.rank, hello.world_size, self.rank, self.world_size
            );
            return refuse(&stream, reason, false);
        }
        if hello.rank >= self.world_size {
            let reason = format!("there is no rank {} of {}", hello.rank, self.world_size);
            return refuse(&stream, reason, false);
        }
        let ip = match ip {
            Some(ip) => ip,
            None => stream.peer_addr()?.ip().to_canonical(),
        };
        let joiner = Joiner { rank: hello.rank, address: SocketAddr::new(ip, port), stream };
        let joiner = match &*self.joiners() {
            Some(joiners) => joiners.send(joiner).err().map(|error| error.0),
            None => Some(joiner),
        };
        match joiner {
            Some(joiner) => refuse(&joiner.stream, "all ranks have joined already", true),
            None => Ok(()),
        }
    }

    fn admit_peer(
        &self,
        hello: &Hello,
        group: u64,
        kind: Kind,
        stream: TcpStream,
    ) -> io::Result<()> {
        let (world_size, rank) = (hello.world_size, hello.rank);
        let opening = Opening { group, world_size, rank, kind };
        let mut stream = Some(stream);
        let turned_away = self.arrivals.put(opening, || {
            let stream = stream.take().ok_or_else(|| wire::invalid("it was taken already"))?;
            answer(&stream, &Reply::Welcome)?;
            Ok(Arc::new(Socket::new(stream)))
        })?;
        match (turned_away, stream) {
            (Some(away), Some(stream)) => refuse(&stream, away.reason, away.retry),
            _ => Ok(()),
        }
    }
}

/// Sends an answer that fits the socket's buffer.
pub(super) fn answer(stream: &TcpStream, reply: &Reply) -> io::Result<()> {
    wire::send(stream, reply, Patience::until(Deadline::after(HANDSHAKE)))
}

pub(super) fn refuse(stream: &TcpStream, reason: impl Into<String>, retry: bool) -> io::Result<()> {
    let reason = reason.into();
    tracing::debug!(%reason, "refused a connection");
    answer(stream, &Reply::Refused { reason, retry })
}
