//! Whether the driver is there: cudarc panics where a library or a function is missing.

use dcp_core::error::error_chain;
use libloading::Library;

use super::CudaError;

/// Names of the library. cudarc loads the first of these that there is.
const NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Every function that this crate reaches through cudarc.
const FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorString",
    "cuInit",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Finds the driver and all of its functions that are called.
pub(super) fn check() -> Result<(), CudaError> {
    let mut problems = Vec::new();
    for name in NAMES {
        // SAFETY: the library is NVIDIA's driver, whose initialization has no requirements.
        match unsafe { Library::new(*name) } {
            Ok(library) => return check_functions(&library),
            Err(error) => problems.push(error_chain(&error)),
        }
    }
    problems.dedup();
    Err(CudaError::NoLibrary { problem: problems.join("; ") })
}

fn check_functions(library: &Library) -> Result<(), CudaError> {
    for name in FUNCTIONS {
        // SAFETY: the symbol is looked for, and not used.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        found.map_err(|_| CudaError::NoFunction { name })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_functions_is_refused() {
        // SAFETY: the C library is loaded already.
        let library = unsafe { Library::new("libc.so.6") };
        let Ok(library) = library else {
            println!("SKIPPED: there is no libc.so.6 here");
            return;
        };
        let error = check_functions(&library).unwrap_err();
        assert!(matches!(error, CudaError::NoFunction { name: "cuCtxGetCurrent" }), "{error}");
    }
}
