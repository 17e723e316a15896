//! The library of NCCL, and the functions of it that are called.
//!
//! cudarc has bindings, too, which are not used: they panic without the library, and look for
//! `libnccl.so` alone, which only the packages for developers have.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use dcp_core::error::error_chain;

/// Names of the library.
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// The oldest version, which has communicators that do not block: 2.14.
const OLDEST: c_int = 21_400;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId {
    pub(super) internal: [c_char; 128],
}

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;

/// `ncclResult_t`: any number, as a later version may have more of them.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;
/// `ncclUint8`.
pub(super) const UINT8: c_int = 1;

/// `ncclConfig_t` of version 2.14. Later libraries read as many bytes as `size` says, and take their
/// defaults for the rest.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Calls return before they are done.
    pub(super) fn not_blocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: OLDEST as c_uint, blocking: 0 }
    }
}

type GetVersion = unsafe extern "C" fn(*mut c_int) -> Code;
type GetErrorString = unsafe extern "C" fn(Code) -> *const c_char;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Code;
type CommInit = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
type CommAsyncError = unsafe extern "C" fn(Comm, *mut Code) -> Code;
type CommCall = unsafe extern "C" fn(Comm) -> Code;
type Broadcast = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    c_int,
    c_int,
    Comm,
    *mut c_void,
) -> Code;

/// The reason why NCCL cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// NCCL is not installed.
    #[error("cannot load NCCL: {problem}; install libnccl2, or add its folder to LD_LIBRARY_PATH")]
    NoLibrary {
        /// The report of the loader, by name of the library.
        problem: String,
    },
    /// The library lacks a function, or is too old.
    #[error("NCCL has no {needed}; 2.14 and later have it")]
    TooOld {
        /// The function or the feature that is needed.
        needed: &'static str,
    },
    /// A call of the library failed.
    #[error("{call} of NCCL failed: {problem}")]
    Call {
        /// The function.
        call: &'static str,
        /// The report of the library.
        problem: String,
    },
}

/// The functions of NCCL, and the library that they are in.
pub(super) struct Library {
    error_string: GetErrorString,
    unique_id: GetUniqueId,
    pub(super) init: CommInit,
    pub(super) async_error: CommAsyncError,
    pub(super) finalize: CommCall,
    pub(super) destroy: CommCall,
    pub(super) abort: CommCall,
    pub(super) broadcast: Broadcast,
    _library: libloading::Library,
}

impl Library {
    /// Loads the library.
    pub(super) fn load() -> Result<Arc<Self>, NcclError> {
        let mut problems = Vec::new();
        for name in NAMES {
            // SAFETY: the library is NCCL, whose initialization has no requirements.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => return Self::of(library).map(Arc::new),
                Err(error) => problems.push(error_chain(&error)),
            }
        }
        problems.dedup();
        Err(NcclError::NoLibrary { problem: problems.join("; ") })
    }

    fn of(library: libloading::Library) -> Result<Self, NcclError> {
        /// # Safety
        ///
        /// The function has the type `F`.
        unsafe fn find<F: Copy>(
            library: &libloading::Library,
            name: &'static str,
        ) -> Result<F, NcclError> {
            // SAFETY: as the caller promises.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|function| *function).map_err(|_| NcclError::TooOld { needed: name })
        }
        // SAFETY: the types are those of `nccl.h` (1), and `_library` outlives the functions.
        unsafe {
            let version: GetVersion = find(&library, "ncclGetVersion")?;
            let mut found = 0;
            if version(&raw mut found) != SUCCESS || found < OLDEST {
                return Err(NcclError::TooOld { needed: "communicators that do not block" });
            }
            Ok(Self {
                error_string: find(&library, "ncclGetErrorString")?,
                unique_id: find(&library, "ncclGetUniqueId")?,
                init: find(&library, "ncclCommInitRankConfig")?,
                async_error: find(&library, "ncclCommGetAsyncError")?,
                finalize: find(&library, "ncclCommFinalize")?,
                destroy: find(&library, "ncclCommDestroy")?,
                abort: find(&library, "ncclCommAbort")?,
                broadcast: find(&library, "ncclBroadcast")?,
                _library: library,
            })
        }
    }

    /// Bytes that identify a new group.
    pub(super) fn identify(&self) -> Result<Vec<u8>, NcclError> {
        let mut id = UniqueId { internal: [0; 128] };
        // SAFETY: a pointer to an id, which the call fills (1).
        let code = unsafe { (self.unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id.internal.iter().map(|byte| *byte as u8).collect())
    }

    /// Whether a call succeeded; `false` while it is under way.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<bool, NcclError> {
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            _ => Err(NcclError::Call { call, problem: self.problem(code) }),
        }
    }

    fn problem(&self, code: Code) -> String {
        // SAFETY: the call takes any number, and returns a static string or null (1).
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, and a string of C for ever.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_2_14() {
        assert_eq!(size_of::<Config>(), 24);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(size_of::<UniqueId>(), 128);
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        // SAFETY: the C library is loaded already.
        let Ok(library) = (unsafe { libloading::Library::new("libc.so.6") }) else {
            println!("SKIPPED: there is no libc.so.6 here");
            return;
        };
        let error = Library::of(library).unwrap_err();
        assert!(matches!(error, NcclError::TooOld { needed: "ncclGetVersion" }), "{error}");
    }
}
