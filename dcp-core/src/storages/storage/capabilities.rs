//! The abilities of a storage, and the sizes that it prefers.

/// The abilities and preferences of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Objects can be written and deleted.
    pub writable: bool,
    /// [`Storage::list`](super::Storage::list) and
    /// [`list_folder`](super::Storage::list_folder) are supported. A web server has no listing.
    pub listable: bool,
    /// [`PutMode::Create`](super::PutMode::Create) and uploads are atomic among concurrent creators.
    pub atomic_create: bool,
    /// [`PutMode::Update`](super::PutMode::Update) is supported.
    pub conditional_put: bool,
    /// [`Storage::claim`](super::Storage::claim) is supported.
    pub claims: bool,
    /// Every [`ObjectMeta`](super::ObjectMeta) and read has a [`Version`](super::Version), and
    /// [`ReadRequest::if_version`](super::ReadRequest::if_version) is checked.
    pub versions: bool,
    /// Bytes that a successful call wrote survive a crash of the machine.
    pub durable: bool,
    /// [`Storage::list`](super::Storage::list) lists every object that
    /// [`Storage::stat`](super::Storage::stat) finds, so an unlisted object does not exist. On a
    /// file system, a link may lead to an unlisted file.
    pub complete_listing: bool,
    /// The cost of reading a range depends on its length, not on the object's.
    pub ranged_reads: bool,
    /// Ranges with a gap below this many bytes are cheaper to read as one.
    pub coalesce_gap: u64,
    /// Requests are system calls, which block a thread instead of waiting for an answer. They are made
    /// on the caller's thread within [`on_own_thread`](super::on_own_thread).
    pub blocking: bool,
    /// The number of requests to keep in flight.
    pub parallelism: u16,
    /// The sizes that writes may have.
    pub write_limits: WriteLimits,
}

impl Capabilities {
    /// The minimum that a storage must support: reading whole objects.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            writable: false,
            listable: false,
            atomic_create: false,
            conditional_put: false,
            claims: false,
            versions: false,
            durable: false,
            complete_listing: false,
            ranged_reads: false,
            coalesce_gap: 0,
            blocking: false,
            parallelism: 1,
            write_limits: WriteLimits::none(),
        }
    }
}

impl Default for Capabilities {
    fn default() -> Self {
        Self::none()
    }
}

/// The sizes that writes may have, in bytes.
///
/// Amazon S3, for one, takes objects of 5 TiB, in one request up to 5 GiB, or in 10 000 parts of
/// 5 MiB to 5 GiB, of which the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteLimits {
    /// The longest object.
    pub object_bytes_max: u64,
    /// The longest payload of [`Storage::put`](super::Storage::put).
    pub put_bytes_max: u64,
    /// The shortest part of an upload, except the last.
    pub part_bytes_min: u64,
    /// The longest part of an upload.
    pub part_bytes_max: u64,
    /// The largest number of parts of an upload.
    pub parts_max: u32,
    /// The length of a part that the storage writes fastest.
    pub part_bytes: u64,
}

impl WriteLimits {
    /// No limits, and parts of 16 MiB.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            object_bytes_max: u64::MAX,
            put_bytes_max: u64::MAX,
            part_bytes_min: 1,
            part_bytes_max: u64::MAX,
            parts_max: u32::MAX,
            part_bytes: 16 << 20,
        }
    }

    /// The length of each part, except the last, of an object of `byte_len` bytes: the preferred
    /// one; up to 1/64 more, in blocks of 4 KiB, when that saves a short last part, which is a request
    /// of its own; or more when the object would have too many parts. `None` when the object is too
    /// long for the storage.
    #[must_use]
    pub fn part_bytes_for(&self, byte_len: u64) -> Option<u64> {
        let needed = byte_len.div_ceil(u64::from(self.parts_max).max(1));
        let preferred = self.part_bytes.max(self.part_bytes_min).max(1);
        let longest = preferred.saturating_add(preferred / 64);
        let even = byte_len.div_ceil((byte_len / preferred).max(1));
        let even = even.checked_next_multiple_of(BLOCK_BYTES).filter(|even| *even <= longest);
        let part_bytes = preferred.max(even.unwrap_or(0)).max(needed);
        (byte_len <= self.object_bytes_max && needed <= self.part_bytes_max)
            .then(|| part_bytes.min(self.part_bytes_max))
    }
}

/// Parts begin at multiples of this, as far as the storage's own lengths do.
const BLOCK_BYTES: u64 = 4096;

impl Default for WriteLimits {
    fn default() -> Self {
        Self::none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_grow_with_the_object() {
        let mut limits = WriteLimits::none();
        assert_eq!(limits.part_bytes_for(0), Some(16 << 20));
        limits.parts_max = 10_000;
        limits.part_bytes_max = 5 << 30;
        limits.object_bytes_max = 5 << 40;
        assert_eq!(limits.part_bytes_for(16 << 20), Some(16 << 20));
        assert_eq!(limits.part_bytes_for(5 << 40), Some((5_u64 << 40).div_ceil(10_000)));
        assert_eq!(limits.part_bytes_for((5 << 40) + 1), None);
    }

    #[test]
    fn a_short_rest_is_divided_among_the_parts() {
        let part = 16 << 20;
        let parts_of = |byte_len: u64| {
            let part_bytes = WriteLimits::none().part_bytes_for(byte_len).unwrap();
            assert!(part_bytes >= part && part_bytes <= part + part / 64, "{part_bytes}");
            assert_eq!(part_bytes % 4096, 0);
            byte_len.div_ceil(part_bytes)
        };
        assert_eq!(parts_of(64 * part), 64);
        assert_eq!(parts_of(64 * part + 1), 64);
        assert_eq!(parts_of(64 * part + 63 * (part / 64)), 64);
        assert_eq!(parts_of(2 * part + part / 64), 2);
        assert_eq!(parts_of(2 * part + part / 8), 3, "it is not short");
    }
}
