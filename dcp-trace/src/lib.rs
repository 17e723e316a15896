#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

pub mod event;
mod file;
mod operations;
mod recorder;
mod storage;
pub mod summary;

pub use event::TraceEvent;
pub use file::{Trace, TraceError};
pub use recorder::{TraceRecorder, TraceSpan, create_trace};
pub use summary::TraceSummary;
