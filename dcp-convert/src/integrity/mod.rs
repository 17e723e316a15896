//! Whether what is read is undamaged and safe: checksums, the index, what Python would run.

pub(crate) mod archive_audit;
pub(crate) mod callables;
pub(crate) mod check;
pub(crate) mod checked_source;
pub(crate) mod incremental_crc;
pub(crate) mod problem;
pub(crate) mod refuse_damaged;
pub(crate) mod torch_save_audit;
