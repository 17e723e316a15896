//! The meeting point of the ranks of a launcher.

use dcp_core::digest::fnv1a_64;

use super::error::EnvError;
use super::launcher::Launcher;
use super::variables::{HOST, Variables, invalid};

/// The port at which rank 0 of a job of Kubernetes listens. Pods have a network of their own.
const KUBERNETES_PORT: u16 = 29500;
/// Derived ports, below those that systems give to connections.
const FIRST_PORT: u16 = 20000;
const PORTS: u64 = 10000;
/// Ports of a series beside the first.
const OTHER_PORTS: u32 = 3;

/// The host and the ports at which rank 0 listens.
#[derive(Clone, Debug)]
pub(super) struct MeetingPoint {
    pub(super) host: String,
    pub(super) port: u16,
    /// Ports at which it listens when `port` is taken, in this order.
    pub(super) other_ports: Vec<u16>,
    pub(super) job: String,
}

/// Host and ports of rank 0, and the name of the job.
///
/// A port that nobody chose, derived or beside that of torchrun's agent, may be taken by any process. Then rank 0
/// listens at the first free one of a series that all ranks derive from the job's name, and the others look for it
/// at each. So such a job always has a name: the handshake refuses ranks of another one whose series has the same
/// port. A port that a variable names is the only one.
pub(super) fn meeting_point(
    launcher: Launcher,
    world_size: u32,
    variables: &Variables<'_>,
) -> Result<MeetingPoint, EnvError> {
    let host = host(launcher, world_size, variables)?;
    let job = job(launcher, variables)?;
    let named = variables.text("DCP_JOB_ID")?;
    let (port, series) = match (port(variables)?, &job) {
        (Some(Port::Named(port)), _) => (port, None),
        (Some(Port::OfAgent(agent)), _) => {
            let run = variables.text("TORCHELASTIC_RUN_ID")?.unwrap_or_default();
            let beside = agent.checked_add(1).unwrap_or(agent - 1);
            (beside, Some(format!("torchrun {run} {agent}")))
        }
        (None, _) if launcher == Launcher::Kubernetes => (KUBERNETES_PORT, None),
        (None, Some(job)) => (derived(job), Some(job.clone())),
        (None, None) => {
            return Err(EnvError::NoMeetingPoint { launcher, variable: "MASTER_PORT" });
        }
    };
    let other_ports = match &series {
        Some(series) => (1..=OTHER_PORTS).map(|n| derived(&format!("{series} {n}"))).collect(),
        None => Vec::new(),
    };
    // Users give one name to many jobs.
    let job = match (named, series) {
        (Some(named), Some(series)) => format!("{named}, {series}"),
        (named, series) => named.or(series).or(job).unwrap_or_default(),
    };
    Ok(MeetingPoint { host, port, other_ports, job })
}

fn host(
    launcher: Launcher,
    world_size: u32,
    variables: &Variables<'_>,
) -> Result<String, EnvError> {
    for variable in ["DCP_MASTER_ADDR", "MASTER_ADDR"] {
        match variables.text(variable)? {
            Some(host) if host.trim().is_empty() => return Err(invalid(variable, host, HOST)),
            Some(host) => return Ok(host),
            None => {}
        }
    }
    let local_size = match launcher {
        Launcher::OpenMpi => variables.count("OMPI_COMM_WORLD_LOCAL_SIZE")?,
        Launcher::Mvapich => variables.count("MV2_COMM_WORLD_LOCAL_SIZE")?,
        Launcher::Pmi => variables.count("MPI_LOCALNRANKS")?,
        _ => None,
    };
    if local_size == Some(world_size) {
        return Ok("127.0.0.1".to_owned());
    }
    let lists: &[&'static str] = match launcher {
        Launcher::Slurm => &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"],
        Launcher::OpenMpi | Launcher::Mvapich | Launcher::Pmi => &["SLURM_JOB_NODELIST"],
        _ => &[],
    };
    for variable in lists {
        if let Some(list) = variables.text(variable)? {
            return match first_host(&list) {
                Some(host) => Ok(host),
                None => Err(invalid(variable, list, "a list of nodes such as node[03-08]")),
            };
        }
    }
    Err(match launcher {
        Launcher::Torch | Launcher::Explicit => EnvError::Missing { variable: "MASTER_ADDR" },
        _ => EnvError::NoMeetingPoint { launcher, variable: "MASTER_ADDR" },
    })
}

/// The port in the variables.
enum Port {
    Named(u16),
    /// The port of torchrun's agent, which itself listens there.
    OfAgent(u16),
}

fn port(variables: &Variables<'_>) -> Result<Option<Port>, EnvError> {
    if let Some(port) = variables.port("DCP_MASTER_PORT")? {
        return Ok(Some(Port::Named(port)));
    }
    let Some(port) = variables.port("MASTER_PORT")? else { return Ok(None) };
    let agent = variables.text("TORCHELASTIC_USE_AGENT_STORE")?;
    let taken = agent.is_some_and(|value| value.eq_ignore_ascii_case("true"));
    Ok(Some(if taken { Port::OfAgent(port) } else { Port::Named(port) }))
}

/// A name that all ranks of the job have, and no other job at the same time.
fn job(launcher: Launcher, variables: &Variables<'_>) -> Result<Option<String>, EnvError> {
    let namespace = || variables.text("PMIX_NAMESPACE");
    let of_slurm = || {
        let (job, step) = (variables.text("SLURM_JOB_ID")?, variables.text("SLURM_STEP_ID")?);
        Ok(job.map(|job| format!("slurm {job}.{}", step.unwrap_or_default())))
    };
    match launcher {
        Launcher::Slurm => of_slurm(),
        // Daemons of `mpirun` are steps, so that the number of the step may differ between hosts.
        Launcher::Mvapich | Launcher::Pmi => {
            Ok(variables.text("SLURM_JOB_ID")?.map(|job| format!("slurm {job}")))
        }
        Launcher::OpenMpi | Launcher::Pmix => namespace(),
        _ => Ok(None),
    }
}

fn derived(job: &str) -> u16 {
    let offset = fnv1a_64(job.bytes()) % PORTS;
    FIRST_PORT + u16::try_from(offset).unwrap_or(0)
}

/// The first host of a list in Slurm's notation, such as `gpu[003-010,12],login1`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(end) = rest.find(['[', ',']) {
        let (literal, from) = rest.split_at(end);
        host.push_str(literal);
        let Some(inside) = from.strip_prefix('[') else {
            rest = "";
            break;
        };
        let (range, after) = inside.split_once(']')?;
        let first = range.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    host.push_str(rest);
    let is_of_name = |char: char| char.is_alphanumeric() || matches!(char, '-' | '.' | '_' | ':');
    (!host.is_empty() && host.chars().all(is_of_name)).then_some(host)
}
