//! The result of verifying a checkpoint, to which a framework adds.

use serde::Serialize;

use crate::error::ForeignCallable;
use crate::integrity::archive_audit::Checked;
use crate::integrity::problem::{Problem, ProblemKind};

/// The result of verifying a checkpoint. Serialized, it is the output of `dcp verify --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Whether there are no problems.
    pub ok: bool,
    /// Whether stored bytes were compared with their checksums, or only the index with the lengths
    /// of files.
    pub deep: bool,
    /// The format, such as `torch_dcp`.
    pub format: String,
    /// Tensors in the index.
    pub tensors: usize,
    /// Objects in the index.
    pub objects: usize,
    /// Files that the index refers to.
    pub files: usize,
    /// Stored bytes that were read and are undamaged.
    pub bytes_checked: u64,
    /// The problems.
    pub problems: Vec<Problem>,
    /// Observations that are not problems.
    pub notes: Vec<String>,
}

impl VerifyReport {
    /// The first problem of what the format of the checkpoint reads; `None` where that is whole, whatever other files
    /// in its folder are.
    #[must_use]
    pub fn damage(&self) -> Option<&Problem> {
        self.problems.iter().find(|problem| problem.kind.is_damage())
    }

    /// Adds what a part of a deep check found.
    pub(crate) fn add(&mut self, checked: Checked) {
        self.bytes_checked = self.bytes_checked.saturating_add(checked.bytes);
        self.problems.extend(checked.problems);
    }

    /// Adds the Python callables of the checkpoint, or of its file `file`: those that run commands
    /// or code as problems, unknown ones as a note.
    pub fn judge_callables(&mut self, found: Vec<ForeignCallable>, file: Option<&str>) {
        for one in found {
            let place = file.map_or_else(String::new, |file| format!(" of {file}"));
            let message = format!("{one}{place}: Python runs it when it loads the checkpoint");
            if !one.dangerous {
                self.notes.push(format!("{message}, and nothing is known of it"));
                continue;
            }
            let mut problem = Problem::new(ProblemKind::Callable, message);
            (problem.key, problem.file) = (one.key, file.map(ToOwned::to_owned));
            self.problems.push(problem);
        }
        self.ok = self.problems.is_empty();
    }
}
