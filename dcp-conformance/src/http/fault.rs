//! Faults of an HTTP connection, and which requests they hit.

use std::collections::HashMap;
use std::time::Duration;

use crate::numbers::Numbers;

/// A fault of the proxy in one request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpFault {
    /// Answers in place of the server, which does not see the request.
    Answer {
        /// The status.
        status: u16,
        /// Further headers.
        headers: Vec<(String, String)>,
        /// The body.
        body: String,
    },
    /// Resets the connection; the server does not see the request.
    Reset,
    /// Passes the request to the server, waits for its answer, and resets the connection: what a
    /// client cannot distinguish from [`Reset`](Self::Reset).
    LoseAnswer,
    /// Closes the connection after so many bytes of the answer's body. An answer whose body is not
    /// longer passes unharmed.
    Truncate {
        /// Bytes of the body that arrive.
        after: u64,
    },
    /// Takes bytes off the end of the answer's body, with a `Content-Length` that agrees with what
    /// is left. Only answers to `GET` have it.
    Shorten {
        /// Bytes that are missing, at most the whole body.
        by: u64,
    },
    /// Passes the request to the server, and never answers.
    Stall,
    /// Waits before the answer, and before each piece of its body.
    Slow {
        /// The length of the delay.
        delay: Duration,
    },
    /// Waits before the answer: a server that is far away.
    Delay {
        /// The length of the delay.
        delay: Duration,
    },
}

impl HttpFault {
    /// 500 `InternalError`, as S3 words it.
    #[must_use]
    pub fn internal_error() -> Self {
        Self::xml(500, "InternalError", "We encountered an internal error. Please try again.")
    }

    /// 503 `SlowDown`, as S3 words it.
    #[must_use]
    pub fn slow_down() -> Self {
        Self::xml(503, "SlowDown", "Please reduce your request rate.")
    }

    /// 429 with `Retry-After`, in seconds.
    #[must_use]
    pub fn too_many_requests(retry_after: u64) -> Self {
        let mut fault = Self::xml(429, "TooManyRequests", "Rate limit exceeded.");
        if let Self::Answer { headers, .. } = &mut fault {
            headers.push(("retry-after".to_owned(), retry_after.to_string()));
        }
        fault
    }

    /// 400 `ExpiredToken`, as S3 answers requests with credentials of a session that ended.
    #[must_use]
    pub fn expired_token() -> Self {
        Self::xml(400, "ExpiredToken", "The provided token has expired.")
    }

    /// An answer of S3 with an error code.
    #[must_use]
    pub fn xml(status: u16, code: &str, message: &str) -> Self {
        let body = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\
             <Error><Code>{code}</Code><Message>{message}</Message></Error>"
        );
        let headers = vec![("content-type".to_owned(), "application/xml".to_owned())];
        Self::Answer { status, headers, body }
    }
}

/// A fault of chosen requests.
///
/// "The third `PUT` is applied, and its answer is lost":
///
/// ```
/// use dcp_conformance::http::{FaultRule, HttpFault};
///
/// let rule = FaultRule::new(HttpFault::LoseAnswer).method("PUT").after(2).times(1);
/// ```
#[derive(Clone, Debug)]
pub struct FaultRule {
    fault: HttpFault,
    method: Option<String>,
    part_of_target: Option<String>,
    after: u64,
    times: u64,
}

impl FaultRule {
    /// A fault of every request.
    #[must_use]
    pub fn new(fault: HttpFault) -> Self {
        Self { fault, method: None, part_of_target: None, after: 0, times: u64::MAX }
    }

    /// Of requests with this method only.
    #[must_use]
    pub fn method(mut self, method: &str) -> Self {
        self.method = Some(method.to_owned());
        self
    }

    /// Of requests whose path and query have this text only.
    #[must_use]
    pub fn containing(mut self, text: &str) -> Self {
        self.part_of_target = Some(text.to_owned());
        self
    }

    /// Lets the first of these requests pass.
    #[must_use]
    pub fn after(mut self, requests: u64) -> Self {
        self.after = requests;
        self
    }

    /// Hits so many, and no more.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// The fault of this request, if it has one; counts it.
    pub(super) fn hit(&mut self, method: &str, target: &str) -> Option<HttpFault> {
        let is_meant = self.method.as_deref().is_none_or(|wanted| wanted == method)
            && self.part_of_target.as_deref().is_none_or(|part| target.contains(part));
        if !is_meant || self.times == 0 {
            return None;
        }
        if self.after > 0 {
            self.after -= 1;
            return None;
        }
        self.times -= 1;
        Some(self.fault.clone())
    }
}

/// Faults at points that a seed chooses.
///
/// Whether the first, second or third sending of a request has a fault, and which, depends on the
/// seed and on its method, path, query and range, and not on the order in which concurrent requests
/// arrive. Identifiers of uploads, which servers draw, are not part of that.
#[derive(Clone, Debug)]
pub struct SeededFaults {
    seed: u64,
    per_mille: u64,
    seen: HashMap<String, u64>,
}

impl SeededFaults {
    /// Faults in `per_mille` of 1000 requests.
    #[must_use]
    pub fn new(seed: u64, per_mille: u64) -> Self {
        Self { seed, per_mille, seen: HashMap::new() }
    }

    /// The fault of this request, if it has one; counts it.
    pub(super) fn hit(&mut self, method: &str, target: &str, range: &str) -> Option<HttpFault> {
        let request = format!("{method} {} {range}", without_upload(target));
        let seed = u64::from(crc32fast::hash(request.as_bytes())) << 32 ^ self.seed;
        let times = self.seen.entry(request).or_default();
        *times += 1;
        let mut numbers = Numbers(seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(*times));
        if numbers.below(1000) >= self.per_mille {
            return None;
        }
        Some(match numbers.below(16) {
            0..2 => HttpFault::internal_error(),
            2..4 => HttpFault::slow_down(),
            4 => HttpFault::too_many_requests(0),
            5..7 => HttpFault::Reset,
            7..10 => HttpFault::LoseAnswer,
            10..12 => HttpFault::Truncate { after: numbers.below(400) },
            12..14 => HttpFault::Shorten { by: 1 + numbers.below(64) },
            14 => HttpFault::Slow { delay: Duration::from_millis(1 + numbers.below(5)) },
            _ => HttpFault::Stall,
        })
    }
}

/// A path and query without the value of `uploadId`.
fn without_upload(target: &str) -> String {
    let Some((before, rest)) = target.split_once("uploadId=") else { return target.to_owned() };
    let after = rest.split_once('&').map_or("", |(_, after)| after);
    format!("{before}uploadId=&{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_hits_the_requests_that_it_names() {
        let rule = FaultRule::new(HttpFault::Reset);
        let mut rule = rule.method("PUT").containing("metadata").after(1).times(2);
        let mut hit = |method: &str, target: &str| rule.hit(method, target).is_some();
        assert!(!hit("GET", "/b/.metadata"));
        assert!(!hit("PUT", "/b/.metadata"), "the first passes");
        assert!(!hit("PUT", "/b/data"));
        assert!(hit("PUT", "/b/.metadata"));
        assert!(hit("PUT", "/b/.metadata?partNumber=2"));
        assert!(!hit("PUT", "/b/.metadata"), "it hits twice");
    }

    #[test]
    fn seeded_faults_do_not_depend_on_the_order_of_requests() {
        let targets: Vec<String> = (0..200).map(|n| format!("/bucket/key{n}")).collect();
        let faults = |targets: &[String], seed| {
            let mut seeded = SeededFaults::new(seed, 300);
            let hit = |target: &String| (target.clone(), seeded.hit("GET", target, ""));
            let mut faults: Vec<_> = targets.iter().map(hit).collect();
            faults.sort_by(|a, b| a.0.cmp(&b.0));
            faults
        };
        let reversed: Vec<String> = targets.iter().rev().cloned().collect();
        assert_eq!(faults(&targets, 7), faults(&reversed, 7));
        assert_ne!(faults(&targets, 7), faults(&targets, 8));
        let hits = faults(&targets, 7).iter().filter(|(_, fault)| fault.is_some()).count();
        assert!((20..120).contains(&hits), "{hits} of 200");
    }

    #[test]
    fn identifiers_of_uploads_change_nothing() {
        assert_eq!(
            without_upload("/b/k?partNumber=1&uploadId=a&x=1"),
            without_upload("/b/k?partNumber=1&uploadId=b&x=1")
        );
        assert_ne!(
            without_upload("/b/k?partNumber=1&uploadId=a"),
            without_upload("/b/k?partNumber=2&uploadId=a")
        );
    }
}
