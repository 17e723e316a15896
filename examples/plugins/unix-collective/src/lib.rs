//! A collective as a plug-in: a group of processes of one machine over Unix sockets.
//!
//! Everything that a group has to do when a rank dies, stalls or gives up is in
//! [`Mesh`](dcp_collectives::mesh::Mesh). What is here opens channels between two processes.
//!
//! Each rank listens on a socket `rank-N.sock` in a folder that all ranks share. Only the user whose
//! job it is may write to the folder: who connects is trusted.

mod channel;
mod hello;
mod transport;

use std::path::Path;
use std::sync::Arc;

use dcp_collectives::mesh::{CallLimits, Mesh, Transport};
use dcp_core::{CollectiveError, Rank};

use crate::transport::UnixTransport;

/// Joins the group of the processes that use `folder`, once all have called this.
///
/// # Errors
///
/// [`CollectiveError::Rendezvous`] when the socket of this rank cannot be made; any other error when
/// a rank is lost or late.
pub fn connect(
    folder: &Path,
    rank: Rank,
    world_size: u32,
    limits: CallLimits,
) -> Result<Mesh, CollectiveError> {
    let transport = UnixTransport::listen(folder, rank, world_size).map_err(|error| {
        let message = format!("rank {rank} cannot listen in {}: {error}", folder.display());
        CollectiveError::Rendezvous { message }
    })?;
    let transport: Arc<dyn Transport> = Arc::new(transport);
    Mesh::connect(Some(transport), rank, world_size, limits)
}
