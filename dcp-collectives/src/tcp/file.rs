//! Small files of secrets and certificates.

use std::fs::{File, Metadata, metadata};
use std::io::{self, Read};
use std::path::Path;

/// Reads a regular file of at most `limit` bytes, or one to which a link leads. A pipe would be
/// waited for, and a device has no end.
pub(super) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let check = |metadata: Metadata| match metadata.is_file() {
        true => Ok(()),
        false => {
            Err(io::Error::other("it is a folder, a device, a pipe or a socket, and not a file"))
        }
    };
    check(metadata(path)?)?;
    let file = File::open(path)?;
    check(file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}
