//! Opening the control connections of a group whose ranks know each other's addresses.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp_core::{CollectiveError, Rank};

use super::dial::{DialError, dial};
use super::edge::Neighbor;
use super::group::Group;
use super::node::{Inbox, Kind, Node};
use super::wire::{Hello, Patience, Purpose};
use crate::call::Op;
use crate::deadline::Deadline;
use crate::poison::Poison;
use crate::tree::Tree;

/// What a call may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) deadline: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) max_message: u64,
}

/// One rank of a group to be formed.
pub(super) struct Plan<'a> {
    pub(super) id: u64,
    pub(super) rank: Rank,
    pub(super) limits: Limits,
    /// The terminal error of the group from which this one is made, if it has failed.
    pub(super) broken: &'a dyn Fn() -> Option<Poison>,
}

/// Connects this rank to its neighbors in the control tree and begins to listen to them.
pub(super) fn form(
    node: Option<&Node>,
    members: &[Rank],
    plan: &Plan<'_>,
) -> Result<Arc<Group>, CollectiveError> {
    let world_size = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let inbox = node.map(|node| node.inbox(plan.id)).unwrap_or_default();
    let deadline = Deadline::after(plan.limits.connect_timeout);
    let tree = Tree::new(world_size, 0, plan.rank);
    let mut neighbors = Vec::new();
    let met = plan.meet_neighbors(node, members, tree, &inbox, deadline, &mut neighbors);
    let listeners = neighbors
        .iter()
        .map(|neighbor| (neighbor.rank, Arc::clone(&neighbor.stream)))
        .collect::<Vec<_>>();
    let deadline = plan.limits.deadline;
    let group = Arc::new(Group::new(plan.id, plan.rank, world_size, deadline, inbox, neighbors));
    if let Err(poison) = met {
        if (plan.broken)().is_none() {
            group.fail(poison.clone());
        }
        group.close();
        return Err(poison.seen_by(plan.rank));
    }
    for (peer, stream) in listeners {
        let name = format!("dcp rank {} reads {peer}", plan.rank);
        let listener = Arc::clone(&group);
        let spawned =
            thread::Builder::new().name(name).spawn(move || listener.listen(peer, &stream));
        if let Err(error) = spawned {
            group.close();
            let message = format!("no thread: {error}");
            return Err(CollectiveError::Rendezvous { message });
        }
    }
    Ok(group)
}

impl Plan<'_> {
    fn meet_neighbors(
        &self,
        node: Option<&Node>,
        members: &[Rank],
        tree: Tree,
        inbox: &Inbox,
        deadline: Deadline,
        neighbors: &mut Vec<Neighbor>,
    ) -> Result<(), Poison> {
        if let (Some(rank), Some(node)) = (tree.parent(), node) {
            let stream = Arc::new(self.dial_parent(node, members, rank, deadline)?);
            neighbors.push(Neighbor { rank, is_parent: true, stream });
        }
        for (_, child) in tree.children() {
            let go_on = || self.keep_waiting(child.rank, deadline);
            let stream = Arc::new(inbox.take(child.rank, Kind::Control, go_on)?);
            neighbors.push(Neighbor { rank: child.rank, is_parent: false, stream });
        }
        Ok(())
    }

    fn dial_parent(
        &self,
        node: &Node,
        members: &[Rank],
        parent: Rank,
        deadline: Deadline,
    ) -> Result<TcpStream, Poison> {
        let lost = |message| Err(Poison::Lost { rank: parent, op: Op::Rendezvous, message });
        let hello = Hello {
            job: node.job().to_owned(),
            world_size: u32::try_from(members.len()).unwrap_or(u32::MAX),
            rank: self.rank,
            purpose: Purpose::Control { group: self.id },
        };
        let Some(address) = members.get(parent as usize).and_then(|at| node.address(*at)) else {
            return lost("it has no address".to_owned());
        };
        let patience = Patience { deadline, give_up: &|| (self.broken)().is_some() };
        loop {
            match dial(address, &hello, patience) {
                Ok(stream) => return Ok(stream),
                Err(DialError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                    self.keep_waiting(parent, deadline)?;
                }
                Err(DialError::Io(error)) => return lost(error.to_string()),
                Err(DialError::Refused { reason, .. }) => return lost(reason),
            }
        }
    }

    fn keep_waiting(&self, rank: Rank, deadline: Deadline) -> Result<(), Poison> {
        if let Some(poison) = (self.broken)() {
            return Err(poison);
        }
        match deadline.left() {
            Some(_) => Ok(()),
            None => {
                let deadline = self.limits.connect_timeout;
                Err(Poison::Timeout { rank, op: Op::Rendezvous, deadline })
            }
        }
    }
}
