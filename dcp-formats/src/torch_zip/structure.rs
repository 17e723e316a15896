//! Checks the bytes of an archive outside the data of records.
//!
//! Redundant fields must agree, counts must match, and every byte must belong to something. The
//! only unchecked fields have no effect: the versions of the writing and the required program, and
//! a record's attributes.

use std::fmt;
use std::ops::Range;

use dcp_core::FormatError;

use super::directory::{ArchiveEntry, Directory, find_end};
use super::le::{u16_at, u32_at, u64_at};
use super::{
    ArchiveIndex, CENTRAL_ENTRY_LEN, DESCRIPTOR, END_LEN, Halt, LOCAL_HEADER_LEN, ParseStep,
    Record, Sparse, ZIP64_END_LEN, ZIP64_FROM, ZIP64_LOCATOR_LEN,
};

/// A flag: sizes and checksum follow the data.
const DESCRIBED: u16 = 1 << 3;
/// An attribute of MS-DOS: PyTorch (2.15) reads no data of a folder.
const FOLDER: u32 = 0x10;
/// Extra fields: zip64, and the padding of PyTorch.
const ZIP64: u16 = 1;
const PADDING: u16 = u16::from_le_bytes(*b"FB");
/// Extra fields of other programs: times and owners of Unix, NTFS and macOS, Java's mark, alignment
/// of Android and Office.
const OTHERS: [u16; 7] = [0x5455, 0x7875, 0x5855, 0x000a, 0xcafe, 0xd935, 0xa11e];
/// The maximum number of bytes between the data of two records.
const BETWEEN_MAX: u64 = 256 << 10;

impl ArchiveIndex {
    /// Checks what does not concern a single record: the first one begins the archive, and
    /// directory and end records are adjacent and have the sizes they state.
    ///
    /// Does not check what follows the end record; see [`trailing`](Self::trailing).
    ///
    /// # Errors
    ///
    /// When something does not match.
    pub fn check_ends(&self, blob: &Sparse<'_>) -> Result<ParseStep<()>, FormatError> {
        ParseStep::from_halting(self.ends(blob))
    }

    fn ends(&self, blob: &Sparse<'_>) -> Result<(), Halt> {
        if let Some(first) =
            self.entries().map(ArchiveEntry::header_offset).min().filter(|at| *at > 0)
        {
            return Err(bad(0, format!("{first} bytes before its first record are of none")));
        }
        let directory = Directory::find(blob)?;
        let Range { start, end } = directory.range;
        let listed: u64 = self.entries().map(|entry| entry.central_len).sum();
        if listed != end - start {
            return Err(bad(start, "its directory is longer than what is listed in it"));
        }
        let end_at = find_end(blob)?;
        let end_record = blob.need("the end record", end_at..end_at + END_LEN)?;
        if u16_at(end_record, 20).map(u64::from) > Some(blob.byte_len() - end_at - END_LEN) {
            return Err(bad(end_at, "its comment is cut off"));
        }
        let after = match directory.zip64_at {
            Some(at) => {
                let record = blob.need("the zip64 end record", at..at + ZIP64_END_LEN)?;
                let locator_at = end_at.saturating_sub(ZIP64_LOCATOR_LEN);
                let locator = blob.need("the zip64 locator", locator_at..end_at)?;
                let len = u64_at(record, 4).and_then(|len| len.checked_add(at + 12));
                if len != Some(locator_at) {
                    return Err(bad(at, "the zip64 end record has a wrong length"));
                }
                if (u32_at(locator, 4), u32_at(locator, 16)) != (Some(0), Some(1)) {
                    return Err(bad(locator_at, "the zip64 locator speaks of several volumes"));
                }
                at
            }
            None => end_at,
        };
        if end != after {
            return Err(bad(end, "bytes behind its directory belong to nothing"));
        }
        Ok(())
    }

    /// The number of bytes after the end of the archive and its comment. PyTorch (2.15) accepts up
    /// to 64 KiB.
    ///
    /// # Errors
    ///
    /// When there is no end record.
    pub fn trailing(blob: &Sparse<'_>) -> Result<ParseStep<u64>, FormatError> {
        let trailing = || {
            let at = find_end(blob)?;
            let end = blob.need("the end record", at..at + END_LEN)?;
            let behind = blob.byte_len() - at - END_LEN;
            // The last field is the length of the comment.
            let comment = u64::from(u16_at(end, 20).unwrap_or(0));
            Ok(if comment <= behind { behind - comment } else { behind })
        };
        ParseStep::from_halting(trailing())
    }
}

impl ArchiveEntry {
    /// Checks all bytes of a record but its data: its header, its descriptor, and that nothing else
    /// precedes the next record.
    ///
    /// # Errors
    ///
    /// When header, descriptor and directory disagree, or bytes belong to nothing.
    pub fn check_around(
        &self,
        record: &Record,
        blob: &Sparse<'_>,
    ) -> Result<ParseStep<()>, FormatError> {
        ParseStep::from_halting(self.around(record, blob))
    }

    /// The two ranges that [`check_around`](Self::check_around) needs: before the data, and after
    /// it.
    ///
    /// # Errors
    ///
    /// When more bytes follow the data than a record can have.
    pub fn ranges_around(&self, record: &Record) -> Result<[Range<u64>; 2], FormatError> {
        let behind = record.data.end..self.limit;
        if behind.end - behind.start > BETWEEN_MAX {
            return Err(self.unlisted(&behind).into());
        }
        Ok([self.header_offset..record.data.start, behind])
    }

    fn unlisted(&self, range: &Range<u64>) -> Halt {
        let (name, len) = (&self.name, range.end.saturating_sub(range.start));
        bad(range.start, format!("{len} bytes behind {name:?} belong to no record"))
    }

    fn around(&self, record: &Record, blob: &Sparse<'_>) -> Result<(), Halt> {
        let [before, behind] = self.ranges_around(record)?;
        let header = blob.need("a local header", before)?;
        let tail = blob.need("what follows a record", behind.clone())?;
        let wrong = |what: &str| {
            let name = &self.name;
            bad(
                self.header_offset,
                format!("header and directory disagree about {what} of {name:?}"),
            )
        };
        let fields = || Some((u16_at(header, 6)?, u32_at(header, 10)?));
        let Some((flags, modified)) = fields() else { return Err(wrong("the length")) };
        if flags != self.flags {
            return Err(wrong("the flags"));
        }
        if modified != self.modified {
            return Err(wrong("the time"));
        }
        if self.attributes & FOLDER != 0 && self.kept_len > 0 {
            let problem = format!("{:?} is marked as a folder, but has data", self.name);
            return Err(bad(self.header_offset, problem));
        }
        self.extra.map_err(|problem| {
            bad(self.header_offset, format!("{:?} {problem} in the directory", self.name))
        })?;
        let described = self.flags & DESCRIBED != 0;
        let fields = [(14, self.crc32.into()), (18, self.kept_len), (22, self.byte_len)];
        let found = fields.map(|(at, _)| u32_at(header, at).map(u64::from));
        if !described || found != [Some(0); 3] {
            for ((at, expected), found) in fields.into_iter().zip(found) {
                let large = at > 14 && expected >= ZIP64_FROM && found == Some(ZIP64_FROM);
                if found != Some(expected) && !large {
                    return Err(wrong(if at == 14 { "the CRC-32" } else { "the length" }));
                }
            }
        }
        let extra = header.get(LOCAL_HEADER_LEN as usize + self.name.len()..).unwrap_or_default();
        let known = [0, self.byte_len, self.kept_len, self.header_offset];
        extra_fields(extra, |value| known.contains(&value))
            .map_err(|problem| bad(self.header_offset, format!("{:?} {problem}", self.name)))?;
        match described {
            false if tail.is_empty() => Ok(()),
            false => Err(self.unlisted(&behind)),
            true => self.descriptor(tail).ok_or_else(|| {
                let name = &self.name;
                bad(behind.start, format!("what follows {name:?} does not describe it"))
            }),
        }
    }

    /// Whether these bytes are a descriptor: an optional signature, the CRC-32, and two lengths in
    /// 32 or 64 bits.
    fn descriptor(&self, bytes: &[u8]) -> Option<()> {
        let (fields, signed) = match bytes.len() {
            12 | 20 => (bytes, true),
            16 | 24 => (bytes.get(4..)?, u32_at(bytes, 0)? == DESCRIPTOR),
            _ => return None,
        };
        let lens = match fields.len() {
            12 => (u32_at(fields, 4)?.into(), u32_at(fields, 8)?.into()),
            _ => (u64_at(fields, 4)?, u64_at(fields, 12)?),
        };
        let agrees = u32_at(fields, 0)? == self.crc32 && lens == (self.kept_len, self.byte_len);
        (signed && agrees).then_some(())
    }
}

/// Whether extra fields are contiguous up to the end, and of known kinds.
pub(super) fn extra_fields(
    mut extra: &[u8],
    is_known: impl Fn(u64) -> bool,
) -> Result<(), &'static str> {
    while !extra.is_empty() {
        let parsed = || {
            let (id, len) = (u16_at(extra, 0)?, usize::from(u16_at(extra, 2)?));
            Some((id, extra.get(4..4 + len)?, extra.get(4 + len..)?))
        };
        let Some((id, content, rest)) = parsed() else { return Err("has an extra field cut off") };
        match id {
            PADDING if content.iter().all(|byte| *byte == b'Z') => {}
            PADDING => return Err("has another padding than PyTorch writes"),
            ZIP64 => {
                let (values, rest) = content.as_chunks();
                if !rest.is_empty() || !values.iter().all(|v| is_known(u64::from_le_bytes(*v))) {
                    return Err("has a wrong zip64 field");
                }
            }
            id if OTHERS.contains(&id) => {}
            _ => return Err("has an extra field of no known kind"),
        }
        extra = rest;
    }
    Ok(())
}

/// The length of a directory entry with its name, extra fields and comment.
pub(super) fn central_len(name: u16, extra: u16, comment: u16) -> u64 {
    CENTRAL_ENTRY_LEN + u64::from(name) + u64::from(extra) + u64::from(comment)
}

fn bad(byte_offset: u64, problem: impl fmt::Display) -> Halt {
    FormatError::new("torch archive", problem.to_string()).at(byte_offset).into()
}
