//! The suite for [`Storage`] and [`Upload`](dcp_core::storage::Upload).

mod claim;
mod leftovers;
mod list;
mod put;
mod read;
mod subject;
mod upload;
mod version;

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;

use dcp_core::Storage;
use dcp_core::storage::Capabilities;
use libtest_mimic::{Completion, Trial};

use crate::case::{CASE_TIMEOUT, Outcome, report, run_future, runtime};
use subject::Subject;

/// Runs the whole suite as a test binary; see [`trials`].
pub fn main<F, Fut>(name: &str, open: F) -> ExitCode
where
    F: FnOnce() -> Fut,
    Fut: Future<Output = Arc<dyn Storage>> + Send + 'static,
{
    crate::run(trials(name, open))
}

/// One trial per clause in the documentation of [`Storage`] and
/// [`Upload`](dcp_core::storage::Upload), named
/// `name::clause`.
///
/// `open` is called once, on a multi-threaded tokio runtime that lives as long as the process, and
/// panics if it cannot. Every clause works in a folder of its own, which no other clause and no
/// other run uses, and deletes what it wrote if it holds. So the suite can run on a storage that is
/// in use.
///
/// A clause that the storage's [`Capabilities`] exclude appears as ignored. All clauses write and
/// list.
///
/// # Panics
///
/// When `open` panics.
#[must_use]
pub fn trials<F, Fut>(name: &str, open: F) -> Vec<Trial>
where
    F: FnOnce() -> Fut,
    Fut: Future<Output = Arc<dyn Storage>> + Send + 'static,
{
    let future = {
        let _guard = runtime().enter();
        open()
    };
    let storage = runtime()
        .block_on(runtime().spawn(future))
        .unwrap_or_else(|error| panic!("cannot open the storage {name:?}: {error}"));
    CASES
        .iter()
        .flat_map(|cases| cases.iter())
        .map(|case| {
            let storage = Arc::clone(&storage);
            Trial::ignorable_test(format!("{name}::{}", case.name), move || {
                if let Some(missing) = case.needs.missing(storage.capabilities()) {
                    return Ok(Completion::ignored_with(format!("it has no {missing}")));
                }
                report(case.check(storage)).map(|()| Completion::Completed)
            })
            .with_kind("storage")
        })
        .collect()
}

const CASES: &[&[Case]] = &[
    put::CASES,
    read::CASES,
    version::CASES,
    upload::CASES,
    list::CASES,
    claim::CASES,
    leftovers::CASES,
];

type Checking = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A clause: its name, the capabilities it needs, and the test.
struct Case {
    name: &'static str,
    needs: Needs,
    run: fn(Subject) -> Checking,
}

#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    AtomicCreate,
    ConditionalPut,
    Claims,
    Versions,
}

impl Needs {
    fn missing(self, capabilities: Capabilities) -> Option<&'static str> {
        match self {
            _ if !capabilities.writable => Some("writable"),
            _ if !capabilities.listable => Some("listable"),
            Self::AtomicCreate if !capabilities.atomic_create => Some("atomic_create"),
            Self::ConditionalPut if !capabilities.conditional_put => Some("conditional_put"),
            Self::Versions if !capabilities.versions => Some("versions"),
            Self::Claims if !capabilities.claims => Some("claims"),
            _ => None,
        }
    }
}

impl Case {
    fn check(&self, storage: Arc<dyn Storage>) -> Outcome {
        let subject = Subject::new(storage, self.name)?;
        let run = self.run;
        run_future(CASE_TIMEOUT, async move {
            run(subject.clone()).await?;
            subject.clean().await
        })
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
