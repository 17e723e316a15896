//! Writes an archive byte for byte as PyTorch's own writer does.

use bytes::{BufMut, Bytes, BytesMut};
use dcp_core::FormatError;
use dcp_core::digest::fnv1a_64;

use super::{
    ALIGNMENT, CENTRAL_ENTRY, CENTRAL_ENTRY_LEN, DESCRIPTOR, END, END_LEN, LOCAL_HEADER,
    LOCAL_HEADER_LEN, ZIP64_END, ZIP64_END_LEN, ZIP64_FROM, ZIP64_LOCATOR, ZIP64_LOCATOR_LEN,
};

/// The name of an archive that PyTorch writes to a stream.
const ROOT: &str = "archive";
/// Longer names exceed the fields that contain their length.
const ROOT_LEN_MAX: usize = 1024;
const SERIALIZATION_ID_LEN: u64 = 40;

/// The small records next to pickle and storages. Readers of every version accept both sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordSet {
    /// As PyTorch 2.1 to 2.6 write: `byteorder`, `version`, `.data/serialization_id`.
    Torch2_1,
    /// As PyTorch 2.7 and later write: also `.format_version` and `.storage_alignment`.
    #[default]
    Torch2_7,
}

/// The place of a storage's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageSlot {
    /// The offset in the archive; a multiple of [`ALIGNMENT`].
    pub byte_offset: u64,
    /// Length in bytes.
    pub byte_len: u64,
}

/// The layout of one archive, computed from the lengths of its parts.
///
/// The archive consists of [`head`](Self::head); the bytes of each storage, which the caller
/// streams while it computes their CRC-32, with [`between`](Self::between) after all but the last;
/// and [`tail`](Self::tail). It has [`byte_len`](Self::byte_len) bytes.
#[derive(Clone, Debug)]
pub struct ArchiveEncoder {
    pickle: Bytes,
    slots: Vec<Slot>,
    /// The index of `data/0` in `slots`, or where it would be.
    first_storage: usize,
    storages: usize,
    directory_offset: u64,
    directory_len: u64,
    byte_len: u64,
}

#[derive(Clone, Debug)]
struct Slot {
    name: String,
    content: Content,
    byte_len: u64,
    header_offset: u64,
    padding: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Pickle,
    Fixed(&'static [u8]),
    Storage(usize),
    SerializationId,
}

impl ArchiveEncoder {
    /// Lays out an archive of `data.pkl` and storages `data/0`, `data/1`, … of these lengths in
    /// bytes.
    ///
    /// # Errors
    ///
    /// When the archive would be longer than 2⁶⁴ bytes.
    pub fn new(
        records: RecordSet,
        pickle: impl Into<Bytes>,
        storage_lens: &[u64],
    ) -> Result<Self, FormatError> {
        Self::with_root(ROOT, records, pickle, storage_lens)
    }

    /// Like [`new`](Self::new), with another name of the root folder: PyTorch uses the file name
    /// without its extension.
    ///
    /// # Errors
    ///
    /// As [`ArchiveEncoder::new`], and when the name is not a single folder or is longer than 1024
    /// bytes.
    pub fn with_root(
        root: &str,
        records: RecordSet,
        pickle: impl Into<Bytes>,
        storage_lens: &[u64],
    ) -> Result<Self, FormatError> {
        if root.len() > ROOT_LEN_MAX || root.contains('/') {
            let problem = format!("{root:?} cannot be the folder of its records");
            return Err(FormatError::new("torch archive", problem));
        }
        let pickle = pickle.into();
        let mut contents = vec![("data.pkl".to_owned(), Content::Pickle, pickle.len() as u64)];
        let fixed = |name: &str, bytes: &'static [u8]| {
            (name.to_owned(), Content::Fixed(bytes), bytes.len() as u64)
        };
        if records == RecordSet::Torch2_7 {
            contents.push(fixed(".format_version", b"1"));
            contents.push(fixed(".storage_alignment", b"64"));
        }
        contents.push(fixed("byteorder", b"little"));
        let first_storage = contents.len();
        for (n, len) in storage_lens.iter().enumerate() {
            contents.push((format!("data/{n}"), Content::Storage(n), *len));
        }
        contents.push(fixed("version", b"3\n"));
        let id = ".data/serialization_id".to_owned();
        contents.push((id, Content::SerializationId, SERIALIZATION_ID_LEN));

        let mut at = 0_u64;
        let mut directory_len = 0_u64;
        let mut slots = Vec::with_capacity(contents.len());
        for (name, content, byte_len) in contents {
            let name = format!("{root}/{name}");
            let mut slot = Slot { name, content, byte_len, header_offset: at, padding: 0 };
            // At most ALIGNMENT - 1.
            slot.padding = (slot.data_offset().wrapping_neg() % ALIGNMENT) as u16;
            at = at.checked_add(slot.span().ok_or_else(too_long)?).ok_or_else(too_long)?;
            directory_len += CENTRAL_ENTRY_LEN + (slot.name.len() + slot.zip64_len()) as u64;
            slots.push(slot);
        }
        let end_len = ZIP64_END_LEN + ZIP64_LOCATOR_LEN + END_LEN;
        let byte_len = at.checked_add(directory_len + end_len).ok_or_else(too_long)?;
        Ok(Self {
            pickle,
            slots,
            first_storage,
            storages: storage_lens.len(),
            directory_offset: at,
            directory_len,
            byte_len,
        })
    }

    /// The whole archive, for storages in memory.
    ///
    /// # Errors
    ///
    /// As [`ArchiveEncoder::new`].
    pub fn encode(
        records: RecordSet,
        pickle: impl Into<Bytes>,
        storages: &[&[u8]],
    ) -> Result<Bytes, FormatError> {
        Self::encode_with_root(ROOT, records, pickle, storages)
    }

    /// Like [`encode`](Self::encode), with another name of the root folder.
    ///
    /// # Errors
    ///
    /// As [`ArchiveEncoder::with_root`].
    pub fn encode_with_root(
        root: &str,
        records: RecordSet,
        pickle: impl Into<Bytes>,
        storages: &[&[u8]],
    ) -> Result<Bytes, FormatError> {
        let lens: Vec<_> = storages.iter().map(|bytes| bytes.len() as u64).collect();
        let crcs: Vec<_> = storages.iter().map(|bytes| crc32fast::hash(bytes)).collect();
        let encoder = Self::with_root(root, records, pickle, &lens)?;
        let mut out = BytesMut::with_capacity(usize::try_from(encoder.byte_len).unwrap_or(0));
        out.extend_from_slice(&encoder.head());
        for (n, bytes) in storages.iter().enumerate() {
            out.extend_from_slice(bytes);
            out.extend_from_slice(&encoder.between(n, crcs[n]));
        }
        out.extend_from_slice(&encoder.tail(&crcs));
        Ok(out.freeze())
    }

    /// The length of the archive in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// The place of each storage.
    #[must_use]
    pub fn storages(&self) -> Vec<StorageSlot> {
        self.slots
            .iter()
            .filter(|slot| matches!(slot.content, Content::Storage(_)))
            .map(|slot| StorageSlot { byte_offset: slot.data_offset(), byte_len: slot.byte_len })
            .collect()
    }

    /// Everything before the data of the first storage, or before [`tail`](Self::tail) without
    /// storages.
    #[must_use]
    pub fn head(&self) -> Bytes {
        let mut out = BytesMut::new();
        let (front, rest) = self.slots.split_at(self.first_storage);
        for slot in front {
            let content: &[u8] = match slot.content {
                Content::Fixed(bytes) => bytes,
                _ => &self.pickle,
            };
            slot.put_header(&mut out);
            out.put_slice(content);
            slot.put_descriptor(&mut out, crc32fast::hash(content));
        }
        if let (Some(slot), 1..) = (rest.first(), self.storages) {
            slot.put_header(&mut out);
        }
        out.freeze()
    }

    /// The bytes between the data of storage `n`, with this CRC-32, and the next; empty after the
    /// last, where [`tail`](Self::tail) begins.
    #[must_use]
    pub fn between(&self, n: usize, crc32: u32) -> Bytes {
        let mut out = BytesMut::new();
        if n + 1 < self.storages
            && let Some([slot, next]) = self.slots.get(self.first_storage + n..).and_then(pair)
        {
            slot.put_descriptor(&mut out, crc32);
            next.put_header(&mut out);
        }
        out.freeze()
    }

    /// Everything after the data of the last storage; `crc32s` has the CRC-32 of each storage.
    ///
    /// The serialization id has 40 digits. PyTorch derives it from a hash, and nothing checks it.
    /// Here it is the FNV-1a hash of the record names and of the CRCs, so equal contents give equal
    /// archives.
    #[must_use]
    pub fn tail(&self, crc32s: &[u32]) -> Bytes {
        let crc32_of = |slot: &Slot| match slot.content {
            Content::Pickle => crc32fast::hash(&self.pickle),
            Content::Fixed(bytes) => crc32fast::hash(bytes),
            Content::Storage(n) => crc32s.get(n).copied().unwrap_or(0),
            Content::SerializationId => 0,
        };
        let mut crcs: Vec<u32> = self.slots.iter().map(crc32_of).collect();
        let names = fnv1a_64(self.slots.iter().flat_map(|slot| slot.name.bytes()));
        let content = fnv1a_64(crcs.iter().flat_map(|crc| crc.to_le_bytes()));
        let serialization_id = format!("{names:020}{content:020}");

        let mut out = BytesMut::new();
        if let Some(last) = self.storages.checked_sub(1).map(|n| self.first_storage + n)
            && let (Some(slot), Some(crc)) = (self.slots.get(last), crcs.get(last))
        {
            slot.put_descriptor(&mut out, *crc);
        }
        let trailing = self.first_storage + self.storages;
        for (slot, crc) in self.slots.iter().zip(&mut crcs).skip(trailing) {
            let content = match slot.content {
                Content::Fixed(bytes) => bytes,
                _ => serialization_id.as_bytes(),
            };
            *crc = crc32fast::hash(content);
            slot.put_header(&mut out);
            out.put_slice(content);
            slot.put_descriptor(&mut out, *crc);
        }
        for (slot, crc) in self.slots.iter().zip(&crcs) {
            slot.put_central_entry(&mut out, *crc);
        }
        self.put_end(&mut out);
        out.freeze()
    }

    fn put_end(&self, out: &mut BytesMut) {
        const MADE_BY: u16 = 798;
        const NEEDED: u16 = 45;
        let entries = self.slots.len() as u64;
        out.put_u32_le(ZIP64_END);
        out.put_u64_le(ZIP64_END_LEN - 12);
        out.put_u16_le(MADE_BY);
        out.put_u16_le(NEEDED);
        out.put_u64_le(0);
        out.put_u64_le(entries);
        out.put_u64_le(entries);
        out.put_u64_le(self.directory_len);
        out.put_u64_le(self.directory_offset);
        out.put_u32_le(ZIP64_LOCATOR);
        out.put_u32_le(0);
        out.put_u64_le(self.directory_offset + self.directory_len);
        out.put_u32_le(1);
        let entries = u16::try_from(entries).unwrap_or(u16::MAX);
        out.put_u32_le(END);
        out.put_u32_le(0);
        out.put_u16_le(entries);
        out.put_u16_le(entries);
        out.put_u32_le(saturated(self.directory_len));
        out.put_u32_le(saturated(self.directory_offset));
        out.put_u16_le(0);
    }
}

impl Slot {
    fn is_large(&self) -> bool {
        self.byte_len >= ZIP64_FROM
    }

    fn is_far(&self) -> bool {
        self.header_offset >= ZIP64_FROM
    }

    /// Bit 3: a descriptor follows. Bit 11: the name is UTF-8. PyTorch writes no descriptor after
    /// an empty record.
    fn flags(&self) -> u16 {
        if self.byte_len == 0 { 0x0800 } else { 0x0808 }
    }

    /// The length of the zip64 field, equal in local header and central directory.
    fn zip64_len(&self) -> usize {
        match (self.is_large(), self.is_far()) {
            (false, false) => 0,
            (true, false) => 4 + 16,
            (false, true) => 4 + 8,
            (true, true) => 4 + 24,
        }
    }

    fn extra_len(&self) -> usize {
        self.zip64_len() + 4 + usize::from(self.padding)
    }

    /// Wraps only when [`Slot::span`] overflows.
    fn data_offset(&self) -> u64 {
        self.header_offset
            .wrapping_add(LOCAL_HEADER_LEN)
            .wrapping_add((self.name.len() + self.extra_len()) as u64)
    }

    fn descriptor_len(&self) -> u64 {
        match (self.byte_len, self.is_large() || self.is_far()) {
            (0, _) => 0,
            (_, false) => 16,
            (_, true) => 24,
        }
    }

    /// The length from the header to the end of the descriptor, in bytes.
    fn span(&self) -> Option<u64> {
        let header = LOCAL_HEADER_LEN + (self.name.len() + self.extra_len()) as u64;
        self.byte_len.checked_add(header + self.descriptor_len())
    }

    fn put_zip64(&self, out: &mut BytesMut, compressed_len: u64) {
        let len = self.zip64_len();
        if len == 0 {
            return;
        }
        out.put_u16_le(1);
        out.put_u16_le((len - 4) as u16);
        if self.is_large() {
            out.put_u64_le(self.byte_len);
            out.put_u64_le(compressed_len);
        }
        if self.is_far() {
            out.put_u64_le(self.header_offset);
        }
    }

    fn put_header(&self, out: &mut BytesMut) {
        out.put_u32_le(LOCAL_HEADER);
        out.put_u16_le(0);
        out.put_u16_le(self.flags());
        // Method, time, date, CRC and both sizes are in the descriptor and the directory.
        out.put_bytes(0, 18);
        out.put_u16_le(self.name.len() as u16);
        out.put_u16_le(self.extra_len() as u16);
        out.put_slice(self.name.as_bytes());
        self.put_zip64(out, 0);
        out.put_slice(b"FB");
        out.put_u16_le(self.padding);
        out.put_bytes(b'Z', usize::from(self.padding));
    }

    fn put_descriptor(&self, out: &mut BytesMut, crc32: u32) {
        match self.descriptor_len() {
            0 => {}
            16 => {
                out.put_u32_le(DESCRIPTOR);
                out.put_u32_le(crc32);
                out.put_u32_le(saturated(self.byte_len));
                out.put_u32_le(saturated(self.byte_len));
            }
            _ => {
                out.put_u32_le(DESCRIPTOR);
                out.put_u32_le(crc32);
                out.put_u64_le(self.byte_len);
                out.put_u64_le(self.byte_len);
            }
        }
    }

    fn put_central_entry(&self, out: &mut BytesMut, crc32: u32) {
        out.put_u32_le(CENTRAL_ENTRY);
        out.put_u32_le(0);
        out.put_u16_le(self.flags());
        out.put_bytes(0, 6);
        out.put_u32_le(crc32);
        out.put_u32_le(saturated(self.byte_len));
        out.put_u32_le(saturated(self.byte_len));
        out.put_u16_le(self.name.len() as u16);
        out.put_u16_le(self.zip64_len() as u16);
        out.put_bytes(0, 10);
        out.put_u32_le(saturated(self.header_offset));
        out.put_slice(self.name.as_bytes());
        self.put_zip64(out, self.byte_len);
    }
}

fn pair(slots: &[Slot]) -> Option<&[Slot; 2]> {
    slots.first_chunk()
}

/// The value, or the mark of a value in the zip64 field.
fn saturated(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn too_long() -> FormatError {
    FormatError::new("torch archive", "the records together exceed 2^64 bytes")
}
