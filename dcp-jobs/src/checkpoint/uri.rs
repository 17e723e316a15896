//! URIs: their folders and names.

use std::path::Path;

pub(crate) use dcp_core::location::{below_url as below, split_url as split};

/// The path that a URI is, if it is that of a local file system.
pub(crate) fn local_path(uri: &str) -> Option<&Path> {
    match uri.split_once("://") {
        Some(("file", path)) => Some(Path::new(path)),
        Some(_) => None,
        None => Some(Path::new(uri)),
    }
}
