//! Finds this process among those that a launcher started, by its environment.

mod error;
mod launcher;
mod meeting_point;
mod variables;

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;

use dcp_core::{Collective, CollectiveError, Rank};

pub use self::error::EnvError;
pub use self::launcher::Launcher;
use self::launcher::{Found, find};
use self::meeting_point::{MeetingPoint, meeting_point};
use self::variables::Variables;
use crate::solo::Solo;
use crate::tcp::{Secret, TcpConfig};

/// The group of the ranks that a launcher started, connected over TCP, or this process alone where none did
/// or the world has one rank.
///
/// A group belongs to checkpoints alone: a background save exchanges messages while training goes on.
///
/// # Errors
///
/// When variables contradict each other, or the ranks do not find each other.
pub fn from_env_or_solo() -> Result<Arc<dyn Collective>, CollectiveError> {
    group_of(Launch::detect()?)
}

fn group_of(launch: Option<Launch>) -> Result<Arc<dyn Collective>, CollectiveError> {
    match launch.filter(|launch| launch.world_size > 1) {
        Some(launch) => Ok(Arc::new(launch.tcp()?.connect()?)),
        None => Ok(Arc::new(Solo::new())),
    }
}

/// The settings of this process from its launcher: rank, number of ranks, and meeting point.
///
/// The launchers are tried in this order; the first whose variables are set counts. `DCP_…`
/// variables are for a launcher that is not in the table.
///
/// | launcher | rank | world size | local rank | host of rank 0 | port |
/// |---|---|---|---|---|---|
/// | explicit | `DCP_RANK` | `DCP_WORLD_SIZE` | – | required | required |
/// | torchrun, `env://` | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` | required | required |
/// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` | this host if all ranks are on it, else the first of `SLURM_JOB_NODELIST` | derived from `PMIX_NAMESPACE` |
/// | MVAPICH | `MV2_COMM_WORLD_RANK` | `MV2_COMM_WORLD_SIZE` | `MV2_COMM_WORLD_LOCAL_RANK` | the same | required outside of Slurm |
/// | MPICH, Intel MPI (PMI) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` | the same | required outside of Slurm |
/// | Slurm | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` | `SLURM_LOCALID` | the first of `SLURM_STEP_NODELIST` | derived from `SLURM_JOB_ID` and `SLURM_STEP_ID` |
/// | PMIx | `PMIX_RANK` | `WORLD_SIZE` | – | required | derived from `PMIX_NAMESPACE` |
/// | Kubernetes indexed Job, JobSet | `JOB_COMPLETION_INDEX` | `WORLD_SIZE` | – | required | 29500 |
///
/// The host is `DCP_MASTER_ADDR` or else `MASTER_ADDR` where one is set, the port `DCP_MASTER_PORT`
/// or else `MASTER_PORT`. torchrun's agent itself listens at `MASTER_PORT` and sets
/// `TORCHELASTIC_USE_AGENT_STORE=True`; rank 0 then listens at the port after it. A derived port is
/// from 20000 to 29999. Where that port or the one after torchrun's is taken, rank 0 listens at the first free one of
/// three more that all ranks derive, and the others find it there. `DCP_JOB_ID` names the job, and ranks of another one are refused.
/// `DCP_SECRET_FILE` names a file with the secret of the job ([`TcpConfig::secret`]), or `DCP_SECRET` is
/// the secret itself. `DCP_TLS_CERT`, `DCP_TLS_KEY` and `DCP_TLS_CA` name PEM files, with which connections
/// are encrypted (feature `tls`; without it, they are an error). `DCP_BIND_ADDR` is the address of this host at which the rank listens.
///
/// `SLURM_PROCID` counts only inside of a step of `srun`: a batch script and an interactive shell have
/// it, too, and are one process. `JOB_COMPLETION_INDEX` counts only with `WORLD_SIZE`: a pod without it
/// works alone. `RANK` and `WORLD_SIZE` must agree with the variables of MPI and Slurm, unless a
/// launcher on the node set them, which then also sets `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`.
///
/// ```
/// use dcp_collectives::{Launch, Launcher};
///
/// let variables = [("SLURM_JOB_ID", "71"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "3"),
///     ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_NODELIST", "node[07-08]")];
/// let get = |name: &str| {
///     variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
/// };
/// let launch = Launch::from_variables(get)?.expect("a step of Slurm");
/// assert_eq!((launch.launcher, launch.rank, launch.world_size), (Launcher::Slurm, 3, 8));
/// assert_eq!(launch.tcp()?.master_host(), "node07");
/// # Ok::<(), dcp_collectives::EnvError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// The rank of this process.
    pub rank: Rank,
    /// The number of ranks, at least 1.
    pub world_size: u32,
    /// The position of this process among those of its host, if the launcher says it.
    pub local_rank: Option<u32>,
    meeting: Result<MeetingPoint, EnvError>,
    secret: Option<Secret>,
    bind: Option<IpAddr>,
    #[cfg(feature = "tls")]
    tls: Option<crate::Tls>,
}

impl Launch {
    /// Reads the environment of this process. `None`: it was started alone.
    ///
    /// # Errors
    ///
    /// When a variable is missing or wrong, or two contradict each other.
    pub fn detect() -> Result<Option<Self>, EnvError> {
        Self::read(&Variables::of_process())
    }

    /// Reads variables from a function, which returns `None` for one that is not set.
    ///
    /// # Errors
    ///
    /// As [`detect`](Self::detect).
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvError> {
        Self::read(&Variables::new(&|name| Ok(get(name))))
    }

    fn read(variables: &Variables<'_>) -> Result<Option<Self>, EnvError> {
        let Some(Found { launcher, rank, world_size, local_rank }) = find(variables)? else {
            return Ok(None);
        };
        let meeting = meeting_point(launcher, world_size, variables);
        let (secret, bind) = (variables.secret()?, variables.address("DCP_BIND_ADDR")?);
        #[cfg(feature = "tls")]
        let tls = variables.tls()?;
        #[cfg(not(feature = "tls"))]
        variables.no_tls()?;
        Ok(Some(Self {
            launcher,
            rank,
            world_size,
            local_rank,
            meeting,
            secret,
            bind,
            #[cfg(feature = "tls")]
            tls,
        }))
    }

    /// The settings of a group over TCP of these ranks.
    ///
    /// # Errors
    ///
    /// When no variable says where rank 0 listens, or one is wrong. A world of one rank needs none.
    pub fn tcp(&self) -> Result<TcpConfig, EnvError> {
        let MeetingPoint { host, port, other_ports, job } = match &self.meeting {
            Ok(meeting) => meeting.clone(),
            Err(_) if self.world_size == 1 => {
                let (host, job) = ("127.0.0.1".to_owned(), String::new());
                MeetingPoint { host, port: 0, other_ports: Vec::new(), job }
            }
            Err(error) => return Err(error.clone()),
        };
        let config = TcpConfig::new(self.rank, self.world_size, host, port);
        let mut config = config.other_ports(other_ports).job(job);
        if let Some(secret) = &self.secret {
            config = config.secret(secret.clone());
        }
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            config = config.tls(tls.clone());
        }
        if let Some(address) = self.bind {
            config = config.bind(address);
        }
        Ok(config)
    }
}

impl TcpConfig {
    /// The settings of the process's launcher: torchrun, `mpirun`, `srun` or Kubernetes. The table of
    /// [`Launch`] lists the variables.
    ///
    /// # Errors
    ///
    /// When a variable is missing or wrong, or two contradict each other.
    pub fn from_env() -> Result<Self, EnvError> {
        Launch::detect()?.ok_or(EnvError::Missing { variable: "WORLD_SIZE" })?.tcp()
    }
}
