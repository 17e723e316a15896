//! What the tests of several crates use: a runtime, fixtures, checkpoints in memory, ranks as threads.
//!
//! It is not published; a crate names it by its path alone among its dev-dependencies, which `cargo
//! package` leaves out. A unit test inside of a crate may use what has no types of that crate, such as
//! [`block_on`]: it is compiled apart from the crate that this one depends on.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

mod counting_collective;
mod crash;
mod device;
mod folders;
mod loopback;
mod ranks;
mod stored;
mod torture;

pub use counting_collective::CountingCollective;
pub use crash::{Crashes, Disk, Loss, OnDisk, put_disk};
pub use device::{FakeDevice, Traffic};
pub use folders::{copy_folder, fixture, fixtures};
pub use loopback::{listener, loopback, reserved_port};
pub use ranks::{on_boxed_ranks, on_each, on_ranks, with_growing_deadline};
pub use stored::{get, in_memory, key, memory, names, put, put_folder};
pub use torture::{Tortured, torture_seeds};

/// Runs a future to its end on this thread, with timers.
#[track_caller]
pub fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
