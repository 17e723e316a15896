#![doc = include_str!("../README.md")]

mod engine;
mod packet;
mod post;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use dcp_collectives::mesh::{
    Arrivals, CallLimits, Channel, Mesh, OpenError, Opening, Patience, Transport,
};
use dcp_collectives::{DEFAULT_CONNECT_TIMEOUT, DEFAULT_DEADLINE, DEFAULT_MAX_MESSAGE};
use dcp_core::{Collective, CollectiveError, Rank};

use crate::engine::Started;
use crate::post::Post;

/// Default of [`MpiConfig::max_packet`].
pub const DEFAULT_MAX_PACKET: usize = 256 << 10;

/// The longest packet, in bytes: counts of MPI are C `int`s.
const LONGEST_PACKET: usize = 1 << 20;

/// Settings of an [`MpiCollective`].
#[derive(Clone, Debug)]
pub struct MpiConfig {
    limits: CallLimits,
    max_packet: usize,
}

impl Default for MpiConfig {
    fn default() -> Self {
        let limits = CallLimits {
            deadline: DEFAULT_DEADLINE,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            max_message: DEFAULT_MAX_MESSAGE,
        };
        Self { limits, max_packet: DEFAULT_MAX_PACKET }
    }
}

impl MpiConfig {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The longest that a call may take. Must be long enough for the slowest rank to come.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.limits.deadline = deadline;
        self
    }

    /// The longest that forming the group, or a subgroup, may take, and the longest that the last
    /// handle waits for the other ranks to end.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.limits.connect_timeout = timeout;
        self
    }

    /// The longest message to accept from a peer, in bytes.
    #[must_use]
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.limits.max_message = bytes;
        self
    }

    /// The most bytes of a message that one message of MPI carries, at least 1 and at most 1 MiB.
    #[must_use]
    pub fn max_packet(mut self, bytes: usize) -> Self {
        self.max_packet = bytes.clamp(1, LONGEST_PACKET);
        self
    }

    /// Calls `MPI_Init_thread` and forms the group of `MPI_COMM_WORLD`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Rendezvous`] when MPI was initialized in this process before, or allows no
    /// threads; any other error when a rank is lost or late.
    pub fn connect(self) -> Result<MpiCollective, CollectiveError> {
        let failed = |message| CollectiveError::Rendezvous { message };
        let post = Arc::new(Post::new(self.max_packet));
        let (started, starting) = mpsc::sync_channel::<Started>(1);
        let (ended, end) = mpsc::sync_channel(1);
        let patience = self.limits.connect_timeout;
        thread::Builder::new()
            .name("dcp mpi".to_owned())
            .spawn({
                let post = Arc::clone(&post);
                move || {
                    engine::run(&post, &started, patience);
                    drop(ended);
                }
            })
            .map_err(|error| failed(format!("no thread for MPI: {error}")))?;
        let (rank, world_size, arrivals) = starting
            .recv()
            .map_err(|_| failed("MPI_Init_thread failed".to_owned()))?
            .map_err(failed)?;
        let universe = Arc::new(Universe { post, arrivals, end: end.into(), patience });
        let mesh = Mesh::connect(Some(universe), rank, world_size, self.limits)?;
        Ok(MpiCollective { mesh })
    }
}

/// MPI in this process, until the last group is dropped.
#[derive(Debug)]
struct Universe {
    post: Arc<Post>,
    arrivals: Arc<Arrivals>,
    /// Disconnected when the thread of MPI is at its end.
    end: std::sync::Mutex<Receiver<()>>,
    patience: Duration,
}

impl Transport for Universe {
    fn open(
        &self,
        to: Rank,
        opening: Opening,
        _: Patience<'_>,
    ) -> Result<Arc<dyn Channel>, OpenError> {
        match self.post.open(to, opening) {
            Some(pipe) => Ok(pipe),
            None => Err(OpenError::Failed("MPI has ended".to_owned())),
        }
    }

    fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }
}

impl Drop for Universe {
    fn drop(&mut self) {
        self.post.stop();
        let end = self.end.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // MPI_Finalize itself has no deadline.
        if end.recv_timeout(self.patience.saturating_mul(2)) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("MPI does not end within {:?}", self.patience.saturating_mul(2));
        }
    }
}

/// One rank of a group whose ranks are the processes of an MPI job: a [`Mesh`] over MPI.
///
/// Drop the handle when done: the last one calls `MPI_Finalize`. `mpirun` kills the job when a
/// process ends without that.
pub struct MpiCollective {
    mesh: Mesh,
}

impl MpiCollective {
    /// A group of some ranks of this one; see [`Mesh::subgroup`].
    ///
    /// # Errors
    ///
    /// As [`Mesh::subgroup`].
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Self, CollectiveError> {
        Ok(Self { mesh: self.mesh.subgroup(ranks)? })
    }

    /// As [`subgroup`](Self::subgroup), with another deadline for its calls.
    ///
    /// # Errors
    ///
    /// As [`Mesh::subgroup`].
    pub fn subgroup_within(
        &self,
        ranks: &[Rank],
        deadline: Duration,
    ) -> Result<Self, CollectiveError> {
        Ok(Self { mesh: self.mesh.subgroup_within(ranks, deadline)? })
    }
}

impl Collective for MpiCollective {
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

impl fmt::Debug for MpiCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiCollective")
            .field("rank", &self.mesh.rank())
            .field("world_size", &self.mesh.world_size())
            .finish_non_exhaustive()
    }
}
