//! The processes of a launcher that run one command together: joining, and failing as one.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dcp::collectives::{EnvError, Launch, TcpCollective, TcpConfig};
use dcp::core::text::{Quoted, counted};
use dcp::core::{CheckpointError, Collective, CollectiveError};
use dcp::jobs;
use dcp::jobs::group::{GroupEnd, JobGroup};

use crate::failure::{Exit, Failure};
use crate::options::Global;

/// A rank that waits longer for the others says so.
const PATIENCE: Duration = Duration::from_secs(3);

const ALONE: &str = "start it on all ranks; --single runs it in this process alone";

/// What the ranks of a launcher do of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Each rank runs it for itself, as without a launcher.
    None,
    /// Rank 0 runs it, and the others wait.
    First,
    /// They divide it.
    All,
}

/// The ranks of this command, of which this process is one.
#[derive(Debug)]
pub(crate) struct Ranks {
    group: JobGroup,
    sharing: Sharing,
}

impl Ranks {
    /// Waits for the other ranks of the process's launcher, if there is one and the command is for
    /// all of them.
    pub(crate) fn join(sharing: Sharing, global: &Global) -> Result<Option<Self>, Failure> {
        if sharing == Sharing::None || global.single {
            return Ok(None);
        }
        let Some(launch) = Launch::detect().map_err(environment)? else { return Ok(None) };
        if launch.world_size == 1 {
            return Ok(None);
        }
        let timeout = Duration::from_secs(global.rank_timeout);
        let config = launch.tcp().map_err(environment)?;
        if launch.rank == 0 && !global.quiet {
            note_open_secret();
        }
        let config = config.deadline(timeout).connect_timeout(timeout);
        let others = launch.world_size - 1;
        let waiting = format!(
            "rank {} waits for {} at {}:{}, as {} says; {ALONE}",
            launch.rank,
            counted(u64::from(others), "other rank"),
            config.master_host(),
            config.master_port(),
            launch.launcher,
        );
        let collective = connect(config, waiting, global.quiet)?;
        let group = JobGroup::start(Arc::new(collective) as Arc<dyn Collective>)?;
        Ok(Some(Self { group, sharing }))
    }

    /// The rank of this process.
    pub(crate) fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// Whether this process prints, commits and reports.
    pub(crate) fn is_coordinator(&self) -> bool {
        self.group.is_coordinator()
    }

    /// Whether this process does a part of the command.
    pub(crate) fn works(&self) -> bool {
        self.sharing == Sharing::All || self.is_coordinator()
    }

    /// The group of a command that the ranks divide.
    pub(crate) fn of_jobs(&self) -> Option<JobGroup> {
        (self.sharing == Sharing::All).then(|| self.group.clone())
    }

    /// Refuses ranks that run another command than rank 0, or divide one that it runs alone: each would
    /// wait for a message that the other does not send.
    pub(crate) fn same_command(&self, name: &str) -> Result<(), Failure> {
        let how = match self.sharing {
            Sharing::All => "divided among the ranks",
            _ => "on rank 0 alone",
        };
        let own = format!("{} {how}", Quoted(name));
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let all = runtime.block_on(self.group.all_gather(own.clone().into_bytes().into()))?;
        let Some(first) = all.first() else { return Ok(()) };
        let Some(rank) = all.iter().position(|one| one != first) else { return Ok(()) };
        let text =
            |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
        let (theirs, first) = (text(all.get(rank).map(|one| &**one)), text(Some(&**first)));
        let message = format!("it runs {theirs}, and rank 0 {first}");
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        let error = CollectiveError::Mismatch { rank, op: "the look at the command", message };
        Err(Failure::from(CheckpointError::from(error))
            .hint("give all ranks the same options; --single runs the command in one process"))
    }

    /// Waits for the other ranks, and returns one result for all: where one failed, all fail with
    /// its exit code, and one of them says why.
    /// `writes`: whether the command writes a checkpoint.
    pub(crate) fn agree(self, done: Result<(), Failure>, writes: bool) -> Result<(), Failure> {
        let outcome = match &done {
            Err(failure) if !failure.is_broken_pipe() => Err(failure.to_message()),
            _ => Ok(()),
        };
        match self.group.finish(outcome) {
            GroupEnd::Done => done,
            GroupEnd::Failed { rank, reason } => {
                let failure = Failure::from_message(rank, &reason);
                Err(if self.is_coordinator() { failure } else { failure.said_elsewhere() })
            }
            // All ranks of an interrupted command end, each as it can.
            GroupEnd::Lost(_) if done.as_ref().is_err_and(Failure::is_interruption) => done,
            GroupEnd::Lost(error) => {
                let speaks = self.is_coordinator() || error.rank() == Some(0);
                let hint = lost_hint(writes, self.is_coordinator(), done.is_ok());
                let failure = Failure::from(CheckpointError::from(error)).hint(hint);
                Err(if speaks { failure } else { failure.said_elsewhere() })
            }
            _ => done,
        }
    }
}

/// The hint of a command that lost a rank. Rank 0 commits the target before its own part ends, the others
/// do not know.
fn lost_hint(writes: bool, is_coordinator: bool, is_done: bool) -> &'static str {
    match (writes, is_coordinator, is_done) {
        (false, ..) => "nothing was written; run the command again",
        (true, true, true) => "the target was complete before that; `dcp verify` checks it",
        (true, true, false) => "what was being written is not complete; run the command again",
        (true, false, _) => {
            "the target may be incomplete; `dcp verify` checks it, and another run of the command \
             writes it"
        }
    }
}

fn environment(error: EnvError) -> Failure {
    Failure::new(Exit::Usage, "the variables of a launcher do not say which rank this process is")
        .because(vec![error.to_string()])
        .hint("--single runs the command in this process alone")
}

/// Says that other users can read the secret of the job.
fn note_open_secret() {
    let Some(path) = std::env::var_os("DCP_SECRET_FILE") else { return };
    let others = std::fs::metadata(&path).is_ok_and(|metadata| metadata.mode() & 0o044 != 0);
    if others {
        let path = path.to_string_lossy();
        // A note is not worth an error when stderr is closed.
        let _ = writeln!(
            std::io::stderr(),
            "note: other users can read the secret in {}; chmod 600 makes it yours alone",
            Quoted(&path)
        );
    }
}

/// Connects, and says for whom it waits when that takes long.
fn connect(config: TcpConfig, waiting: String, quiet: bool) -> Result<TcpCollective, Failure> {
    let (connected, ends) = mpsc::channel::<()>();
    let note = move || {
        if ends.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            // A note is not worth an error when stderr is closed.
            let _ = writeln!(std::io::stderr(), "note: {waiting}");
        }
    };
    if !quiet {
        // Without a thread there is no note.
        let _ = thread::Builder::new().spawn(note);
    }
    let collective = config.connect();
    drop(connected);
    collective.map_err(|error| {
        // Its message says what to set; the other ranks are not missing.
        let hint = (!matches!(error, CollectiveError::CannotListen { .. })).then_some(ALONE);
        let error = jobs::Error::from(CheckpointError::from(error));
        let failure = Failure::from(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::lost_hint;

    #[test]
    fn a_target_is_incomplete_where_rank_0_has_not_committed_it() {
        assert!(lost_hint(true, true, false).contains("is not complete"));
        let committed = lost_hint(true, true, true);
        assert!(committed.contains("was complete") && !committed.contains("again"));
        // Another rank does not know what rank 0 did.
        assert!(lost_hint(true, false, true).contains("may be incomplete"));
        for is_done in [true, false] {
            assert!(lost_hint(false, true, is_done).contains("nothing was written"));
        }
    }
}
