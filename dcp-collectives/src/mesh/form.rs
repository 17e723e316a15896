//! Opening the control connections of a group whose ranks know each other's addresses.

use std::sync::Arc;
use std::thread;

use dcp_core::{CollectiveError, Rank};

use super::CallLimits;
use super::channel::{Channel, Kind, OpenError, Opening, Patience, Transport};
use super::edge::Neighbor;
use super::group::Group;
use super::inbox::Inbox;
use crate::call::Op;
use crate::deadline::Deadline;
use crate::poison::Poison;
use crate::tree::Tree;

/// One rank of a group to be formed.
pub(super) struct Plan<'a> {
    pub(super) id: u64,
    pub(super) rank: Rank,
    pub(super) limits: CallLimits,
    /// The terminal error of the group from which this one is made, if it has failed.
    pub(super) broken: &'a dyn Fn() -> Option<Poison>,
}

/// Connects this rank to its neighbors in the control tree and begins to listen to them.
pub(super) fn form(
    transport: Option<&dyn Transport>,
    members: &[Rank],
    plan: &Plan<'_>,
) -> Result<Arc<Group>, CollectiveError> {
    let world_size = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let inbox = transport.map(|to| to.arrivals().inbox(plan.id)).unwrap_or_default();
    let deadline = Deadline::after(plan.limits.connect_timeout);
    let tree = Tree::new(world_size, 0, plan.rank);
    let mut neighbors = Vec::new();
    let met = plan.meet_neighbors(transport, members, tree, &inbox, deadline, &mut neighbors);
    let listeners = neighbors
        .iter()
        .map(|neighbor| (neighbor.rank, Arc::clone(&neighbor.channel)))
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
    for (peer, channel) in listeners {
        let name = format!("dcp rank {} reads {peer}", plan.rank);
        let listener = Arc::clone(&group);
        let spawned =
            thread::Builder::new().name(name).spawn(move || listener.listen(peer, &*channel));
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
        transport: Option<&dyn Transport>,
        members: &[Rank],
        tree: Tree,
        inbox: &Inbox,
        deadline: Deadline,
        neighbors: &mut Vec<Neighbor>,
    ) -> Result<(), Poison> {
        if let (Some(rank), Some(transport)) = (tree.parent(), transport) {
            let channel = self.dial_parent(transport, members, rank, deadline)?;
            neighbors.push(Neighbor { rank, is_parent: true, channel });
        }
        for (_, child) in tree.children() {
            let go_on = || self.keep_waiting(child.rank, deadline);
            let channel = inbox.take(child.rank, Kind::Control, go_on)?;
            neighbors.push(Neighbor { rank: child.rank, is_parent: false, channel });
        }
        Ok(())
    }

    fn dial_parent(
        &self,
        transport: &dyn Transport,
        members: &[Rank],
        parent: Rank,
        deadline: Deadline,
    ) -> Result<Arc<dyn Channel>, Poison> {
        let lost = |message| Err(Poison::Lost { rank: parent, op: Op::Rendezvous, message });
        let opening = Opening {
            group: self.id,
            world_size: u32::try_from(members.len()).unwrap_or(u32::MAX),
            rank: self.rank,
            kind: Kind::Control,
        };
        let Some(member) = members.get(parent as usize) else {
            return lost("it has no address".to_owned());
        };
        let patience = Patience { deadline, give_up: &|| (self.broken)().is_some() };
        loop {
            match transport.open(*member, opening, patience) {
                Ok(channel) => return Ok(channel),
                Err(OpenError::Slow) => self.keep_waiting(parent, deadline)?,
                Err(OpenError::Failed(message)) => return lost(message),
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
