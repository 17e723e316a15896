//! Small files beside checkpoints: configurations, mappings, tokenizers.

use std::io::{self, Read};
use std::path::Path;

/// A file, unless it is larger than such a file ever is.
pub(crate) fn read_at_most(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let problem = format!("it has more than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(bytes)
}
