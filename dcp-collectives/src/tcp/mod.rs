//! Ranks as processes that talk over TCP.

mod config;
mod dial;
mod file;
pub(crate) mod fuzzing;
mod greeting;
mod lobby;
mod node;
mod rendezvous;
mod sealed;
mod secret;
mod security;
#[cfg(feature = "tls")]
mod tls;
mod wire;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

pub use self::config::{DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_MESSAGE, TcpConfig};
pub use self::secret::{Secret, SecretError};
#[cfg(feature = "tls")]
pub use self::tls::{Tls, TlsError};
use crate::mesh::{CallLimits, Mesh, Transport};

/// One rank of a group whose ranks are processes, here or on other hosts: a [`Mesh`] over TCP.
///
/// Drop the handle when done. A process that ends without that counts as dead, and the others'
/// calls then fail.
///
/// Without [`TcpConfig::secret`], the network must be trusted: any process with the job's name may join.
pub struct TcpCollective {
    mesh: Mesh,
}

impl TcpCollective {
    pub(crate) fn connect(mut config: TcpConfig) -> Result<Self, CollectiveError> {
        let (rank, world_size) = (config.rank, config.world_size);
        let limits = CallLimits {
            deadline: config.deadline,
            connect_timeout: config.connect_timeout,
            max_message: config.max_message,
        };
        let transport = if world_size == 1 || rank >= world_size {
            None
        } else {
            Some(Arc::new(rendezvous::meet(&mut config)?) as Arc<dyn Transport>)
        };
        Ok(Self { mesh: Mesh::connect(transport, rank, world_size, limits)? })
    }

    /// A group of some ranks of this one; see [`Mesh::subgroup`].
    ///
    /// # Errors
    ///
    /// As [`Mesh::subgroup`].
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Self, CollectiveError> {
        Ok(Self { mesh: self.mesh.subgroup(ranks)? })
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> Rank {
        self.mesh.rank()
    }

    fn world_size(&self) -> u32 {
        self.mesh.world_size()
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.mesh.gather(root, mine)
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.mesh.scatter(root, all)
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.mesh.broadcast(root, from_root)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.mesh.all_gather(mine)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.mesh.barrier()
    }

    fn abort(&self, reason: &str) {
        self.mesh.abort(reason);
    }
}

impl fmt::Debug for TcpCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpCollective")
            .field("rank", &self.mesh.rank())
            .field("world_size", &self.mesh.world_size())
            .finish_non_exhaustive()
    }
}
