//! Doubles of Google Cloud Storage and of S3, whose protocols are nearly the same.

mod content;
mod dialect;
mod objects;
mod xml;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use hyper::body::Incoming;
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, IF_MATCH, IF_NONE_MATCH,
    LAST_MODIFIED, RANGE,
};
use hyper::http::response::Builder;
use hyper::{Method, Request, Response, StatusCode};

use super::server::{Body, Connection, Handler, Server};
use super::traffic::{HttpExchange, HttpTraffic, Log};
use content::Content;
use dialect::Dialect;
use objects::{Condition, Failure, Object, Objects};

/// A server of the XML API of Google Cloud Storage, as the client of `object_store` uses it: put,
/// get, head and delete with ranges and conditions, listing with pages, copy, multipart uploads.
///
/// It holds objects in memory, in buckets that exist from the start. What it does not prove:
/// authentication (any credential is right), permissions, quotas and throttling, the limits of
/// names, of parts and of one write per object and second, storage classes, and whatever else the
/// real service does and its documentation of the XML API does not say. It is strongly consistent,
/// as the real one is documented to be.
///
/// The client needs its address and a service account without OAuth:
/// [`service_account`](Self::service_account).
#[derive(Debug)]
pub struct GcsDouble(Double);

impl GcsDouble {
    /// Starts a server with these buckets, which are empty.
    ///
    /// # Errors
    ///
    /// No port to listen at.
    pub fn start(buckets: &[&str]) -> io::Result<Self> {
        Double::start(buckets, Dialect::Gcs, Duration::ZERO).map(Self)
    }

    /// Its address, `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.0.endpoint()
    }

    /// The key of a service account, in JSON, that makes `object_store` send its requests to this
    /// server without a request for a token.
    #[must_use]
    pub fn service_account(&self) -> String {
        format!(
            "{{\"gcs_base_url\": \"{}\", \"disable_oauth\": true, \"client_email\": \"\", \
             \"private_key\": \"\", \"private_key_id\": \"\"}}",
            self.endpoint()
        )
    }

    /// Every request since the start or since [`clear`](Self::clear), in order of arrival.
    #[must_use]
    pub fn exchanges(&self) -> Vec<HttpExchange> {
        self.0.state.log.all()
    }

    /// The sum of [`exchanges`](Self::exchanges).
    #[must_use]
    pub fn traffic(&self) -> HttpTraffic {
        self.0.state.log.total()
    }

    /// Forgets the exchanges.
    pub fn clear(&self) {
        self.0.state.log.clear();
    }

    /// Uploads that are neither complete nor aborted.
    #[must_use]
    pub fn unfinished_uploads(&self) -> usize {
        self.0.state.objects().uploads()
    }
}

/// A server of S3's API for benchmarks: what `object_store` and botocore send for puts, ranges,
/// conditions, listings, copies, deletions and multipart uploads.
///
/// It holds objects in memory without copying what it receives, and answers requests side by side,
/// each after a delay, so that clients are measured and not the server. It has the limits of
/// [`GcsDouble`]. Tests of S3 use moto, which has more of S3's rules.
#[derive(Debug)]
pub struct S3Double(Double);

impl S3Double {
    /// Starts a server with these buckets, which are empty. It answers a request when `delay` has
    /// passed since all of it arrived.
    ///
    /// # Errors
    ///
    /// No port to listen at.
    pub fn start(buckets: &[&str], delay: Duration) -> io::Result<Self> {
        Double::start(buckets, Dialect::S3, delay).map(Self)
    }

    /// Its address, `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.0.endpoint()
    }

    /// Every request since the start or since [`clear`](Self::clear), in order of arrival.
    #[must_use]
    pub fn exchanges(&self) -> Vec<HttpExchange> {
        self.0.state.log.all()
    }

    /// The sum of [`exchanges`](Self::exchanges).
    #[must_use]
    pub fn traffic(&self) -> HttpTraffic {
        self.0.state.log.total()
    }

    /// Forgets the exchanges.
    pub fn clear(&self) {
        self.0.state.log.clear();
    }
}

/// A server of one of the two.
#[derive(Debug)]
struct Double {
    state: Arc<State>,
    server: Server,
}

impl Double {
    fn start(buckets: &[&str], dialect: Dialect, delay: Duration) -> io::Result<Self> {
        let state = Arc::new(State {
            objects: Mutex::new(Objects::with_buckets(buckets)),
            log: Log::default(),
            dialect,
            delay,
        });
        Ok(Self { server: Server::start(state.clone())?, state })
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.server.address())
    }
}

#[derive(Debug)]
struct State {
    objects: Mutex<Objects>,
    log: Log,
    dialect: Dialect,
    delay: Duration,
}

impl State {
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handler for State {
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        _: Connection,
    ) -> io::Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let body = Content::receive(body).await?;
        if !self.delay.is_zero() {
            tokio::time::sleep(self.delay).await;
        }
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let range = parts.headers.get(RANGE).and_then(|range| range.to_str().ok());
        let (method, range, sent_bytes) =
            (parts.method.to_string(), range.map(str::to_owned), body.len() as u64);
        let call = Call::new(self.dialect, parts.method, &parts.uri, parts.headers, body);
        let answer = call.run(&mut self.objects()).unwrap_or_else(|failure| call.failed(&failure));
        let (builder, body) = answer;
        let received_bytes = body.len() as u64;
        let answer = builder.body(body.into_body()).map_err(io::Error::other)?;
        self.log.begin(HttpExchange {
            method,
            target,
            range,
            status: Some(answer.status().as_u16()),
            sent_bytes,
            received_bytes,
            is_faulty: false,
        });
        Ok(answer)
    }
}

/// One request.
struct Call {
    dialect: Dialect,
    method: Method,
    bucket: String,
    /// Empty for a request to the bucket.
    key: String,
    query: HashMap<String, String>,
    headers: HeaderMap,
    body: Content,
}

type Answer = Result<(Builder, Content), Failure>;

impl Call {
    fn new(
        dialect: Dialect,
        method: Method,
        uri: &hyper::Uri,
        headers: HeaderMap,
        body: Content,
    ) -> Self {
        let path = percent_encoding::percent_decode_str(uri.path()).decode_utf8_lossy();
        let path = path.strip_prefix('/').unwrap_or(&path);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        let query = query.into_owned().collect();
        let (bucket, key) = (bucket.to_owned(), key.to_owned());
        Self { dialect, method, bucket, key, query, headers, body }
    }

    fn run(&self, objects: &mut Objects) -> Answer {
        let bucket = objects.bucket(&self.bucket)?;
        let (upload, part) = (self.query("uploadId"), self.query("partNumber"));
        match (self.method.as_str(), self.key.as_str(), upload) {
            ("GET", "", _) if self.query.contains_key("uploads") => {
                let uploads = bucket.list_uploads(self.query("prefix"));
                Ok((ok(), xml::uploads(&self.bucket, &uploads).into()))
            }
            ("GET", "", _) => {
                let number = |text: &str| text.parse().map_err(|_| Failure::InvalidArgument);
                let most = self.query("max-keys").map(number).transpose()?.unwrap_or(1000);
                let after = self.query("continuation-token").or(self.query("start-after"));
                let prefix = self.query("prefix").unwrap_or_default();
                let page = bucket.list(prefix, self.query("delimiter"), after, most);
                Ok((ok(), xml::listing(&self.bucket, prefix, &page).into()))
            }
            ("HEAD", "", _) => Ok((ok(), Content::default())),
            ("GET" | "HEAD", _, _) => self.get(bucket.get(&self.key, self.query("generation"))?),
            ("PUT", _, Some(upload)) => {
                let number = part.and_then(|part| part.parse().ok());
                let number = number.filter(|part| (1..=10_000).contains(part));
                let number = number.ok_or(Failure::InvalidArgument)?;
                let etag = bucket.put_part(&self.key, upload, number, self.body.clone())?;
                Ok((ok().header(ETAG, etag), Content::default()))
            }
            ("PUT", _, None) => {
                let data = match self.header(self.dialect.copy_source()) {
                    None => self.body.clone(),
                    Some(source) => return self.copy(source, objects),
                };
                let put = bucket.put(&self.key, data, self.attributes(), &self.condition()?)?;
                Ok((described(ok(), &put), Content::default()))
            }
            ("POST", "", _) if self.query.contains_key("delete") => {
                let keys = xml::keys(&self.body.to_bytes()).ok_or(Failure::MalformedXml)?;
                for key in &keys {
                    // A missing object counts as deleted.
                    let _ = bucket.delete(key, &Condition::None);
                }
                Ok((ok(), xml::deleted(&keys).into()))
            }
            ("POST", _, None) if self.query.contains_key("uploads") => {
                let upload = bucket.start_upload(&self.key, self.attributes());
                Ok((ok(), xml::started(&self.bucket, &self.key, &upload).into()))
            }
            ("POST", _, Some(upload)) => {
                let parts = xml::parts(&self.body.to_bytes()).ok_or(Failure::MalformedXml)?;
                let put = bucket.complete(&self.key, upload, &parts, &self.condition()?)?;
                let answer = xml::completed(&self.bucket, &self.key, &put.etag);
                Ok((described(ok(), &put), answer.into()))
            }
            ("DELETE", _, Some(upload)) => {
                bucket.abort(&self.key, upload)?;
                Ok((Response::builder().status(StatusCode::NO_CONTENT), Content::default()))
            }
            ("DELETE", _, None) => {
                match bucket.delete(&self.key, &self.condition()?) {
                    Err(Failure::NoSuchKey) if self.dialect == Dialect::S3 => {}
                    deleted => deleted?,
                }
                Ok((Response::builder().status(StatusCode::NO_CONTENT), Content::default()))
            }
            _ => Err(Failure::MethodNotAllowed),
        }
    }

    fn copy(&self, source: &str, objects: &mut Objects) -> Answer {
        let source = percent_encoding::percent_decode_str(source).decode_utf8_lossy();
        let source = source.strip_prefix('/').unwrap_or(&source);
        let (bucket, key) = source.split_once('/').ok_or(Failure::InvalidArgument)?;
        let Object { data, attributes, .. } = objects.bucket(bucket)?.get(key, None)?.clone();
        let bucket = objects.bucket(&self.bucket)?;
        let put = bucket.put(&self.key, data, attributes, &self.condition()?)?;
        Ok((described(ok(), &put), xml::copied(&put).into()))
    }

    /// The headers that an object keeps.
    fn attributes(&self) -> HeaderMap {
        let kept = self.headers.iter().filter(|(name, _)| self.dialect.is_kept(name.as_str()));
        kept.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Returns the condition of a write on the object that is there.
    fn condition(&self) -> Result<Condition, Failure> {
        self.dialect.condition(|name| self.header(name))
    }

    /// Answers `GET` and `HEAD` of an object.
    fn get(&self, object: &Object) -> Answer {
        if self.header(IF_MATCH.as_str()).is_some_and(|wanted| wanted != object.etag) {
            return Err(Failure::PreconditionFailed);
        }
        let mut answer = described(Response::builder(), object);
        for (name, value) in &object.attributes {
            answer = answer.header(name, value);
        }
        if self.header(IF_NONE_MATCH.as_str()) == Some(object.etag.as_str()) {
            return Ok((answer.status(StatusCode::NOT_MODIFIED), Content::default()));
        }
        let length = object.data.len();
        let range = self.header(RANGE.as_str()).and_then(|range| range_of(range, length));
        let (status, data) = match range {
            None => (StatusCode::OK, object.data.clone()),
            Some(None) => return Err(Failure::InvalidRange),
            Some(Some((start, end))) => {
                (StatusCode::PARTIAL_CONTENT, object.data.slice(start..end))
            }
        };
        let mut answer = answer.status(status).header(CONTENT_LENGTH, data.len());
        if let Some(Some((start, end))) = range {
            answer = answer.header(CONTENT_RANGE, format!("bytes {start}-{}/{length}", end - 1));
        }
        let is_head = self.method == Method::HEAD;
        Ok((answer, if is_head { Content::default() } else { data }))
    }

    fn failed(&self, failure: &Failure) -> (Builder, Content) {
        let is_head = self.method == Method::HEAD;
        let body = if is_head { Content::default() } else { xml::failure(failure).into() };
        (Response::builder().status(failure.status()).header(CONTENT_TYPE, XML), body)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn query(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }
}

const XML: &str = "application/xml; charset=UTF-8";

fn ok() -> Builder {
    Response::builder().header(CONTENT_TYPE, XML)
}

fn described(answer: Builder, object: &Object) -> Builder {
    answer
        .header(ETAG, &object.etag)
        .header("x-goog-generation", object.generation)
        .header(LAST_MODIFIED, httpdate::fmt_http_date(object.modified))
}

/// The range of a header `Range`: the first byte, and one behind the last. The outer `None` is a
/// header that is not understood, the inner one a range outside the object.
fn range_of(range: &str, length: usize) -> Option<Option<(usize, usize)>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    if first.is_empty() {
        let suffix: usize = last.parse().ok()?;
        let start = length.saturating_sub(suffix);
        return Some((start < length).then_some((start, length)));
    }
    let start: usize = first.parse().ok()?;
    let end = if last.is_empty() { length } else { last.parse::<usize>().ok()?.checked_add(1)? };
    Some((start < length.min(end)).then_some((start, end.min(length))))
}

/// The time of an answer.
fn now() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_at_the_end_of_the_object() {
        assert_eq!(range_of("bytes=0-3", 10), Some(Some((0, 4))));
        assert_eq!(range_of("bytes=8-30", 10), Some(Some((8, 10))));
        assert_eq!(range_of("bytes=8-", 10), Some(Some((8, 10))));
        assert_eq!(range_of("bytes=-3", 10), Some(Some((7, 10))));
        assert_eq!(range_of("bytes=-30", 10), Some(Some((0, 10))));
        assert_eq!(range_of("bytes=10-12", 10), Some(None), "past the end");
        assert_eq!(range_of("bytes=0-0", 0), Some(None));
        assert_eq!(range_of("lines=1-2", 10), None);
    }
}
