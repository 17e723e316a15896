#![doc = include_str!("../README.md")]

mod checkpoint;
mod copies;
mod folder;
mod format;
mod framework;
mod leaves;
mod merge;
mod messages;
mod names;
mod optimizer;
mod parameters;
mod placement;
mod report;

mod units;

pub use checkpoint::RankCheckpoint;
pub use format::RankFilesFormat;
pub use framework::RankFiles;
pub use report::RankFilesReport;
