//! Names of temporary files, which identify their writer.

use dcp_core::digest::fnv1a_64;
use std::fmt;
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, test_kill_process};

/// The prefix of temporary files; place, process, its start, and a number follow.
const PREFIX: &str = ".dcp-tmp.";

/// The prefix of lock files; the name of the locked file follows.
const LOCK_PREFIX: &str = ".dcp-lock.";

/// The identity of a writing process among all that use the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The scope of its process id: a boot of a machine, and a container on it.
    place: u64,
    pid: u32,
    /// Its start in ticks since boot, because process ids are reused; 0 if unknown.
    started: u64,
}

impl Owner {
    /// This process.
    pub(crate) fn current() -> Self {
        let pid = std::process::id();
        // Not cached: a forked child is another process.
        Self { place: place(), pid, started: started(pid).unwrap_or(0) }
    }

    /// A name for a new temporary file of this owner.
    pub(crate) fn temp_name(self) -> String {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        format!("{PREFIX}{self}.{}", NUMBER.fetch_add(1, Ordering::Relaxed))
    }

    /// The writer of the temporary file `name`; `None` for any other name.
    pub(crate) fn of_temp(name: &str) -> Option<Self> {
        let mut fields = name.strip_prefix(PREFIX)?.split('.');
        let owner = Self::of_fields(&mut fields)?;
        let number = fields.next()?;
        let well_formed = is_decimal(number) && fields.next().is_none();
        number.parse::<u64>().ok().filter(|_| well_formed).map(|_| owner)
    }

    /// Parses the text of [`Display`](fmt::Display).
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('.');
        Self::of_fields(&mut fields).filter(|_| fields.next().is_none())
    }

    fn of_fields<'a>(fields: &mut impl Iterator<Item = &'a str>) -> Option<Self> {
        let (place, pid, started) = (fields.next()?, fields.next()?, fields.next()?);
        if place.len() != 16 || !is_decimal(pid) || !is_decimal(started) {
            return None;
        }
        Some(Self {
            place: u64::from_str_radix(place, 16).ok()?,
            pid: pid.parse().ok()?,
            started: started.parse().ok()?,
        })
    }

    /// The process id.
    pub(crate) fn pid(self) -> u32 {
        self.pid
    }

    #[cfg(test)]
    pub(crate) fn with_pid(self, pid: u32) -> Self {
        Self { pid, ..self }
    }

    /// Whether it has the scope of this process, so that its end can be detected.
    pub(crate) fn is_here(self) -> bool {
        self.place == place()
    }

    /// Whether it certainly still runs; false for a process of another machine.
    pub(crate) fn is_alive(self) -> bool {
        if !self.is_here() {
            return false;
        }
        if let (Some(started), 1..) = (started(self.pid), self.started) {
            return started == self.started;
        }
        match i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // A process of another user answers with EPERM.
            Some(pid) => test_kill_process(pid) != Err(rustix::io::Errno::SRCH),
            None => false,
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}.{}.{}", self.place, self.pid, self.started)
    }
}

fn is_decimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The name of the lock file of an object in the same folder.
pub(crate) fn lock_name(object: &str) -> String {
    format!("{LOCK_PREFIX}{}", object.trim_start_matches('.'))
}

/// Whether the name is one of the storage's own files, not of an object.
pub(crate) fn is_reserved(name: &str) -> bool {
    is_temp(name) || name.starts_with(LOCK_PREFIX)
}

/// Whether the name is one of a temporary file.
pub(crate) fn is_temp(name: &str) -> bool {
    Owner::of_temp(name).is_some()
}

/// A fingerprint of the scope of process ids: host name, boot, and pid namespace.
fn place() -> u64 {
    static PLACE: OnceLock<u64> = OnceLock::new();
    *PLACE.get_or_init(|| {
        let uname = rustix::system::uname();
        let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let parts = [uname.nodename().to_bytes(), &boot, namespace.as_os_str().as_encoded_bytes()];
        // Names outlive the version of the program that made them.
        fnv1a_64(parts.join(&0))
    })
}

/// The start of a process in ticks since boot; `None` if it does not run, or the system does not
/// report it.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may hold anything; the start is
    // the twenty-second.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_temporary_files_tell_their_owner() {
        let me = Owner::current();
        assert!(me.is_alive());
        let (a, b) = (me.temp_name(), me.temp_name());
        assert_ne!(a, b);
        assert_eq!(Owner::of_temp(&a), Some(me));
        assert!(a.len() < 100, "{a}");
        for other in [
            ".metadata",
            ".dcp-tmp.",
            ".dcp-tmp.x.1.2.3",
            ".dcp-tmp.0123456789abcdef.1.2",
            ".dcp-tmp.0123456789abcdef.1.2.3.4",
            ".dcp-tmp.0123456789abcdef.+1.2.3",
            ".dcp-tmp.0123456789abcdef.1.2.",
        ] {
            assert!(!is_temp(other), "{other}");
        }
        assert!(is_temp(".dcp-tmp.0123456789abcdef.1.2.3"));
    }

    #[test]
    fn the_dead_and_the_distant_are_not_alive() {
        let me = Owner::current();
        assert!(!Owner { place: me.place ^ 1, ..me }.is_alive());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(!Owner { pid, ..me }.is_alive());
        assert!(!Owner { pid: 0, ..me }.is_alive());
        assert!(!Owner { pid: u32::MAX, ..me }.is_alive());
        if cfg!(target_os = "linux") {
            assert!(!Owner { started: me.started + 1, ..me }.is_alive(), "a pid used again");
        }
    }
}
