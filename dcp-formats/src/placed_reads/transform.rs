//! Reverses the stream transforms of PyTorch's storage extensions.

use std::borrow::Cow;

use bytes::Bytes;
use dcp_core::FormatError;
use dcp_core::format::StreamTransforms;
use dcp_core::metadata::Encoding;

use crate::expansion::ItemKind;

/// The bytes of an object's archive before the transforms of its encoding, such as `stream.zstd`, of which those of
/// plug-ins are in `registered`.
///
/// # Errors
///
/// When a transform is unknown, the bytes are damaged, or they expand further than any writer
/// compresses an object.
pub fn without_transforms(
    stored: Bytes,
    encoding: &Encoding,
    registered: &StreamTransforms,
) -> Result<Bytes, FormatError> {
    let limit = ItemKind::Object.expanded_max(stored.len() as u64, 0);
    Ok(match undo(&stored, &encoding.transforms, registered, limit)? {
        Cow::Borrowed(_) => stored.clone(),
        Cow::Owned(bytes) => bytes.into(),
    })
}

/// Reverses `transforms`, which are in PyTorch's list order.
///
/// PyTorch (2.15) lists the last transform first, and reverses them in that order too, which fails
/// for more than one. Its bytes are valid all the same, so this reverses the last-listed first, and
/// tries the other order after it.
///
/// # Errors
///
/// When a transform is unknown, the bytes are damaged, or they would exceed `limit`.
pub(super) fn undo<'a>(
    stored: &'a [u8],
    transforms: &[impl AsRef<str>],
    registered: &StreamTransforms,
    limit: u64,
) -> Result<Cow<'a, [u8]>, FormatError> {
    let last_first = run(stored, transforms.iter().rev().map(AsRef::as_ref), registered, limit);
    match last_first {
        Err(error) if transforms.len() > 1 => {
            let first_first = transforms.iter().map(AsRef::as_ref);
            run(stored, first_first, registered, limit).map_err(|_| error)
        }
        result => result,
    }
}

fn run<'a, 't>(
    stored: &'a [u8],
    transforms: impl Iterator<Item = &'t str>,
    registered: &StreamTransforms,
    limit: u64,
) -> Result<Cow<'a, [u8]>, FormatError> {
    let mut bytes = Cow::Borrowed(stored);
    for transform in transforms {
        bytes = Cow::Owned(undo_one(&bytes, transform, registered, limit)?);
    }
    Ok(bytes)
}

/// A descriptor is `name[@domain][/version]`. Extensions accept versions that begin with theirs up
/// to the first dot.
fn undo_one(
    bytes: &[u8],
    transform: &str,
    registered: &StreamTransforms,
    limit: u64,
) -> Result<Vec<u8>, FormatError> {
    let (name, version) = transform.split_once('/').unwrap_or((transform, "1"));
    let major = version.split('.').next().unwrap_or(version);
    if let Some(known) = registered.by_name(name) {
        let item = known.undo(bytes, version, limit)?;
        // The lengths of what follows are bounded by this one.
        return match item.len() as u64 > limit {
            true => {
                Err(stored_bytes(format!("{transform:?} makes more than {limit} bytes of them")))
            }
            false => Ok(item),
        };
    }
    match (name, major) {
        ("stream.zstd", "1") => unzstd(bytes, limit),
        ("stream.zstd", _) => Err(stored_bytes(format!("{transform:?} is of another version"))),
        _ => Err(stored_bytes(format!(
            "they were written through {transform:?}, a transform that is not registered in this program"
        ))),
    }
}

fn stored_bytes(problem: String) -> FormatError {
    FormatError::new("stored bytes", problem)
}

#[cfg(feature = "zstd")]
fn unzstd(bytes: &[u8], limit: u64) -> Result<Vec<u8>, FormatError> {
    use std::io::Read as _;

    let bad = |error: std::io::Error| {
        FormatError::new("zstd stream", "it does not decompress").with_source(error)
    };
    let mut out = Vec::new();
    let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes).map_err(bad)?;
    // Only `--ultra --long` writes windows beyond 128 MiB.
    decoder.window_log_max(27).map_err(bad)?;
    decoder.take(limit.saturating_add(1)).read_to_end(&mut out).map_err(bad)?;
    if out.len() as u64 > limit {
        let problem = format!("it decompresses to more than {limit} bytes");
        return Err(FormatError::new("zstd stream", problem));
    }
    Ok(out)
}

#[cfg(not(feature = "zstd"))]
fn unzstd(_: &[u8], _: u64) -> Result<Vec<u8>, FormatError> {
    let problem = "compressed with zstd, which this build cannot read (feature `zstd`)";
    Err(FormatError::new("stored bytes", problem))
}

#[cfg(all(test, feature = "zstd"))]
mod tests {
    use super::*;

    fn pack(bytes: &[u8]) -> Vec<u8> {
        zstd::stream::encode_all(bytes, 3).unwrap_or_default()
    }

    #[test]
    fn zstd_is_undone_within_its_limit() {
        let bomb = pack(&vec![0; 1 << 20]);
        let none = &StreamTransforms::default();
        assert_eq!(undo(&bomb, &["stream.zstd/1"], none, 1 << 20).unwrap().len(), 1 << 20);
        let error = undo(&bomb, &["stream.zstd/1.7"], none, (1 << 20) - 1).unwrap_err();
        assert!(error.to_string().contains("more than"));
        for len in 0..bomb.len() {
            let cut = undo(&bomb[..len], &["stream.zstd"], none, 1 << 20);
            assert!(cut.is_err(), "{len} of {} bytes", bomb.len());
        }
    }

    #[test]
    fn several_transforms_are_undone_last_listed_first() {
        let none = &StreamTransforms::default();
        let twice = pack(&pack(b"abc"));
        assert_eq!(*undo(&twice, &["stream.zstd/1", "stream.zstd/1"], none, 99).unwrap(), *b"abc");
        assert!(undo(b"abc", &["stream.zstd/2"], none, 99).is_err());
        assert!(undo(b"abc", &["rot13"], none, 99).is_err());
        assert_eq!(*undo(b"abc", &[""; 0], none, 0).unwrap(), *b"abc");
    }
}
