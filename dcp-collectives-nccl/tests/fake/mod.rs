//! A network of devices whose ranks are threads of this process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use dcp_collectives_nccl::{Link, LinkDeadline, LinkError, Network};
use dcp_core::Rank;

/// What goes wrong on a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// There is no library.
    NoLibrary,
    /// The group cannot be identified.
    NoGroup,
    /// The group is not joined.
    NoJoin,
    /// The device fails at this chunk.
    Fails(u64),
    /// What this rank sends from this chunk on is lost.
    Loses(u64),
}

/// All groups, and what was done in them.
#[derive(Debug, Default)]
pub(crate) struct Hub {
    rooms: Mutex<HashMap<Vec<u8>, Arc<Room>>>,
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) chunks: AtomicU64,
    pub(crate) largest: AtomicU64,
    pub(crate) aborts: AtomicU64,
    pub(crate) joined: AtomicU64,
}

/// A group: how many have joined, and the chunks by number.
#[derive(Debug, Default)]
struct Room {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    joined: u32,
    chunks: HashMap<u64, Vec<u8>>,
}

impl Room {
    fn wait_for<T>(
        &self,
        patience: &LinkDeadline,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, LinkError> {
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            patience.check()?;
            state = self.changed.wait_timeout(state, Duration::from_millis(10)).unwrap().0;
        }
    }
}

#[derive(Debug)]
pub(crate) struct FakeNetwork {
    hub: Arc<Hub>,
    fault: Fault,
}

#[derive(Debug)]
pub(crate) struct FakeLink {
    hub: Arc<Hub>,
    room: Arc<Room>,
    fault: Fault,
    rank: Rank,
    next: u64,
    slots: [Option<(u64, Rank, usize)>; 2],
    buffer: Vec<u8>,
    chunk_bytes: usize,
    is_aborted: bool,
}

impl FakeNetwork {
    pub(crate) fn new(hub: &Arc<Hub>, fault: Fault) -> Self {
        Self { hub: Arc::clone(hub), fault }
    }
}

fn failed(reason: &str) -> LinkError {
    LinkError::Failed(reason.to_owned())
}

impl Network for FakeNetwork {
    type Link = FakeLink;

    fn name(&self) -> String {
        "a fake network".to_owned()
    }

    fn probe(&self) -> Result<(), LinkError> {
        match self.fault {
            Fault::NoLibrary => Err(failed("there is no libfake.so")),
            _ => Ok(()),
        }
    }

    fn identify(&self) -> Result<Vec<u8>, LinkError> {
        if self.fault == Fault::NoGroup {
            return Err(failed("no address to listen at"));
        }
        let mut rooms = self.hub.rooms.lock().unwrap();
        let group = vec![rooms.len() as u8; 128];
        rooms.insert(group.clone(), Arc::default());
        Ok(group)
    }

    fn join(
        &self,
        group: &[u8],
        rank: Rank,
        world_size: u32,
        chunk_bytes: usize,
        patience: &LinkDeadline,
    ) -> Result<FakeLink, LinkError> {
        if self.fault == Fault::NoJoin {
            return Err(failed("two ranks have one device"));
        }
        let room = self.hub.rooms.lock().unwrap().get(group).cloned();
        let room = room.ok_or_else(|| failed("there is no such group"))?;
        room.state.lock().unwrap().joined += 1;
        room.changed.notify_all();
        room.wait_for(patience, |state| (state.joined == world_size).then_some(()))?;
        self.hub.joined.fetch_add(1, Ordering::SeqCst);
        let (hub, fault) = (Arc::clone(&self.hub), self.fault);
        let (next, slots, buffer, is_aborted) = (0, [None; 2], Vec::new(), false);
        Ok(FakeLink { hub, room, fault, rank, next, slots, buffer, chunk_bytes, is_aborted })
    }
}

impl Link for FakeLink {
    fn start(
        &mut self,
        slot: usize,
        root: Rank,
        from: Option<&[u8]>,
        byte_len: usize,
        _: &LinkDeadline,
    ) -> Result<(), LinkError> {
        assert!(!self.is_aborted, "a link is used after it was aborted");
        assert_eq!(from.map(<[u8]>::len), (root == self.rank).then_some(byte_len));
        assert!(byte_len > 0 && byte_len <= self.chunk_bytes, "{byte_len}");
        assert_eq!(slot as u64, slot as u64 % 2);
        let number = self.next;
        self.next += 1;
        if self.fault == Fault::Fails(number) {
            return Err(failed("the device fell off the bus"));
        }
        assert!(self.slots[slot].replace((number, root, byte_len)).is_none(), "a slot in use");
        let is_lost = matches!(self.fault, Fault::Loses(first) if number >= first);
        if let Some(from) = from
            && !is_lost
        {
            self.room.state.lock().unwrap().chunks.insert(number, from.to_vec());
            self.room.changed.notify_all();
            self.hub.sent_bytes.fetch_add(byte_len as u64, Ordering::SeqCst);
            self.hub.chunks.fetch_add(1, Ordering::SeqCst);
            self.hub.largest.fetch_max(byte_len as u64, Ordering::SeqCst);
        }
        Ok(())
    }

    fn finish(&mut self, slot: usize, patience: &LinkDeadline) -> Result<&[u8], LinkError> {
        assert!(!self.is_aborted, "a link is used after it was aborted");
        let (number, root, byte_len) = self.slots[slot].take().unwrap();
        if root == self.rank {
            return Ok(&[]);
        }
        let chunk = |state: &mut State| state.chunks.get(&number).cloned();
        self.buffer = self.room.wait_for(patience, chunk)?;
        assert_eq!(self.buffer.len(), byte_len);
        Ok(&self.buffer)
    }

    fn abort(&mut self) {
        self.is_aborted = true;
        self.hub.aborts.fetch_add(1, Ordering::SeqCst);
    }
}
