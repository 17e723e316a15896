//! Messages going up and down a tree.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::Rank;

use super::channel::{Channel, Kind, OpenError, Opening, Patience, Transport};
use super::link::{Link, Turn};
use crate::poison::Poison;
use crate::tree::Tree;

/// The data connections of one rank in one group, opened when they are first needed.
#[derive(Debug)]
pub(super) struct Links {
    transport: Option<Arc<dyn Transport>>,
    /// The members of the group, as the group of all ranks counts them.
    members: Box<[Rank]>,
    open: HashMap<Rank, Link>,
    chunk: Vec<u8>,
}

impl Links {
    pub(super) fn new(transport: Option<Arc<dyn Transport>>, members: Box<[Rank]>) -> Self {
        Self { transport, members, open: HashMap::new(), chunk: Vec::new() }
    }

    /// Brings the messages of all ranks (none, when `mine` is `None`) to the root, which gets them
    /// in order of place.
    pub(super) fn up(
        &mut self,
        turn: &Turn<'_>,
        tree: Tree,
        mine: Option<Bytes>,
    ) -> Result<Vec<Bytes>, Poison> {
        let per_rank = u32::from(mine.is_some());
        let Some(parent) = tree.parent() else {
            let mut messages = Vec::from_iter(mine);
            for (_, child) in tree.children() {
                let mut link = self.take(turn, child.rank)?;
                link.expect(turn, child.span * per_rank)?;
                for _ in 0..child.span * per_rank {
                    messages.push(link.read_message(turn)?);
                }
                self.open.insert(child.rank, link);
            }
            return Ok(messages);
        };
        let mut to = self.take(turn, parent)?;
        if let Some(mine) = mine {
            to.begin(turn, tree.span())?;
            to.write_message(turn, &mine)?;
        }
        for (_, child) in tree.children() {
            let mut from = self.take(turn, child.rank)?;
            from.expect(turn, child.span * per_rank)?;
            for _ in 0..child.span * per_rank {
                from.relay(turn, &mut to, &mut self.chunk)?;
            }
            self.open.insert(child.rank, from);
        }
        if per_rank == 0 {
            to.begin(turn, 0)?;
        }
        to.flush(turn)?;
        self.open.insert(parent, to);
        Ok(Vec::new())
    }

    /// Hands each rank its message; the root passes one for each place.
    pub(super) fn down_each(
        &mut self,
        turn: &Turn<'_>,
        tree: Tree,
        messages: &[Bytes],
    ) -> Result<Bytes, Poison> {
        let Some(parent) = tree.parent() else {
            for (place, child) in tree.children().rev() {
                let mut link = self.take(turn, child.rank)?;
                link.begin(turn, child.span)?;
                let places = place as usize..place as usize + child.span as usize;
                for message in messages.get(places).unwrap_or_default() {
                    link.write_message(turn, message)?;
                }
                link.flush(turn)?;
                self.open.insert(child.rank, link);
            }
            return Ok(messages.first().cloned().unwrap_or_default());
        };
        let mut from = self.take(turn, parent)?;
        from.expect(turn, tree.span())?;
        let mine = from.read_message(turn)?;
        for (_, child) in tree.children() {
            let mut to = self.take(turn, child.rank)?;
            to.begin(turn, child.span)?;
            for _ in 0..child.span {
                from.relay(turn, &mut to, &mut self.chunk)?;
            }
            to.flush(turn)?;
            self.open.insert(child.rank, to);
        }
        self.open.insert(parent, from);
        Ok(mine)
    }

    /// Hands every rank the `count` messages of the root, piece by piece as they come.
    pub(super) fn down_all(
        &mut self,
        turn: &Turn<'_>,
        tree: Tree,
        count: u32,
        mut messages: Vec<Bytes>,
    ) -> Result<Vec<Bytes>, Poison> {
        let mut from = match tree.parent() {
            Some(parent) => Some((parent, self.take(turn, parent)?)),
            None => None,
        };
        if let Some((_, from)) = &mut from {
            from.expect(turn, count)?;
        }
        let mut to = Vec::new();
        for (_, child) in tree.children().rev() {
            let mut link = self.take(turn, child.rank)?;
            link.begin(turn, count)?;
            to.push((child.rank, link));
        }
        match &mut from {
            None => {
                for (_, link) in &mut to {
                    for message in &messages {
                        link.write_message(turn, message)?;
                    }
                    link.flush(turn)?;
                }
            }
            Some((_, from)) => {
                for _ in 0..count {
                    let len = from.read_len(turn)?;
                    to.iter_mut().try_for_each(|(_, link)| link.write_len(turn, len))?;
                    messages.push(from.read_body(turn, len, |piece| {
                        to.iter_mut().try_for_each(|(_, link)| link.write(turn, piece))
                    })?);
                }
                to.iter_mut().try_for_each(|(_, link)| link.flush(turn))?;
            }
        }
        self.open.extend(from.into_iter().chain(to));
        Ok(messages)
    }

    /// Takes the connection to a peer, which is put back unless the call fails: after that, the
    /// group is of no use.
    fn take(&mut self, turn: &Turn<'_>, peer: Rank) -> Result<Link, Poison> {
        match self.open.remove(&peer) {
            Some(link) => Ok(link),
            None => self.open(turn, peer),
        }
    }

    /// Of two ranks, the lower one makes the connection.
    fn open(&self, turn: &Turn<'_>, peer: Rank) -> Result<Link, Poison> {
        let channel = if turn.group.rank > peer {
            turn.group.inbox.take(peer, Kind::Data, || turn.keep_waiting(peer))?
        } else {
            loop {
                match self.dial(turn, peer) {
                    Ok(channel) => break channel,
                    Err(OpenError::Slow) => turn.keep_waiting(peer)?,
                    Err(OpenError::Failed(message)) => return Err(turn.lost(peer, &message)),
                }
            }
        };
        Ok(Link::new(peer, channel))
    }

    fn dial(&self, turn: &Turn<'_>, peer: Rank) -> Result<Arc<dyn Channel>, OpenError> {
        let group = turn.group;
        let no_address = || OpenError::Failed("it has no address".to_owned());
        let member = *self.members.get(peer as usize).ok_or_else(no_address)?;
        let transport = self.transport.as_ref().ok_or_else(no_address)?;
        let opening = Opening {
            group: group.id,
            world_size: group.world_size,
            rank: group.rank,
            kind: Kind::Data,
        };
        let give_up = || turn.keep_waiting(peer).is_err();
        let patience = Patience { deadline: turn.deadline, give_up: &give_up };
        transport.open(member, opening, patience)
    }
}
