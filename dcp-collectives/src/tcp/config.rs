//! Settings of a group of processes.

use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use dcp_core::{CollectiveError, Rank};

use super::TcpCollective;
use super::secret::Secret;
use super::security::Security;
#[cfg(feature = "tls")]
use super::tls::Tls;
use crate::deadline::DEFAULT_DEADLINE;

/// Default of [`TcpConfig::connect_timeout`]: how long ranks wait for each other to start.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// A process that is being started holds a port open for no longer than it takes to run its program.
const TAKEN: Duration = Duration::from_secs(3);

/// Default of [`TcpConfig::max_message`]: the longest message that a rank accepts, in bytes.
pub const DEFAULT_MAX_MESSAGE: u64 = 64 << 30;

/// Settings of one rank of a [`TcpCollective`].
#[derive(Debug)]
pub struct TcpConfig {
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) master_host: String,
    pub(super) master_port: u16,
    /// Ports at which rank 0 listens when the master port is taken, in this order.
    pub(super) other_ports: Vec<u16>,
    pub(super) job: String,
    pub(super) deadline: Duration,
    pub(super) connect_timeout: Duration,
    /// The longest wait for a port that is taken to become free.
    pub(super) taken: Duration,
    pub(super) max_message: u64,
    pub(super) listener: Option<TcpListener>,
    pub(super) advertise: Option<IpAddr>,
    pub(super) bind: Option<IpAddr>,
    pub(super) security: Security,
}

impl TcpConfig {
    /// `rank` of `world_size`, where rank 0 listens at `master_host:master_port`.
    #[must_use]
    pub fn new(
        rank: Rank,
        world_size: u32,
        master_host: impl Into<String>,
        master_port: u16,
    ) -> Self {
        Self {
            rank,
            world_size,
            master_host: master_host.into(),
            master_port,
            other_ports: Vec::new(),
            job: String::new(),
            deadline: DEFAULT_DEADLINE,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            taken: TAKEN,
            max_message: DEFAULT_MAX_MESSAGE,
            listener: None,
            advertise: None,
            bind: None,
            security: Security::default(),
        }
    }

    /// Ports at which rank 0 listens when the master port is taken, the first that is free; the same on all
    /// ranks, which look at each. Another job that listens at one of them has another name.
    pub(crate) fn other_ports(mut self, ports: Vec<u16>) -> Self {
        self.other_ports = ports;
        self
    }

    /// A name that all ranks of the job share; a connection with another name is refused.
    ///
    /// It guards against mistakes. [`secret`](Self::secret) guards against attackers.
    #[must_use]
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = job.into();
        self
    }

    /// The longest that a call may take. Must be long enough for the slowest rank to come.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The longest that forming the group, or a subgroup, may take.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The longest message to accept from a peer, in bytes.
    #[must_use]
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes;
        self
    }

    /// Has rank 0 listen here instead of opening the master port itself.
    #[must_use]
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    /// The address under which the other ranks reach this one. By default, the one that rank 0
    /// sees.
    #[must_use]
    pub fn advertise(mut self, address: IpAddr) -> Self {
        self.advertise = Some(address);
        self
    }

    /// The address of this host at which this rank listens, rank 0 at the master port and others at a
    /// port of the system. By default, every address of the host; a loopback address when the master's
    /// is one.
    #[must_use]
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.bind = Some(address);
        self
    }

    /// Sets the secret that all ranks share. Both ends of every connection prove that they have it before
    /// anything else is read, and every later record carries a proof of it. Nothing is encrypted.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.security.secret = Some(secret);
        self
    }

    /// Encrypts every connection with TLS 1.3, on which both ends show a certificate of the job's
    /// authority. A secret, too, may be required.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.security.tls = Some(tls);
        self
    }

    /// Waits for all ranks and forms the group.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::CannotListen`] when the port of rank 0 is taken,
    /// [`CollectiveError::Rendezvous`] when a rank is missing or the settings of ranks contradict
    /// each other; any other error when a rank is lost meanwhile.
    pub fn connect(self) -> Result<TcpCollective, CollectiveError> {
        TcpCollective::connect(self)
    }

    /// The host of rank 0.
    #[must_use]
    pub fn master_host(&self) -> &str {
        &self.master_host
    }

    /// The port at which rank 0 listens.
    #[must_use]
    pub fn master_port(&self) -> u16 {
        self.master_port
    }

    /// Every port at which rank 0 may listen.
    pub(super) fn ports(&self) -> impl Iterator<Item = u16> {
        std::iter::once(self.master_port).chain(self.other_ports.iter().copied())
    }

    /// Every address at which rank 0 may listen, for errors.
    pub(super) fn masters(&self) -> String {
        let masters: Vec<_> =
            self.ports().map(|port| format!("{}:{port}", self.master_host)).collect();
        masters.join(", ")
    }

    /// Whether the master's address says that all ranks are on this host.
    pub(super) fn is_on_one_host(&self) -> bool {
        match self.master_host.parse::<IpAddr>() {
            Ok(ip) => ip.is_loopback(),
            Err(_) => self.master_host.eq_ignore_ascii_case("localhost"),
        }
    }
}
