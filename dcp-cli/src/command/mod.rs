//! One function a command: open, do the job in `dcp::checkpoint`, print.

mod arch;
mod average;
mod completions;
mod convert;
mod copy;
mod diff;
mod get;
mod inspect;
mod ls;
mod man;
mod merge;
mod prune;
mod report;
mod reshard;
mod rewrite_metadata;
mod stats;
mod unshard;
mod verify;

pub(crate) use arch::{Arch, arch};
pub(crate) use average::{Average, average};
pub(crate) use completions::{Completions, completions};
pub(crate) use convert::{Convert, convert};
pub(crate) use copy::{Copy, copy};
pub(crate) use diff::{Diff, diff};
pub(crate) use get::{Get, get};
pub(crate) use inspect::{Inspect, inspect};
pub(crate) use ls::{Ls, ls};
pub(crate) use man::{ManPages, man};
pub(crate) use merge::{Merge, merge};
pub(crate) use prune::{Prune, prune};
pub(crate) use report::{Report, report};
pub(crate) use reshard::{Reshard, reshard};
pub(crate) use rewrite_metadata::{RewriteMetadata, rewrite_metadata};
pub(crate) use stats::{Stats, stats};
pub(crate) use unshard::{Unshard, unshard};
pub(crate) use verify::{Verify, verify};
