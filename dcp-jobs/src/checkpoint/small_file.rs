//! Small files that a user names: configurations, mappings, tokenizers.

use std::io::{self, Read};
use std::path::Path;

/// Reads a file that an option or a variable names, if it is a regular one of at most `max` bytes. A
/// link to one is followed. A pipe would be waited for, and a device has no end.
///
/// # Errors
///
/// When it cannot be read, is something else, or is longer.
pub fn read_at_most(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let check = |metadata: std::fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        false => Err(invalid("it is a device, a pipe or a socket, and not a file".to_owned())),
    };
    check(std::fs::metadata(path)?)?;
    let file = std::fs::File::open(path)?;
    check(file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => Err(invalid(format!("it has more than {max} bytes"))),
        false => Ok(bytes),
    }
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
