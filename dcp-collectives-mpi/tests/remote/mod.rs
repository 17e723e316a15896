//! A member of a group that lives in another process.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use dcp_collectives_mpi::MpiCollective;
use dcp_core::{Collective, CollectiveError, Rank};

/// The handle in the process of the suite.
#[derive(Debug)]
pub(crate) struct Member {
    rank: Rank,
    world_size: u32,
    stream: Mutex<TcpStream>,
}

fn put(mut to: impl Write, numbers: &[u64], messages: &[Bytes]) -> io::Result<()> {
    let mut bytes = Vec::new();
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend((messages.len() as u64).to_le_bytes());
    for message in messages {
        bytes.extend((message.len() as u64).to_le_bytes());
        bytes.extend_from_slice(message);
    }
    to.write_all(&bytes)
}

fn number(mut from: impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn messages(mut from: impl Read) -> io::Result<Vec<Bytes>> {
    (0..number(&mut from)?)
        .map(|_| {
            let mut message = vec![0; number(&mut from)? as usize];
            from.read_exact(&mut message)?;
            Ok(message.into())
        })
        .collect()
}

const GATHER: u64 = 0;
const SCATTER: u64 = 1;
const BROADCAST: u64 = 2;
const ALL_GATHER: u64 = 3;
const BARRIER: u64 = 4;
const ABORT: u64 = 5;
const PANIC: u64 = 6;

impl Member {
    /// Has the process at this port make a member.
    pub(crate) fn request(port: u16, rank: Rank, world_size: u32, deadline: Duration) -> Self {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_nodelay(true).unwrap();
        put(&mut stream, &[world_size.into(), deadline.as_millis() as u64], &[]).unwrap();
        Self { rank, world_size, stream: Mutex::new(stream) }
    }

    /// Waits until the member is there.
    pub(crate) fn ready(self) -> Self {
        assert_eq!(number(&*self.stream.lock().unwrap()).unwrap(), 1, "rank {}", self.rank);
        self
    }

    fn call(
        &self,
        op: u64,
        root: Rank,
        passed: Option<&[Bytes]>,
    ) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        let mut stream = self.stream.lock().unwrap();
        let is_some = u64::from(passed.is_some());
        put(&mut *stream, &[op, root.into(), is_some], passed.unwrap_or_default()).unwrap();
        let (code, rank, millis) = (
            number(&*stream).unwrap(),
            number(&*stream).unwrap() as Rank,
            number(&*stream).unwrap(),
        );
        let messages = messages(&*stream).unwrap();
        let text = |at: usize| {
            messages.get(at).map(|text| String::from_utf8_lossy(text).into_owned()).unwrap()
        };
        // The names of operations are few.
        let op = || &*Box::leak(text(0).into_boxed_str());
        Err(match code {
            0 => return Ok(None),
            1 => return Ok(Some(messages)),
            2 => CollectiveError::PeerLost { rank, op: op(), message: text(1) },
            3 => {
                let deadline = Duration::from_millis(millis);
                CollectiveError::Timeout { rank, op: op(), deadline }
            }
            4 => CollectiveError::Aborted { rank, reason: text(1) },
            5 => CollectiveError::Mismatch { rank, op: op(), message: text(1) },
            _ => CollectiveError::Rendezvous { message: text(1) },
        })
    }
}

impl Collective for Member {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.call(GATHER, root, Some(&[mine]))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.call(SCATTER, root, all.as_deref()).map(|got| got.unwrap()[0].clone())
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let passed = from_root.map(|message| [message]);
        let passed = passed.as_ref().map(<[Bytes; 1]>::as_slice);
        self.call(BROADCAST, root, passed).map(|got| got.unwrap()[0].clone())
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.call(ALL_GATHER, 0, Some(&[mine])).map(Option::unwrap)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.call(BARRIER, 0, None).map(drop)
    }

    fn abort(&self, reason: &str) {
        drop(self.call(ABORT, 0, Some(&[reason.to_owned().into()])));
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if thread::panicking() {
            drop(self.call(PANIC, 0, None));
        }
    }
}

/// Ends a server.
pub(crate) fn quit(port: u16) {
    put(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap(), &[0, 0], &[]).unwrap();
}

/// Makes members and their calls, until [`quit`] and until all of them are gone.
pub(crate) fn serve(listener: &TcpListener, world: &Arc<MpiCollective>) {
    thread::scope(|scope| {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            let world_size = number(&mut stream).unwrap() as u32;
            let deadline = Duration::from_millis(number(&mut stream).unwrap());
            messages(&mut stream).unwrap();
            if world_size == 0 {
                return;
            }
            scope.spawn(move || {
                let ranks: Vec<Rank> = (0..world_size).collect();
                let member = world.subgroup_within(&ranks, deadline).unwrap();
                stream.write_all(&1_u64.to_le_bytes()).unwrap();
                // The last call of a member may be a panic.
                drop(catch_unwind(AssertUnwindSafe(move || while answer(&stream, &member) {})));
            });
        }
    });
}

/// Makes one call, unless there are no more.
fn answer(mut stream: &TcpStream, member: &MpiCollective) -> bool {
    let Ok(op) = number(stream) else { return false };
    let root = number(stream).unwrap() as Rank;
    let is_some = number(stream).unwrap() == 1;
    let passed = messages(stream).unwrap();
    let mine = || passed[0].clone();
    let outcome = match op {
        GATHER => member.gather(root, mine()),
        SCATTER => member.scatter(root, is_some.then(|| passed.clone())).map(|got| Some(vec![got])),
        BROADCAST => member.broadcast(root, is_some.then(mine)).map(|got| Some(vec![got])),
        ALL_GATHER => member.all_gather(mine()).map(Some),
        BARRIER => member.barrier().map(|()| None),
        ABORT => {
            member.abort(std::str::from_utf8(&mine()).unwrap());
            Ok(None)
        }
        _ => panic!("the suite panicked"),
    };
    let text = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    let (numbers, messages) = match outcome {
        Ok(None) => ([0, 0, 0], Vec::new()),
        Ok(Some(messages)) => ([1, 0, 0], messages),
        Err(error) => match &error {
            CollectiveError::PeerLost { rank, op, message } => {
                ([2, u64::from(*rank), 0], vec![text(op), text(message)])
            }
            CollectiveError::Timeout { rank, op, deadline } => {
                ([3, u64::from(*rank), deadline.as_millis() as u64], vec![text(op)])
            }
            CollectiveError::Aborted { rank, reason } => {
                ([4, u64::from(*rank), 0], vec![text(""), text(reason)])
            }
            CollectiveError::Mismatch { rank, op, message } => {
                ([5, u64::from(*rank), 0], vec![text(op), text(message)])
            }
            error => ([6, 0, 0], vec![text(""), text(&error.to_string())]),
        },
    };
    put(&mut stream, &numbers, &messages).is_ok()
}
