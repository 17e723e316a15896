//! Checks that data is undamaged and safe: checksums, the index, Python callables.

pub(crate) mod archive_audit;
pub(crate) mod callables;
pub(crate) mod check;
pub(crate) mod checked_source;
pub(crate) mod incremental_crc;
pub(crate) mod problem;
pub(crate) mod record_audit;
pub(crate) mod refuse_damaged;
pub(crate) mod settle;
pub(crate) mod verify_report;

pub use crate::error::ForeignCallable;
pub use callables::{admit_callables, foreign_callables};
pub use checked_source::{CheckedSource, Verified};
pub use problem::{Problem, ProblemKind};
pub use verify_report::VerifyReport;
