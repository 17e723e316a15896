//! A double of Google Cloud Storage.

mod objects;
mod xml;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, IF_MATCH, IF_NONE_MATCH,
    LAST_MODIFIED, RANGE,
};
use hyper::http::response::Builder;
use hyper::{Method, Request, Response, StatusCode};

use super::server::{Body, Connection, Handler, Server};
use super::traffic::{HttpExchange, HttpTraffic, Log};
use objects::{Failure, Object, Objects};

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
pub struct GcsDouble {
    state: Arc<State>,
    server: Server,
}

impl GcsDouble {
    /// Starts a server with these buckets, which are empty.
    ///
    /// # Errors
    ///
    /// No port to listen at.
    pub fn start(buckets: &[&str]) -> io::Result<Self> {
        let state = Arc::new(State {
            objects: Mutex::new(Objects::with_buckets(buckets)),
            log: Log::default(),
        });
        Ok(Self { server: Server::start(state.clone())?, state })
    }

    /// Its address, `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address())
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
        self.state.log.all()
    }

    /// The sum of [`exchanges`](Self::exchanges).
    #[must_use]
    pub fn traffic(&self) -> HttpTraffic {
        self.state.log.total()
    }

    /// Forgets the exchanges.
    pub fn clear(&self) {
        self.state.log.clear();
    }

    /// Uploads that are neither complete nor aborted.
    #[must_use]
    pub fn unfinished_uploads(&self) -> usize {
        self.state.objects().uploads()
    }
}

#[derive(Debug)]
struct State {
    objects: Mutex<Objects>,
    log: Log,
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
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let range = parts.headers.get(RANGE).and_then(|range| range.to_str().ok());
        let (method, range, sent_bytes) =
            (parts.method.to_string(), range.map(str::to_owned), body.len() as u64);
        let call = Call::new(parts.method, &parts.uri, parts.headers, body);
        let answer = call.run(&mut self.objects()).unwrap_or_else(|failure| call.failed(&failure));
        let (builder, body) = answer;
        let answer = builder
            .body(Full::new(body.clone()).map_err(|never| match never {}).boxed())
            .map_err(io::Error::other)?;
        self.log.begin(HttpExchange {
            method,
            target,
            range,
            status: Some(answer.status().as_u16()),
            sent_bytes,
            received_bytes: body.len() as u64,
            is_faulty: false,
        });
        Ok(answer)
    }
}

/// One request.
struct Call {
    method: Method,
    bucket: String,
    /// Empty for a request to the bucket.
    key: String,
    query: HashMap<String, String>,
    headers: HeaderMap,
    body: Bytes,
}

type Answer = Result<(Builder, Bytes), Failure>;

impl Call {
    fn new(method: Method, uri: &hyper::Uri, headers: HeaderMap, body: Bytes) -> Self {
        let path = percent_encoding::percent_decode_str(uri.path()).decode_utf8_lossy();
        let path = path.strip_prefix('/').unwrap_or(&path);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
        let query = query.into_owned().collect();
        Self { method, bucket: bucket.to_owned(), key: key.to_owned(), query, headers, body }
    }

    fn run(&self, objects: &mut Objects) -> Answer {
        let bucket = objects.bucket(&self.bucket)?;
        let (upload, part) = (self.query("uploadId"), self.query("partNumber"));
        match (self.method.as_str(), self.key.as_str(), upload) {
            ("GET", "", _) if self.query.contains_key("uploads") => {
                Ok((ok(), xml::uploads(&self.bucket, &bucket.list_uploads(self.query("prefix")))))
            }
            ("GET", "", _) => {
                let number = |text: &str| text.parse().map_err(|_| Failure::InvalidArgument);
                let most = self.query("max-keys").map(number).transpose()?.unwrap_or(1000);
                let after = self.query("continuation-token").or(self.query("start-after"));
                let prefix = self.query("prefix").unwrap_or_default();
                let page = bucket.list(prefix, self.query("delimiter"), after, most);
                Ok((ok(), xml::listing(&self.bucket, prefix, &page)))
            }
            ("GET" | "HEAD", _, _) => self.get(bucket.get(&self.key, self.query("generation"))?),
            ("PUT", _, Some(upload)) => {
                let number = part.and_then(|part| part.parse().ok());
                let number = number.filter(|part| (1..=10_000).contains(part));
                let number = number.ok_or(Failure::InvalidArgument)?;
                let etag = bucket.put_part(&self.key, upload, number, self.body.clone())?;
                Ok((ok().header(ETAG, etag), Bytes::new()))
            }
            ("PUT", _, None) => {
                let data = match self.header("x-goog-copy-source") {
                    None => self.body.clone(),
                    Some(source) => return self.copy(source, objects),
                };
                let put = bucket.put(&self.key, data, self.attributes(), self.generation()?)?;
                Ok((described(ok(), &put), Bytes::new()))
            }
            ("POST", _, None) if self.query.contains_key("uploads") => {
                let upload = bucket.start_upload(&self.key, self.attributes());
                Ok((ok(), xml::started(&self.bucket, &self.key, &upload)))
            }
            ("POST", _, Some(upload)) => {
                let parts = xml::parts(&self.body).ok_or(Failure::MalformedXml)?;
                let put = bucket.complete(&self.key, upload, &parts, self.generation()?)?;
                Ok((described(ok(), &put), xml::completed(&self.bucket, &self.key, &put.etag)))
            }
            ("DELETE", _, Some(upload)) => {
                bucket.abort(&self.key, upload)?;
                Ok((Response::builder().status(StatusCode::NO_CONTENT), Bytes::new()))
            }
            ("DELETE", _, None) => {
                bucket.delete(&self.key, self.generation()?)?;
                Ok((Response::builder().status(StatusCode::NO_CONTENT), Bytes::new()))
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
        let put = bucket.put(&self.key, data, attributes, self.generation()?)?;
        Ok((described(ok(), &put), xml::copied(&put)))
    }

    /// The headers that an object keeps.
    fn attributes(&self) -> HeaderMap {
        let kept = self.headers.iter().filter(|(name, _)| {
            name.as_str().starts_with("x-goog-meta-") || ATTRIBUTES.contains(&name.as_str())
        });
        kept.map(|(name, value)| (name.clone(), value.clone())).collect()
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
            return Ok((answer.status(StatusCode::NOT_MODIFIED), Bytes::new()));
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
        Ok((answer, if is_head { Bytes::new() } else { data }))
    }

    fn failed(&self, failure: &Failure) -> (Builder, Bytes) {
        let is_head = self.method == Method::HEAD;
        let body = if is_head { Bytes::new() } else { xml::failure(failure) };
        (Response::builder().status(failure.status()).header(CONTENT_TYPE, XML), body)
    }

    /// The generation that the object must have: zero for none.
    fn generation(&self) -> Result<Option<u64>, Failure> {
        let wanted = self.header("x-goog-if-generation-match");
        wanted.map(|wanted| wanted.parse().map_err(|_| Failure::InvalidArgument)).transpose()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn query(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }
}

const ATTRIBUTES: [&str; 6] = [
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "x-goog-storage-class",
];

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
