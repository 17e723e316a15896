//! Reads the central directory of an archive.

use std::fmt;
use std::ops::Range;

use dcp_core::FormatError;
use indexmap::IndexMap;

use super::le::{u16_at, u32_at, u64_at};
use super::structure::{central_len, extra_fields};
use super::{
    CENTRAL_ENTRY, CENTRAL_ENTRY_LEN, END, END_LEN, Halt, Inflater, LOCAL_HEADER, LOCAL_HEADER_LEN,
    Method, ParseStep, Record, Sparse, ZIP64_END, ZIP64_END_LEN, ZIP64_FROM, ZIP64_LOCATOR,
    ZIP64_LOCATOR_LEN,
};

/// The maximum length of the comment after the end record, in bytes.
const COMMENT_MAX: u64 = 0xffff;
/// The maximum compression ratio of deflate.
const DEFLATE_RATIO_MAX: u64 = 1032;

/// The central directory of an archive, checked: no two records share a name or a byte.
#[derive(Clone, Debug)]
pub struct ArchiveIndex {
    root: Box<str>,
    entries: IndexMap<Box<str>, ArchiveEntry>,
}

/// A record in the central directory.
#[derive(Clone, Debug)]
pub struct ArchiveEntry {
    pub(super) name: Box<str>,
    method: Method,
    pub(super) flags: u16,
    /// Time and date of MS-DOS.
    pub(super) modified: u32,
    pub(super) crc32: u32,
    pub(super) kept_len: u64,
    pub(super) byte_len: u64,
    pub(super) header_offset: u64,
    /// Attributes of MS-DOS and Unix.
    pub(super) attributes: u32,
    /// The problem of the extra fields in the directory, if there is one.
    pub(super) extra: Result<(), &'static str>,
    /// The length of this entry in the directory, in bytes.
    pub(super) central_len: u64,
    /// The start of the next record or of the directory.
    pub(super) limit: u64,
}

/// Checks every byte of an archive: its directory, the header of every record with its padding, what is between
/// records and after the last, and every record against its CRC-32, referenced or not.
///
/// # Errors
///
/// For the first damaged record, by name.
pub fn check_archive(archive: &[u8]) -> Result<(), FormatError> {
    let blob = Sparse::whole(archive);
    let index = ArchiveIndex::parse(&blob)?.ready()?;
    index.check_ends(&blob)?.ready()?;
    let trailing = ArchiveIndex::trailing(&blob)?.ready()?;
    if trailing > 0 {
        let problem = format!("{trailing} bytes follow its end");
        return Err(FormatError::new("torch archive", problem).at(blob.byte_len() - trailing));
    }
    for entry in index.entries() {
        let record = entry.locate(&blob)?.ready()?;
        entry.check_around(&record, &blob)?.ready()?;
        let kept = blob.get(record.data.clone()).unwrap_or_default();
        let checked = match record.method {
            Method::Stored => record.check_crc32(crc32fast::hash(kept)),
            Method::Deflated => {
                let mut inflater = Inflater::new(&record)?;
                inflater.push(kept, |_| ()).and_then(|()| inflater.finish())
            }
        };
        checked.map_err(|error| {
            let problem = format!("{}: {}", entry.name(), error.problem());
            FormatError::new("torch archive", problem).at(record.data.start)
        })?;
    }
    Ok(())
}

/// Checks that an archive ends with an end record whose directory is where it says. Its records are
/// not looked at.
pub(crate) fn check_end(blob: &Sparse<'_>) -> Result<ParseStep<()>, FormatError> {
    ParseStep::from_halting(Directory::find(blob).map(|_| ()))
}

impl ArchiveIndex {
    /// Reads the directory.
    ///
    /// # Errors
    ///
    /// When there is none or it is invalid: records that overlap, are outside the archive, have
    /// equal names, are encrypted, or claim to inflate to more than is possible.
    pub fn parse(blob: &Sparse<'_>) -> Result<ParseStep<Self>, FormatError> {
        ParseStep::from_halting(Self::read(blob))
    }

    /// Reads the directory of an archive of `byte_len` bytes from its last bytes.
    ///
    /// # Errors
    ///
    /// As [`ArchiveIndex::parse`].
    pub fn from_tail(tail: &[u8], byte_len: u64) -> Result<ParseStep<Self>, FormatError> {
        Self::parse(&Sparse::tail(byte_len, tail))
    }

    pub(crate) fn read(blob: &Sparse<'_>) -> Result<Self, Halt> {
        let directory = Directory::find(blob)?;
        let bytes = blob.need("the central directory", directory.range.clone())?;
        if directory.entries > bytes.len() as u64 / CENTRAL_ENTRY_LEN {
            let claimed = directory.entries;
            return Err(bad(directory.range.start, format!("no room for {claimed} records")));
        }
        let mut entries = IndexMap::new();
        let mut at = 0;
        for _ in 0..directory.entries {
            let offset = directory.range.start + at as u64;
            let (entry, len) = ArchiveEntry::parse(bytes.get(at..).unwrap_or_default())
                .map_err(|problem| bad(offset, problem))?;
            at += len;
            if let Some(twice) = entries.insert(entry.name.clone(), entry) {
                return Err(bad(offset, format!("there are two records {:?}", twice.name)));
            }
        }
        limit(&mut entries, directory.range.start)?;
        let root = match entries.first().and_then(|(name, _)| name.split_once('/')) {
            Some((root, _)) => root.into(),
            None => {
                let problem = "its records have no common root, so it is not a torch.save archive";
                return Err(bad(directory.range.start, problem));
            }
        };
        Ok(Self { root, entries })
    }

    /// The first component of all names: `archive`, or the name of the `torch.save` file without
    /// its extension.
    #[must_use]
    pub fn root(&self) -> &str {
        &self.root
    }

    /// All records in the order of the directory.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &ArchiveEntry> {
        self.entries.values()
    }

    /// The record of this name under the root, such as `data.pkl` or `data/0`.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&ArchiveEntry> {
        self.entries.get(format!("{}/{name}", self.root).as_str())
    }

    /// The record of this name under the root.
    ///
    /// # Errors
    ///
    /// When there is no such record.
    pub fn require(&self, name: &str) -> Result<&ArchiveEntry, FormatError> {
        self.entry(name)
            .ok_or_else(|| FormatError::new("torch archive", format!("it has no record {name:?}")))
    }
}

impl ArchiveEntry {
    /// The name, including the root.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Length of the content in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// The CRC-32 of the content; `None` if the writer omitted it.
    #[must_use]
    pub fn crc32(&self) -> Option<u32> {
        // PyTorch stores 0 when CRCs are disabled.
        (self.crc32 != 0 || self.byte_len == 0).then_some(self.crc32)
    }

    /// The offset of the local header in the archive.
    #[must_use]
    pub fn header_offset(&self) -> u64 {
        self.header_offset
    }

    /// The range of the local header that [`locate`](Self::locate) needs.
    #[must_use]
    pub fn header_range(&self) -> Range<u64> {
        let start = self.header_offset;
        start..start.saturating_add(LOCAL_HEADER_LEN).saturating_add(self.name.len() as u64)
    }

    /// Locates the data. Only the local header has its own length.
    ///
    /// # Errors
    ///
    /// When header and directory disagree, or the data reaches into another record.
    pub fn locate(&self, blob: &Sparse<'_>) -> Result<ParseStep<Record>, FormatError> {
        ParseStep::from_halting(self.find(blob))
    }

    /// [`locate`](Self::locate) from the bytes of [`header_range`](Self::header_range).
    ///
    /// # Errors
    ///
    /// As [`locate`](Self::locate), and when there are too few bytes.
    pub fn data_range(&self, local_header: &[u8]) -> Result<Record, FormatError> {
        let blob = Sparse::new(self.limit).with(self.header_offset, local_header);
        self.locate(&blob)?.ready()
    }

    pub(crate) fn find(&self, blob: &Sparse<'_>) -> Result<Record, Halt> {
        let header = blob.need("a local header", self.header_range())?;
        let start = self
            .data_start(header)
            .filter(|start| *start <= self.limit && self.kept_len <= self.limit - start)
            .ok_or_else(|| {
                let name = &self.name;
                bad(self.header_offset, format!("header and directory disagree about {name:?}"))
            })?;
        let data = start..start + self.kept_len;
        Ok(Record { data, byte_len: self.byte_len, crc32: self.crc32(), method: self.method })
    }

    fn data_start(&self, header: &[u8]) -> Option<u64> {
        let agrees = u32_at(header, 0)? == LOCAL_HEADER
            && u16_at(header, 8)? == if self.method == Method::Stored { 0 } else { 8 }
            && usize::from(u16_at(header, 26)?) == self.name.len()
            && header.get(LOCAL_HEADER_LEN as usize..)? == self.name.as_bytes();
        let len = LOCAL_HEADER_LEN + self.name.len() as u64 + u64::from(u16_at(header, 28)?);
        self.header_offset.checked_add(len).filter(|_| agrees)
    }

    /// Parses the entry at the start of `bytes`. Also returns its length.
    fn parse(bytes: &[u8]) -> Result<(Self, usize), String> {
        let fixed = Fixed::parse(bytes)
            .filter(|fixed| fixed.signature == CENTRAL_ENTRY)
            .ok_or("the directory ends early or is damaged")?;
        let rest = bytes.get(CENTRAL_ENTRY_LEN as usize..).unwrap_or_default();
        let (name, rest) =
            rest.split_at_checked(fixed.name_len.into()).ok_or("a name is cut off")?;
        let extra = rest.get(..fixed.extra_len.into()).ok_or("an extra field is cut off")?;
        let len = central_len(fixed.name_len, fixed.extra_len, fixed.comment_len);
        let name: Box<str> =
            str::from_utf8(name).map_err(|_| "a record's name is not UTF-8")?.into();

        let mut entry = Self {
            method: match fixed.method {
                0 => Method::Stored,
                8 => Method::Deflated,
                other => return Err(format!("{name:?} is compressed by unknown method {other}")),
            },
            flags: fixed.flags,
            modified: fixed.modified,
            crc32: fixed.crc32,
            attributes: fixed.attributes,
            central_len: len,
            extra: Ok(()),
            kept_len: fixed.kept_len.into(),
            byte_len: fixed.byte_len.into(),
            header_offset: fixed.header_offset.into(),
            limit: 0,
            name,
        };
        let large = [&mut entry.byte_len, &mut entry.kept_len, &mut entry.header_offset];
        zip64(extra, large).ok_or_else(|| format!("{:?} lacks a zip64 field", entry.name))?;
        let values = [entry.byte_len, entry.kept_len, entry.header_offset];
        entry.extra = extra_fields(extra, |value| values.contains(&value));
        let name = &entry.name;
        if fixed.flags & 1 != 0 {
            return Err(format!("{name:?} is encrypted"));
        }
        if fixed.volume != 0 {
            return Err(format!("{name:?} is on another volume"));
        }
        match entry.method {
            Method::Stored if entry.kept_len != entry.byte_len => {
                Err(format!("{name:?} is stored, but with two different lengths"))
            }
            Method::Deflated if entry.byte_len / DEFLATE_RATIO_MAX > entry.kept_len => {
                Err(format!("{name:?} claims to inflate to more than is possible"))
            }
            _ => Ok((entry, len as usize)),
        }
    }
}

/// The fixed part of a directory entry.
struct Fixed {
    signature: u32,
    flags: u16,
    method: u16,
    modified: u32,
    crc32: u32,
    kept_len: u32,
    byte_len: u32,
    name_len: u16,
    extra_len: u16,
    comment_len: u16,
    volume: u16,
    attributes: u32,
    header_offset: u32,
}

impl Fixed {
    fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            signature: u32_at(bytes, 0)?,
            flags: u16_at(bytes, 8)?,
            method: u16_at(bytes, 10)?,
            modified: u32_at(bytes, 12)?,
            crc32: u32_at(bytes, 16)?,
            kept_len: u32_at(bytes, 20)?,
            byte_len: u32_at(bytes, 24)?,
            name_len: u16_at(bytes, 28)?,
            extra_len: u16_at(bytes, 30)?,
            comment_len: u16_at(bytes, 32)?,
            volume: u16_at(bytes, 34)?,
            attributes: u32_at(bytes, 38)?,
            header_offset: u32_at(bytes, 42)?,
        })
    }
}

/// Replaces values that are marked as too large with those of the zip64 field, which lists only
/// these, in order.
fn zip64(mut extra: &[u8], values: [&mut u64; 3]) -> Option<()> {
    if values.iter().all(|value| **value < ZIP64_FROM) {
        return Some(());
    }
    loop {
        let (id, len) = (u16_at(extra, 0)?, usize::from(u16_at(extra, 2)?));
        let field = extra.get(4..4 + len)?;
        if id == 1 {
            let mut at = 0;
            for value in values.into_iter().filter(|value| **value >= ZIP64_FROM) {
                *value = u64_at(field, at)?;
                at += 8;
            }
            return Some(());
        }
        extra = extra.get(4 + len..)?;
    }
}

/// Sets the end of each record, and refuses records that overlap.
fn limit(entries: &mut IndexMap<Box<str>, ArchiveEntry>, directory: u64) -> Result<(), Halt> {
    let mut by_offset: Vec<&mut ArchiveEntry> = entries.values_mut().collect();
    by_offset.sort_by_key(|entry| std::cmp::Reverse(entry.header_offset));
    let mut limit = directory;
    for entry in by_offset {
        let end = entry.header_range().end.checked_add(entry.kept_len);
        if end.is_none_or(|end| end > limit) {
            let problem = format!("{:?} reaches into what follows it", entry.name);
            return Err(bad(entry.header_offset, problem));
        }
        entry.limit = limit;
        limit = entry.header_offset;
    }
    Ok(())
}

/// The range and number of entries of the central directory.
pub(super) struct Directory {
    pub(super) range: Range<u64>,
    entries: u64,
    /// The offset of the zip64 end record, if there is one.
    pub(super) zip64_at: Option<u64>,
}

impl Directory {
    pub(super) fn find(blob: &Sparse<'_>) -> Result<Self, Halt> {
        let end_at = find_end(blob)?;
        let end = blob.need("the end record", end_at..end_at + END_LEN)?;
        let field = |at| u64::from(u16_at(end, at).unwrap_or(0));
        if field(4) != 0 || field(6) != 0 || field(8) != field(10) {
            return Err(bad(end_at, "it is one volume of several"));
        }
        let (entries, len, start) = (
            field(10),
            u64::from(u32_at(end, 12).unwrap_or(0)),
            u64::from(u32_at(end, 16).unwrap_or(0)),
        );
        let plain = Self { range: start..start.saturating_add(len), entries, zip64_at: None };
        let (found, upper) = match find_zip64(blob, end_at)? {
            Some((large, at)) => {
                let agrees = |short: u64, long: u64, mark: u64| short == long || short == mark;
                let large_len = large.range.end - large.range.start;
                if !agrees(entries, large.entries, 0xffff)
                    || !agrees(len, large_len, ZIP64_FROM)
                    || !agrees(start, large.range.start, ZIP64_FROM)
                {
                    return Err(bad(end_at, "the two end records disagree"));
                }
                (large, at)
            }
            None => (plain, end_at),
        };
        if found.range.end > upper {
            return Err(bad(end_at, "the central directory reaches past the end"));
        }
        Ok(found)
    }
}

/// The offset of the end record: the last one in the file, as PyTorch (2.15) searches for it. A
/// comment or unrelated bytes may follow.
pub(super) fn find_end(blob: &Sparse<'_>) -> Result<u64, Halt> {
    let total = blob.byte_len();
    let Some(last_at) = total.checked_sub(END_LEN) else {
        return Err(bad(0, "it is too short for an archive"));
    };
    let last = blob.need("the end record", last_at..total)?;
    if u32_at(last, 0) == Some(END) {
        return Ok(last_at);
    }
    let from = last_at.saturating_sub(COMMENT_MAX);
    let tail = blob.need("the end record", from..total)?;
    let found = (0..=tail.len() - END_LEN as usize).rev().find(|at| u32_at(tail, *at) == Some(END));
    match found {
        Some(at) => Ok(from + at as u64),
        None => Err(bad(from, "it has no end record: it is not a zip archive, or cut short")),
    }
}

/// The directory according to the zip64 end record, and the offset of that record.
fn find_zip64(blob: &Sparse<'_>, end_at: u64) -> Result<Option<(Directory, u64)>, Halt> {
    let Some(locator_at) = end_at.checked_sub(ZIP64_LOCATOR_LEN) else { return Ok(None) };
    let locator = blob.need("the zip64 locator", locator_at..end_at)?;
    if u32_at(locator, 0) != Some(ZIP64_LOCATOR) {
        return Ok(None);
    }
    let at = u64_at(locator, 8).unwrap_or(u64::MAX);
    let after = at.checked_add(ZIP64_END_LEN).filter(|after| *after <= locator_at);
    let Some(after) = after else {
        return Err(bad(locator_at, "the zip64 end record is outside"));
    };
    let record = blob.need("the zip64 end record", at..after)?;
    let field = |at| u64_at(record, at).unwrap_or(u64::MAX);
    let (entries, len, start) = (field(32), field(40), field(48));
    let range = start.checked_add(len).map(|end| start..end);
    match range {
        Some(range)
            if u32_at(record, 0) == Some(ZIP64_END)
                && field(16) == 0
                && field(24) == entries
                && range.end <= at =>
        {
            Ok(Some((Directory { range, entries, zip64_at: Some(at) }, at)))
        }
        _ => Err(bad(at, "the zip64 end record is damaged")),
    }
}

fn bad(byte_offset: u64, problem: impl fmt::Display) -> Halt {
    FormatError::new("torch archive", problem.to_string()).at(byte_offset).into()
}
