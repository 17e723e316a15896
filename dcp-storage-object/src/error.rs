//! The meaning of a store's errors, without the secrets that they may contain.

use std::error::Error as _;
use std::fmt;

use dcp_core::error::StorageOp;
use dcp_core::text::{beginning, without_secrets};
use dcp_core::{Key, StorageError, StorageErrorKind as Kind};
use object_store::Error;

/// The longest text of a cause, in bytes. A proxy may answer with a page.
const CAUSE_MAX: usize = 1024;

/// Codes of S3, Google Cloud Storage and Azure, and their meanings.
const CODES: &[(Kind, &[&str])] = &[
    (Kind::NoBucket, &["NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"]),
    (
        Kind::Credentials,
        &[
            "ExpiredToken",
            "InvalidAccessKeyId",
            "InvalidToken",
            "TokenRefreshRequired",
            "SignatureDoesNotMatch",
            "RequestTimeTooSkewed",
            "RequestExpired",
            "AuthenticationFailed",
            "AuthenticationRequired",
            "NoAuthenticationInformation",
            "InvalidAuthenticationInfo",
            "InvalidSecurity",
        ],
    ),
    (
        Kind::Transient,
        &[
            "SlowDown",
            "InternalError",
            "ServiceUnavailable",
            "ServerBusy",
            "OperationTimedOut",
            "RequestTimeout",
            "ConditionalRequestConflict",
            "OperationAborted",
            "TooManyRequests",
        ],
    ),
    (Kind::Full, &["QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientStorage"]),
    (Kind::TooLarge, &["EntityTooLarge", "RequestBodyTooLarge", "BlockCountExceedsLimit"]),
    (Kind::Denied, &["AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch"]),
];

/// The error of this crate for a list that is no XML.
pub(crate) const INVALID_LIST: &str = "the list of uploads is not valid";

/// Hosts that only credentials come from.
const CREDENTIAL_HOSTS: &[&str] = &[
    "169.254.169.254",
    "169.254.170.",
    "metadata.google.internal",
    "login.microsoftonline",
    "oauth2.googleapis",
    "sts.amazonaws",
    "://sts.",
];

/// The failure of a request.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    /// The status of the HTTP response, if there was one.
    pub(crate) status: Option<u16>,
    /// The host and port to which there is no connection, if that is what failed.
    pub(crate) unreachable: Option<String>,
    cause: Cause,
}

/// The answer of the store, without secrets. The error of the store itself is not kept: its text
/// has the URL of the request.
#[derive(Clone, Debug)]
pub(crate) struct Cause(String);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Cause {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl Failure {
    /// A failure that this crate found itself.
    pub(crate) fn new(kind: Kind, cause: impl Into<String>) -> Self {
        Self { kind, status: None, unreachable: None, cause: Cause(cause.into()) }
    }

    /// Classifies the error of a request.
    pub(crate) fn of(op: StorageOp, error: &Error) -> Self {
        let text = error.to_string();
        let status = status_in(&text);
        let code = between(&text, "<Code>", "</Code>");
        let kind = kind_of(op, error, &text, status, code);
        let unreachable = is_not_connected(error).then(|| host_in(&text)).flatten();
        Self { kind, status, unreachable, cause: Cause(cause_of(&text, status, code)) }
    }

    /// Replaces the kind of the failure.
    pub(crate) fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Whether the request was refused because of a condition in it.
    pub(crate) fn is_condition(&self) -> bool {
        matches!(self.kind, Kind::AlreadyExists | Kind::Conflict | Kind::Changed)
    }

    /// The error of the operation, with what was being done: a range, or the number of attempts.
    pub(crate) fn into_error(self, op: StorageOp, key: Option<&Key>, doing: &str) -> StorageError {
        let error = StorageError::new(self.kind, op, key.cloned()).with_source(self.cause);
        if doing.is_empty() { error } else { error.with_message(doing) }
    }
}

fn kind_of(
    op: StorageOp,
    error: &Error,
    text: &str,
    status: Option<u16>,
    code: Option<&str>,
) -> Kind {
    let listed = |kinds: &[Kind]| {
        let found = CODES.iter().filter(|(kind, _)| kinds.contains(kind));
        found.into_iter().find_map(|(kind, codes)| {
            let is_it = |known: &&str| match code {
                Some(code) => code == *known,
                None => text.contains(*known),
            };
            codes.iter().any(is_it).then_some(*kind)
        })
    };
    match error {
        Error::NotFound { .. } => listed(&[Kind::NoBucket]).unwrap_or(Kind::NotFound),
        Error::AlreadyExists { .. } => {
            listed(&[Kind::Transient, Kind::NoBucket]).unwrap_or(Kind::AlreadyExists)
        }
        Error::Precondition { .. } | Error::NotModified { .. } => match op {
            StorageOp::Stat | StorageOp::Read => Kind::Changed,
            _ => Kind::Conflict,
        },
        Error::PermissionDenied { .. } => {
            listed(&[Kind::Credentials, Kind::Full]).unwrap_or(Kind::Denied)
        }
        Error::Unauthenticated { .. } => Kind::Credentials,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => Kind::Unsupported,
        Error::InvalidPath { .. } | Error::UnknownConfigurationKey { .. } => Kind::Invalid,
        _ if CREDENTIAL_HOSTS.iter().any(|host| text.contains(host)) => Kind::Credentials,
        _ => {
            let all = CODES.iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
            listed(&all).unwrap_or_else(|| match status {
                Some(404) => Kind::NotFound,
                Some(401) => Kind::Credentials,
                Some(403) => Kind::Denied,
                Some(413) => Kind::TooLarge,
                Some(507) => Kind::Full,
                Some(412) if matches!(op, StorageOp::Stat | StorageOp::Read) => Kind::Changed,
                Some(412) => Kind::Conflict,
                Some(408 | 425 | 429 | 500..) => Kind::Transient,
                Some(_) => Kind::Other,
                None if is_transport(error) || is_cut_list(text) => Kind::Transient,
                None => Kind::Other,
            })
        }
    }
}

/// Whether the connection failed, and not the request.
fn is_transport(error: &Error) -> bool {
    let mut next = error.source();
    while let Some(error) = next {
        #[cfg(feature = "net")]
        if let Some(error) = error.downcast_ref::<object_store::client::HttpError>() {
            return !error.source().is_some_and(|source| source.is::<crate::refused::Refused>());
        }
        if error.is::<std::io::Error>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// Whether there was no connection.
fn is_not_connected(error: &Error) -> bool {
    let mut next = error.source();
    while let Some(error) = next {
        #[cfg(feature = "net")]
        if let Some(error) = error.downcast_ref::<object_store::client::HttpError>() {
            return matches!(error.kind(), object_store::client::HttpErrorKind::Connect);
        }
        next = error.source();
    }
    false
}

/// The host and port of the URL in a text.
fn host_in(text: &str) -> Option<String> {
    let (_, url) = text.split_once("://")?;
    let end = url.find(['/', '?', '#', ' ', '"', ')']).unwrap_or(url.len());
    let authority = url.get(..end)?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    (!host.is_empty()).then(|| host.to_owned())
}

/// Whether a list ended too early, with a length that agrees with what is left of it.
fn is_cut_list(text: &str) -> bool {
    text.contains("invalid list response") || text.contains(INVALID_LIST)
}

fn status_in(text: &str) -> Option<u16> {
    let (_, after) = text.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

/// The status, the code and the message of a response, or the text as it is where there are none.
fn cause_of(text: &str, status: Option<u16>, code: Option<&str>) -> String {
    let message = between(text, "<Message>", "</Message>").unwrap_or_default();
    let retries = between(text, ", after ", " retries");
    let retries = retries.filter(|number| number.chars().all(|c| c.is_ascii_digit()));
    let mut shown = match (status, code) {
        (None, None) => without_secrets(text).into_owned(),
        (Some(status), None) => {
            let body = text.split_once("status code: ").map_or("", |(_, after)| after);
            // Pages of proxies are not messages.
            let body = body.get(3..).filter(|body| !body.contains('<')).unwrap_or_default();
            format!("HTTP status {status}{}", without_secrets(body.trim_end_matches([':', ' '])))
        }
        (status, Some(code)) => {
            let status = status.map(|status| format!("HTTP status {status}, ")).unwrap_or_default();
            format!("{status}{code}: {}", without_secrets(message))
        }
    };
    if let Some(number) = retries.filter(|_| status.is_some() || code.is_some()) {
        shown.push_str(&format!(", after {number} retries"));
    }
    if shown.len() > CAUSE_MAX {
        let len = beginning(&shown, CAUSE_MAX).len();
        shown.truncate(len);
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Error {
        Error::Generic { store: "S3", source: text.into() }
    }

    fn answer(status: &str, code: &str) -> Error {
        generic(&format!(
            "Error performing GET https://u:pw@b.example/k?X-Amz-Signature=5ec7e7 in 3ms, after 2 \
             retries, max_retries: 2, retry_timeout: 180s  - Server returned non-2xx status code: \
             {status}: <Error><Code>{code}</Code><Message>see https://x/?sig=5ec7e7</Message></Error>"
        ))
    }

    #[test]
    fn answers_of_providers_have_kinds() {
        for (status, code, kind) in [
            ("404 Not Found", "NoSuchBucket", Kind::NoBucket),
            ("404 Not Found", "ContainerNotFound", Kind::NoBucket),
            ("404 Not Found", "NoSuchKey", Kind::NotFound),
            ("400 Bad Request", "ExpiredToken", Kind::Credentials),
            ("403 Forbidden", "InvalidAccessKeyId", Kind::Credentials),
            ("403 Forbidden", "AccessDenied", Kind::Denied),
            ("401 Unauthorized", "Other", Kind::Credentials),
            ("503 Service Unavailable", "SlowDown", Kind::Transient),
            ("500 Internal Server Error", "Anything", Kind::Transient),
            ("429 Too Many Requests", "Anything", Kind::Transient),
            ("507 Insufficient Storage", "Anything", Kind::Full),
            ("413 Content Too Large", "EntityTooLarge", Kind::TooLarge),
            ("400 Bad Request", "Anything", Kind::Other),
        ] {
            let failure = Failure::of(StorageOp::Read, &answer(status, code));
            assert_eq!(failure.kind, kind, "{status} {code}");
            let error = failure.into_error(StorageOp::Read, None, "");
            let shown = format!("{error:?} {}", dcp_core::error::error_chain(&error));
            assert!(!shown.contains("5ec7e7") && !shown.contains("pw"), "{shown}");
            assert!(shown.contains(code) && shown.contains("after 2 retries"), "{shown}");
        }
    }

    #[test]
    fn a_failure_without_an_answer_shows_no_secret() {
        let text = "Error performing GET https://u:pw@host/k?token=5ec7e7 in 2ms - HTTP error: x";
        let failure = Failure::of(StorageOp::Stat, &generic(text));
        let shown = format!("{failure:?}");
        assert!(!shown.contains("pw@") && !shown.contains("5ec7e7"), "{shown}");
        assert!(shown.contains("…@host/k?…"), "{shown}");
    }

    #[test]
    fn a_conflict_of_concurrent_requests_is_repeated() {
        let text = "status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>";
        let error = Error::AlreadyExists { path: "k".into(), source: text.into() };
        assert_eq!(Failure::of(StorageOp::Put, &error).kind, Kind::Transient);
        let error = Error::AlreadyExists { path: "k".into(), source: "409".into() };
        assert_eq!(Failure::of(StorageOp::Put, &error).kind, Kind::AlreadyExists);
    }
}
