//! Servers for tests of storages that speak HTTP: a proxy that injects faults, and a double of
//! Google Cloud Storage.
//!
//! Both listen at 127.0.0.1, at a port that the system chooses, on a thread of their own, and end
//! when they are dropped. Needs the feature `http`.

mod fault;
mod gcs;
mod proxy;
mod server;
mod traffic;

pub use fault::{FaultRule, HttpFault, SeededFaults};
pub use gcs::GcsDouble;
pub use proxy::FaultProxy;
pub use traffic::{HttpExchange, HttpTraffic};
