//! The zip container of `torch.save`: stored records, each aligned to 64 bytes.
//!
//! Every item of a `.distcp` file, and every `.pt` file since PyTorch 1.6, is such an archive.
//! [`ArchiveEncoder`] lays one out byte for byte as PyTorch does, in one pass, with its length
//! known before the first byte. [`ArchiveIndex`] finds records from the end of an archive, without
//! reading their data. Neither does I/O: the caller provides the bytes it has as a [`Sparse`], and
//! [`ParseStep`] returns the range to provide next.

mod directory;
mod encode;
mod inflate;
mod le;
mod partial;
mod record;
mod sparse;
mod structure;

pub use directory::{ArchiveEntry, ArchiveIndex, check_archive};
pub use encode::{ArchiveEncoder, RecordSet, StorageSlot};
pub use inflate::{INFLATED_MAX, Inflater};
pub use partial::PartialBlob;
pub use record::{Method, Record};
pub use sparse::{ParseStep, Sparse};

pub(crate) use directory::check_end;
pub(crate) use sparse::Halt;

/// The data of every record starts at a multiple of this, in bytes from the archive's start.
pub const ALIGNMENT: u64 = 64;

const LOCAL_HEADER: u32 = 0x0403_4b50;
const DESCRIPTOR: u32 = 0x0807_4b50;
const CENTRAL_ENTRY: u32 = 0x0201_4b50;
const ZIP64_END: u32 = 0x0606_4b50;
const ZIP64_LOCATOR: u32 = 0x0706_4b50;
const END: u32 = 0x0605_4b50;

const LOCAL_HEADER_LEN: u64 = 30;
const CENTRAL_ENTRY_LEN: u64 = 46;
const ZIP64_END_LEN: u64 = 56;
const ZIP64_LOCATOR_LEN: u64 = 20;
const END_LEN: u64 = 22;

/// Sizes and offsets from this value need zip64 fields.
const ZIP64_FROM: u64 = 0xffff_ffff;
