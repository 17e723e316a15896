//! Servers for tests of storages that speak HTTP: a proxy that injects faults, and doubles of
//! Google Cloud Storage and, for benchmarks, of S3.
//!
//! They listen at 127.0.0.1, at a port that the system chooses, on a thread of their own, and end
//! when they are dropped. Needs the feature `http`.

mod double;
mod fault;
mod proxy;
mod server;
mod traffic;

pub use double::{GcsDouble, S3Double};
pub use fault::{FaultRule, HttpFault, SeededFaults};
pub use proxy::FaultProxy;
pub use traffic::{HttpExchange, HttpTraffic};
