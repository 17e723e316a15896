//! The requests and bytes that went through a server.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// One request and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpExchange {
    /// `GET`, `PUT` and so on.
    pub method: String,
    /// Path and query, as the client sent them.
    pub target: String,
    /// The header `Range`, if there was one.
    pub range: Option<String>,
    /// The status of the answer that the client was sent; none if the connection was closed or
    /// kept waiting.
    pub status: Option<u16>,
    /// Bytes of the request's body.
    pub sent_bytes: u64,
    /// Bytes of the answer's body that were passed to the client.
    pub received_bytes: u64,
    /// Whether a fault was injected.
    pub is_faulty: bool,
}

/// Requests and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpTraffic {
    /// Requests that arrived.
    pub requests: u64,
    /// Bytes of their bodies.
    pub sent_bytes: u64,
    /// Bytes of the bodies of answers.
    pub received_bytes: u64,
    /// Requests that a fault was injected into.
    pub faults: u64,
}

/// Every exchange, in the order of requests.
#[derive(Debug, Default)]
pub(super) struct Log(Mutex<Vec<HttpExchange>>);

impl Log {
    fn exchanges(&self) -> MutexGuard<'_, Vec<HttpExchange>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, and returns its index.
    pub(super) fn begin(&self, exchange: HttpExchange) -> usize {
        let mut exchanges = self.exchanges();
        exchanges.push(exchange);
        exchanges.len() - 1
    }

    /// Changes a request that was added; after [`clear`](Self::clear), none.
    pub(super) fn update(&self, index: usize, change: impl FnOnce(&mut HttpExchange)) {
        if let Some(exchange) = self.exchanges().get_mut(index) {
            change(exchange);
        }
    }

    pub(super) fn all(&self) -> Vec<HttpExchange> {
        self.exchanges().clone()
    }

    pub(super) fn total(&self) -> HttpTraffic {
        let mut total = HttpTraffic::default();
        for exchange in self.exchanges().iter() {
            total.requests += 1;
            total.sent_bytes += exchange.sent_bytes;
            total.received_bytes += exchange.received_bytes;
            total.faults += u64::from(exchange.is_faulty);
        }
        total
    }

    pub(super) fn clear(&self) {
        self.exchanges().clear();
    }
}
