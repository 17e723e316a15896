//! Settings of a group of processes.

use std::env::{self, VarError};
use std::net::{IpAddr, TcpListener};
use std::str::FromStr;
use std::time::Duration;

use dcp_core::{CollectiveError, Rank};

use super::TcpCollective;
use crate::deadline::DEFAULT_DEADLINE;

/// Default of [`TcpConfig::connect_timeout`]: how long ranks wait for each other to start.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// Default of [`TcpConfig::max_message`]: the longest message that a rank accepts, in bytes.
pub const DEFAULT_MAX_MESSAGE: u64 = 64 << 30;

/// A variable of the environment is missing or wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// The variable is not set.
    #[error("{variable} is not set; a launcher such as torchrun sets it")]
    Missing {
        /// Its name.
        variable: &'static str,
    },
    /// The variable has no usable value.
    #[error("{variable} is {value:?}, it should be {expected}")]
    Invalid {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
}

impl From<EnvError> for CollectiveError {
    fn from(error: EnvError) -> Self {
        Self::Rendezvous { message: error.to_string() }
    }
}

/// Settings of one rank of a [`TcpCollective`].
#[derive(Debug)]
pub struct TcpConfig {
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) master_host: String,
    pub(super) master_port: u16,
    pub(super) job: String,
    pub(super) deadline: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) max_message: u64,
    pub(super) listener: Option<TcpListener>,
    pub(super) advertise: Option<IpAddr>,
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
            job: String::new(),
            deadline: DEFAULT_DEADLINE,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            max_message: DEFAULT_MAX_MESSAGE,
            listener: None,
            advertise: None,
        }
    }

    /// Reads the variables that PyTorch's `env://` reads: `MASTER_ADDR`, `MASTER_PORT`, `RANK`
    /// and `WORLD_SIZE`.
    ///
    /// Rank 0 listens at `DCP_MASTER_PORT` if that is set, the same on all ranks. Otherwise it
    /// listens at `MASTER_PORT`; but under torchrun, which itself listens there and says so with
    /// `TORCHELASTIC_USE_AGENT_STORE=True`, at the port after it. `DCP_JOB_ID`, if set, keeps
    /// processes of another job out that use the same address by mistake.
    ///
    /// # Errors
    ///
    /// When a variable is missing or wrong.
    pub fn from_env() -> Result<Self, EnvError> {
        Self::from_variables(|variable| match env::var(variable) {
            Ok(value) => Ok(Some(value)),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(value)) => Err(EnvError::Invalid {
                variable,
                value: value.to_string_lossy().into_owned(),
                expected: "UTF-8",
            }),
        })
    }

    fn from_variables(
        get: impl Fn(&'static str) -> Result<Option<String>, EnvError>,
    ) -> Result<Self, EnvError> {
        let need = |variable| get(variable)?.ok_or(EnvError::Missing { variable });
        let world_size: u32 = number("WORLD_SIZE", need("WORLD_SIZE")?, "a number from 1")?;
        if world_size == 0 {
            let (variable, value) = ("WORLD_SIZE", "0".to_owned());
            return Err(EnvError::Invalid { variable, value, expected: "a number from 1" });
        }
        let rank: Rank = number("RANK", need("RANK")?, "a number from 0")?;
        if rank >= world_size {
            let (variable, value) = ("RANK", rank.to_string());
            return Err(EnvError::Invalid { variable, value, expected: "less than WORLD_SIZE" });
        }
        let host = need("MASTER_ADDR")?;
        if host.is_empty() {
            let (variable, expected) = ("MASTER_ADDR", "a host name or an IP address");
            return Err(EnvError::Invalid { variable, value: host, expected });
        }
        let port = match get("DCP_MASTER_PORT")? {
            Some(port) => number("DCP_MASTER_PORT", port, PORT)?,
            None => {
                let port: u16 = number("MASTER_PORT", need("MASTER_PORT")?, PORT)?;
                let agent = get("TORCHELASTIC_USE_AGENT_STORE")?;
                let taken = agent.is_some_and(|value| value.eq_ignore_ascii_case("true"));
                if taken { port.checked_add(1).unwrap_or(port - 1) } else { port }
            }
        };
        Ok(Self::new(rank, world_size, host, port).job(get("DCP_JOB_ID")?.unwrap_or_default()))
    }

    /// A name that all ranks of the job share; a connection with another name is refused.
    ///
    /// It guards against mistakes, not against attackers: the network must be trusted.
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

    /// Waits for all ranks and forms the group.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Rendezvous`] when a rank is missing or the settings of ranks contradict
    /// each other; any other error when a rank is lost meanwhile.
    pub fn connect(self) -> Result<TcpCollective, CollectiveError> {
        TcpCollective::connect(self)
    }

    pub(super) fn master(&self) -> String {
        format!("{}:{}", self.master_host, self.master_port)
    }

    /// Whether the master's address says that all ranks are on this host.
    pub(super) fn is_on_one_host(&self) -> bool {
        match self.master_host.parse::<IpAddr>() {
            Ok(ip) => ip.is_loopback(),
            Err(_) => self.master_host.eq_ignore_ascii_case("localhost"),
        }
    }
}

const PORT: &str = "a port number from 1 to 65535";

fn number<T: FromStr + PartialEq + Default>(
    variable: &'static str,
    value: String,
    expected: &'static str,
) -> Result<T, EnvError> {
    match value.trim().parse() {
        Ok(number) if expected != PORT || number != T::default() => Ok(number),
        _ => Err(EnvError::Invalid { variable, value, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [(&str, &str); 4] =
        [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500"), ("RANK", "3"), ("WORLD_SIZE", "4")];

    fn read(changes: &[(&str, Option<&str>)]) -> Result<TcpConfig, EnvError> {
        TcpConfig::from_variables(|name| {
            let change = changes.iter().find(|(changed, _)| *changed == name);
            let good = GOOD.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            Ok(change.map_or(good, |(_, value)| *value).map(str::to_owned))
        })
    }

    #[test]
    fn the_variables_of_pytorch_are_enough() {
        let config = read(&[]).unwrap();
        assert_eq!((config.rank, config.world_size), (3, 4));
        assert_eq!(config.master(), "node0:29500");
        assert!(!config.is_on_one_host());
        assert_eq!(read(&[("DCP_JOB_ID", Some("j7"))]).unwrap().job, "j7");
    }

    #[test]
    fn a_port_of_torchruns_own_is_left_alone() {
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", Some("True"));
        assert_eq!(read(&[agent]).unwrap().master_port, 29501);
        assert_eq!(read(&[agent, ("MASTER_PORT", Some("65535"))]).unwrap().master_port, 65534);
        let own = ("DCP_MASTER_PORT", Some("4000"));
        assert_eq!(read(&[agent, own]).unwrap().master_port, 4000);
        assert_eq!(read(&[own, ("MASTER_PORT", None)]).unwrap().master_port, 4000);
    }

    #[test]
    fn each_missing_or_wrong_variable_is_named() {
        for (name, _) in GOOD {
            let error = read(&[(name, None)]).unwrap_err();
            assert!(matches!(error, EnvError::Missing { variable } if variable == name));
        }
        let wrong = [
            ("RANK", "4"),
            ("RANK", "-1"),
            ("RANK", "one"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "4294967296"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("MASTER_ADDR", ""),
            ("DCP_MASTER_PORT", "x"),
        ];
        for (name, value) in wrong {
            let error = read(&[(name, Some(value))]).unwrap_err();
            assert!(
                matches!(error, EnvError::Invalid { variable, .. } if variable == name),
                "{name}={value}: {error}"
            );
        }
    }
}
