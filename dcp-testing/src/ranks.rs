//! Ranks as threads of this process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp_collectives::LocalGroup;
use dcp_core::Collective;

/// Far more than any test takes.
const PATIENT: Duration = Duration::from_secs(120);

/// Runs `main` on a thread for each member of a group, and returns their results in rank order.
///
/// # Panics
///
/// When a thread does.
pub fn on_each<C: Send, T: Send>(group: Vec<C>, main: impl Fn(C) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let main = &main;
        let threads: Vec<_> =
            group.into_iter().map(|member| scope.spawn(move || main(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `main` on `n` threads that form a group, and returns their results in rank order.
///
/// # Panics
///
/// When a thread does.
pub fn on_ranks<T: Send>(n: u32, main: impl Fn(u32, Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    on_boxed_ranks(n, |rank, collective| main(rank, collective.into()))
}

/// Like [`on_ranks`], with collectives that a decorator can own.
///
/// # Panics
///
/// When a thread does.
pub fn on_boxed_ranks<T: Send>(
    n: u32,
    main: impl Fn(u32, Box<dyn Collective>) -> T + Sync,
) -> Vec<T> {
    let group = LocalGroup::new(n).deadline(PATIENT).build();
    on_each(group, |collective| main(collective.rank(), Box::new(collective)))
}

/// Runs a test that waits until a deadline is over. On a busy machine a short one can be over too
/// soon, so a test that fails runs again with longer ones.
///
/// # Panics
///
/// When the test does with a deadline that is long on any machine.
pub fn with_growing_deadline(first: Duration, test: impl Fn(Duration)) {
    let mut deadline = first;
    while let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(deadline))) {
        if deadline > Duration::from_secs(30) {
            resume_unwind(panic);
        }
        deadline *= 8;
    }
}
