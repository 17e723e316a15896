//! The suite for checkpoint formats: [`CheckpointFormat`](dcp_core::format::CheckpointFormat) with
//! its [`StorageReader`](dcp_core::StorageReader) and, if it has them, its
//! [`CheckpointAudit`](dcp_core::format::CheckpointAudit),
//! [`CheckpointTarget`](dcp_core::format::CheckpointTarget) and
//! [`StorageWriter`](dcp_core::StorageWriter).
//!
//! If the format has a writer, the suite saves a state of two ranks with it: sharded and replicated
//! tensors of several dtypes, one without elements, one without axes, and objects. For a format
//! without a writer, the author fills the storage.

mod audit;
mod load;
mod read;
mod recognize;
mod sample;
mod subject;
mod target;
mod write;

use std::pin::Pin;
use std::process::ExitCode;

use libtest_mimic::{Completion, Trial};

use crate::case::{CASE_TIMEOUT, Outcome, report, run_future};

pub use sample::{Sample, SampleTensor};
pub use subject::{BoxError, Subject};

/// Runs the whole suite as a test binary; see [`trials`].
///
/// ```no_run
/// # use std::sync::Arc;
/// # use dcp_core::format::CheckpointFormat;
/// # use dcp_core::{Storage, StorageWriter};
/// # type Toy = fn(Arc<dyn Storage>, bool) -> Arc<dyn StorageWriter>;
/// # fn main_of(toy: Arc<dyn CheckpointFormat>, writer: Toy) -> std::process::ExitCode {
/// use dcp_conformance::format::{self, Subject};
///
/// let subject = Subject::with_writer(toy, move |storage, overwrite| writer(storage, overwrite));
/// format::main("toy", subject.without_objects())
/// # }
/// ```
pub fn main(name: &str, subject: Subject) -> ExitCode {
    crate::run(trials(name, subject))
}

/// One trial per clause, named `name::clause`. A clause that the subject excludes appears as
/// ignored.
#[must_use]
pub fn trials(name: &str, subject: Subject) -> Vec<Trial> {
    let trial = |case: &'static Case| {
        let subject = subject.clone();
        Trial::ignorable_test(format!("{name}::{}", case.name), move || {
            if let Some(missing) = case.needs.missing(&subject) {
                return Ok(Completion::ignored_with(missing));
            }
            report(case.check(subject)).map(|()| Completion::Completed)
        })
        .with_kind("format")
    };
    CASES.iter().flat_map(|cases| cases.iter()).map(trial).collect()
}

const CASES: &[&[Case]] =
    &[recognize::CASES, read::CASES, audit::CASES, write::CASES, target::CASES];

type Checking = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A clause: its name, the features it needs, and the test.
struct Case {
    name: &'static str,
    needs: Needs,
    run: fn(Subject) -> Checking,
}

#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    Folder,
    File,
    Objects,
    Checksums,
    IndexChecksum,
    Writer,
    Target,
}

impl Needs {
    fn missing(self, subject: &Subject) -> Option<&'static str> {
        let (is_there, missing) = match self {
            Self::Nothing => return None,
            Self::Folder => (subject.file().is_none(), "its checkpoints are single files"),
            Self::File => (subject.file().is_some(), "its checkpoints are folders"),
            Self::Objects => (subject.features.objects, "it stores no objects"),
            Self::Checksums => (subject.features.checksums, "it has no checksums"),
            Self::IndexChecksum => (subject.features.index_checksum, "its index has no checksum"),
            Self::Writer => (subject.has_writer(), "it has no writer"),
            Self::Target => (subject.format().target().is_some(), "it is not a target"),
        };
        (!is_there).then_some(missing)
    }
}

impl Case {
    fn check(&self, subject: Subject) -> Outcome {
        run_future(CASE_TIMEOUT, (self.run)(subject))
    }
}

/// Turns the functions of a module into clauses.
macro_rules! clauses {
    ($($name:ident $(if $needs:ident)?),+ $(,)?) => {
        pub(super) const CASES: &[super::Case] = &[$(super::Case {
            name: stringify!($name),
            needs: super::clauses!(@needs $($needs)?),
            run: |subject| Box::pin($name(subject)),
        }),+];
    };
    (@needs) => { super::Needs::Nothing };
    (@needs $needs:ident) => { super::Needs::$needs };
}
use clauses;

#[cfg(test)]
mod tests;
