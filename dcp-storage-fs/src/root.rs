//! Opens paths below the root, and nowhere else.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, openat};

/// Flags to open a file for its metadata: without access to its bytes where the system has such a
/// flag, else so that a pipe without a writer does not block.
#[cfg(target_os = "linux")]
pub(crate) const LOOK: OFlags = OFlags::PATH;
#[cfg(not(target_os = "linux"))]
pub(crate) const LOOK: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Flags to open a file for reading. A key may name a pipe, which must not block.
pub(crate) const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Flags to open a folder: for reading, because only such a descriptor can be synced.
pub(crate) const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// The targets that symbolic links may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// To paths below the root.
    Below,
    /// To paths below this folder, which contains the root.
    Within(PathBuf),
    /// Anywhere.
    Anywhere,
}

/// The root folder. Opened paths stay within the allowed links, even if another process renames
/// folders or creates symbolic links meanwhile.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    /// The folder that confines all paths, held open.
    fd: OwnedFd,
    /// The path of the root in it, empty where it is the root.
    inner: String,
    follow_links: bool,
}

impl Root {
    pub(crate) fn open(path: PathBuf, links: &Links) -> io::Result<Self> {
        let (outer, inner) = match links {
            Links::Within(outer) => {
                let (outer, path) = (outer.canonicalize()?, path.canonicalize()?);
                let inner = path.strip_prefix(&outer).ok().and_then(Path::to_str);
                let inner = inner.ok_or_else(|| {
                    let problem = "it is not in the folder of allowed links";
                    io::Error::new(io::ErrorKind::InvalidInput, problem)
                })?;
                let inner = inner.to_owned();
                (outer, inner)
            }
            _ => (path.clone(), String::new()),
        };
        let fd = rustix::fs::open(&outer, FOLDER | OFlags::CLOEXEC, Mode::empty())?;
        let root = Self { path, fd, inner, follow_links: *links == Links::Anywhere };
        root.open_below("", FOLDER)?;
        Ok(root)
    }

    /// Whether listings follow links to folders.
    pub(crate) fn follows_links(&self) -> bool {
        self.follow_links
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens `path`, relative to the root; the empty path is the root.
    ///
    /// Linux resolves the path itself and refuses paths out of it with `EXDEV` (`openat2` with
    /// `RESOLVE_BENEATH`, since 5.6). Elsewhere, and where a sandbox denies that call, the path is
    /// walked step by step and any symbolic link is refused.
    pub(crate) fn open_below(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let path = match (self.inner.as_str(), path) {
            ("", path) | (path, "") => Cow::Borrowed(path),
            (inner, path) => Cow::Owned(format!("{inner}/{path}")),
        };
        let path = path.as_ref();
        if self.follow_links {
            let path = if path.is_empty() { "." } else { path };
            return Ok(openat(&self.fd, path, flags, Mode::empty())?);
        }
        #[cfg(target_os = "linux")]
        if let Some(outcome) = open_beneath(&self.fd, path, flags) {
            return outcome;
        }
        open_step_by_step(&self.fd, path, flags)
    }
}

/// `None` where the system cannot do it.
#[cfg(target_os = "linux")]
fn open_beneath(root: impl AsFd, path: &str, flags: OFlags) -> Option<io::Result<OwnedFd>> {
    use rustix::fs::{ResolveFlags, openat2};
    use rustix::io::Errno;

    /// The kernel gives up on `..` in a link while another process renames folders.
    const TRIES: u32 = 8;
    let path = if path.is_empty() { "." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match openat2(&root, path, flags, Mode::empty(), resolve) {
            Ok(fd) => return Some(Ok(fd)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // Sandboxes answer EPERM to unknown calls.
            Err(Errno::NOSYS | Errno::PERM) => return None,
            Err(error) => return Some(Err(error.into())),
        }
    }
    None
}

fn open_step_by_step(root: impl AsFd, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    let mut here = openat(root, ".", FOLDER | OFlags::CLOEXEC, Mode::empty())?;
    let Some((folders, name)) = split(path) else {
        return Ok(openat(&here, ".", flags, Mode::empty())?);
    };
    let guarded = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for folder in folders.split('/').filter(|folder| !folder.is_empty()) {
        here = openat(&here, folder, FOLDER | guarded, Mode::empty())?;
    }
    Ok(openat(&here, name, flags | guarded, Mode::empty())?)
}

/// The folder, empty for the root, and the name in it; `None` for the root itself.
pub(crate) fn split(path: &str) -> Option<(&str, &str)> {
    match path.rsplit_once('/') {
        Some(parts) => Some(parts),
        None if path.is_empty() => None,
        None => Some(("", path)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    type Open<'a> = &'a dyn Fn(&str) -> io::Result<OwnedFd>;

    /// A root with links that stay inside and links that lead out, and whether opening a path
    /// succeeds.
    fn check(open_in: impl Fn(&Path, &str) -> io::Result<OwnedFd>, inner_links: bool) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("store");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(folder.path().join("secret"), "s").unwrap();
        fs::write(root.join("a/b/file"), "f").unwrap();
        symlink("a/b", root.join("inside")).unwrap();
        symlink("..", root.join("outside")).unwrap();
        symlink("../secret", root.join("secret")).unwrap();
        symlink(folder.path().join("secret"), root.join("absolute")).unwrap();
        symlink("../../../secret", root.join("a/b/up")).unwrap();
        let open: Open<'_> = &|path| open_in(&root, path);
        assert!(open("").is_ok());
        assert!(open("a").is_ok());
        assert!(open("a/b/file").is_ok());
        assert_eq!(open("inside/file").is_ok(), inner_links);
        for out in ["outside/secret", "outside/store/a/b/file", "secret", "absolute", "a/b/up"] {
            assert!(open(out).is_err(), "{out} leads out");
        }
        assert!(super::super::error::is_absence(&open("a/none").unwrap_err()));
        assert!(super::super::error::is_absence(&open("a/b/file/x").unwrap_err()));
    }

    #[test]
    fn nothing_outside_is_reached() {
        check(
            |root, path| Root::open(root.to_owned(), &Links::Below)?.open_below(path, READ),
            cfg!(target_os = "linux"),
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn links_lead_as_far_as_they_are_let() {
        let folder = tempfile::tempdir().unwrap();
        let (hub, secret) = (folder.path().join("hub"), folder.path().join("secret"));
        let root = hub.join("snapshots/main");
        fs::create_dir_all(&root).unwrap();
        fs::create_dir(hub.join("blobs")).unwrap();
        fs::write(hub.join("blobs/1"), "1").unwrap();
        fs::write(&secret, "s").unwrap();
        symlink("../../blobs/1", root.join("blob")).unwrap();
        symlink("../../../secret", root.join("secret")).unwrap();
        symlink(&secret, root.join("absolute")).unwrap();
        for (links, blob, out) in [
            (Links::Below, false, false),
            (Links::Within(hub.clone()), true, false),
            (Links::Anywhere, true, true),
        ] {
            let open = Root::open(root.clone(), &links).unwrap();
            assert!(open.open_below("", FOLDER).is_ok());
            assert_eq!(open.open_below("blob", READ).is_ok(), blob, "{links:?}");
            assert_eq!(open.open_below("secret", READ).is_ok(), out, "{links:?}");
            assert_eq!(open.open_below("absolute", READ).is_ok(), out, "{links:?}");
        }
        assert!(Root::open(hub.clone(), &Links::Within(root)).is_err());
        assert!(Root::open(hub.join("gone"), &Links::Within(hub)).is_err());
    }

    #[test]
    fn nothing_outside_is_reached_step_by_step() {
        check(
            |root, path| {
                open_step_by_step(Root::open(root.to_owned(), &Links::Below)?.fd, path, READ)
            },
            false,
        );
    }
}
