//! A proxy that breaks what it passes on.

use std::future::{self, Future};
use std::io;
use std::pin::Pin;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_LENGTH, HeaderValue, RANGE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::fault::{FaultRule, HttpFault, SeededFaults};
use super::server::{Body, Connection, Handler, Server};
use super::traffic::{HttpExchange, HttpTraffic, Log};

/// An HTTP/1.1 proxy in front of a server, which injects faults and counts requests and bytes.
///
/// It passes requests on as they are, the header `Host` included, so that signed requests stay
/// valid. Without a rule and a seed it changes nothing. Dropping it closes its connections.
///
/// ```no_run
/// use dcp_conformance::http::{FaultProxy, FaultRule, HttpFault};
///
/// # fn main() -> std::io::Result<()> {
/// let proxy = FaultProxy::start("http://127.0.0.1:9000")?;
/// proxy.add(FaultRule::new(HttpFault::LoseAnswer).method("PUT").containing(".metadata").times(1));
/// let endpoint = proxy.endpoint();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FaultProxy {
    proxy: Arc<Proxy>,
    server: Server,
}

impl FaultProxy {
    /// Starts a proxy of a server, whose address is written `http://HOST:PORT`.
    ///
    /// # Errors
    ///
    /// An address of another form; no port to listen at.
    pub fn start(upstream: &str) -> io::Result<Self> {
        let address = upstream.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let address = address.filter(|address| !address.contains('/')).ok_or_else(|| {
            let message = "the address of a server is written http://HOST:PORT";
            io::Error::new(io::ErrorKind::InvalidInput, message)
        })?;
        let upstream = address.to_owned();
        let proxy = Arc::new(Proxy {
            upstream,
            faults: Mutex::default(),
            stalled: Condvar::new(),
            log: Log::default(),
        });
        Ok(Self { server: Server::start(proxy.clone())?, proxy })
    }

    /// Its own address, `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address())
    }

    /// Adds a rule. Of several that hit a request, the first one counts.
    pub fn add(&self, rule: FaultRule) {
        self.proxy.faults().rules.push(rule);
    }

    /// Injects faults at points that a seed chooses into requests that no rule hits, or stops that.
    pub fn set_seeded(&self, faults: Option<SeededFaults>) {
        self.proxy.faults().seeded = faults;
    }

    /// Removes all rules, and stops seeded faults.
    pub fn calm(&self) {
        let mut faults = self.proxy.faults();
        *faults = Faults { calmed: faults.calmed + 1, ..Faults::default() };
        drop(faults);
        self.proxy.stalled.notify_all();
    }

    /// Waits until a request is stalled, which the server has answered. False where
    /// [`calm`](Self::calm) was called first, by which a test ends the wait when the client has ended.
    #[must_use]
    pub fn wait_for_stall(&self) -> bool {
        let faults = self.proxy.faults();
        let calmed = faults.calmed;
        let is_free = |faults: &mut Faults| !faults.is_stalled && faults.calmed == calmed;
        let faults = self.proxy.stalled.wait_while(faults, is_free);
        faults.unwrap_or_else(PoisonError::into_inner).calmed == calmed
    }

    /// Kills a process when a request of it is stalled, and waits for its end. Its standard output is a
    /// pipe, by which its end is noticed: false where it ended before. Then the proxy is
    /// [calm](Self::calm).
    ///
    /// # Errors
    ///
    /// When its standard output is no pipe, and when it cannot be killed.
    pub fn kill_when_stalled(&self, child: &mut Child) -> io::Result<bool> {
        let mut output = child.stdout.take().ok_or(io::ErrorKind::InvalidInput)?;
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let read = io::copy(&mut output, &mut io::sink());
                self.calm();
                read
            });
            let is_stalled = self.wait_for_stall();
            child.kill()?;
            child.wait()?;
            // A read of a pipe ends with the process that writes to it.
            drop(reading.join());
            Ok(is_stalled)
        })
    }

    /// Every request since the start or since [`clear`](Self::clear), in order of arrival.
    #[must_use]
    pub fn exchanges(&self) -> Vec<HttpExchange> {
        self.proxy.log.all()
    }

    /// The sum of [`exchanges`](Self::exchanges).
    #[must_use]
    pub fn traffic(&self) -> HttpTraffic {
        self.proxy.log.total()
    }

    /// Forgets the exchanges.
    pub fn clear(&self) {
        self.proxy.log.clear();
    }
}

#[derive(Debug, Default)]
struct Faults {
    rules: Vec<FaultRule>,
    seeded: Option<SeededFaults>,
    /// Whether a request was stalled since the last [`FaultProxy::calm`].
    is_stalled: bool,
    /// The number of calls of [`FaultProxy::calm`].
    calmed: u64,
}

impl Faults {
    fn hit(&mut self, method: &str, target: &str, range: &str) -> Option<HttpFault> {
        let by_rule = self.rules.iter_mut().find_map(|rule| rule.hit(method, target));
        by_rule.or_else(|| self.seeded.as_mut()?.hit(method, target, range))
    }
}

#[derive(Debug)]
struct Proxy {
    upstream: String,
    faults: Mutex<Faults>,
    /// Notified when a request is stalled, and when the proxy is calmed.
    stalled: Condvar,
    log: Log,
}

impl Proxy {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request to the server.
    async fn forward(&self, request: Request<Full<Bytes>>) -> io::Result<Response<Incoming>> {
        let stream = TcpStream::connect(&self.upstream).await?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(io::Error::other)
    }
}

impl Handler for Proxy {
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: Connection,
    ) -> io::Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let range = parts.headers.get(RANGE).and_then(|range| range.to_str().ok());
        let fault = self.faults().hit(parts.method.as_str(), &target, range.unwrap_or_default());
        let index = self.log.begin(HttpExchange {
            method: parts.method.to_string(),
            target,
            range: range.map(str::to_owned),
            status: None,
            sent_bytes: 0,
            received_bytes: 0,
            is_faulty: fault.is_some(),
        });
        // Always read to its end: a client that is still sending would see a reset first.
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        self.log.update(index, |exchange| exchange.sent_bytes = body.len() as u64);
        let is_get = parts.method == Method::GET;
        let request = Request::from_parts(parts, Full::new(body));
        let (mut passed, mut delay) = (u64::MAX, None);
        let mut shorter_by = 0;
        match fault {
            None => {}
            Some(HttpFault::Answer { status, headers, body }) => {
                let answer = made(status, &headers, body)?;
                self.log.update(index, |exchange| exchange.status = Some(status));
                return Ok(answer);
            }
            Some(HttpFault::Reset) => return reset(&connection),
            Some(HttpFault::LoseAnswer) => {
                // The server has done its work when the whole answer is there.
                self.forward(request)
                    .await?
                    .into_body()
                    .collect()
                    .await
                    .map_err(io::Error::other)?;
                return reset(&connection);
            }
            Some(HttpFault::Stall) => {
                self.forward(request)
                    .await?
                    .into_body()
                    .collect()
                    .await
                    .map_err(io::Error::other)?;
                self.faults().is_stalled = true;
                self.stalled.notify_all();
                // Ends when the client closes the connection.
                return future::pending().await;
            }
            Some(HttpFault::Truncate { after }) => passed = after,
            Some(HttpFault::Shorten { by }) if is_get => shorter_by = by,
            Some(HttpFault::Shorten { .. }) => {}
            Some(HttpFault::Slow { delay: by }) => delay = Some(by),
            Some(HttpFault::Delay { delay }) => tokio::time::sleep(delay).await,
        }
        if let Some(delay) = delay {
            tokio::time::sleep(delay).await;
        }
        let (mut parts, body) = self.forward(request).await?.into_parts();
        let mut declared = body.size_hint().exact();
        if let Some(whole) = declared.filter(|whole| shorter_by > 0 && *whole > 0) {
            passed = whole.saturating_sub(shorter_by);
            declared = Some(passed);
            parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(passed));
        }
        let end = if shorter_by > 0 { End::Orderly } else { End::Broken };
        let status = parts.status.as_u16();
        self.log.update(index, |exchange| exchange.status = Some(status));
        let (waiting, proxy) = (None, self);
        let body =
            Passing { body, passed, end, is_cut: false, declared, delay, waiting, index, proxy };
        Ok(Response::from_parts(parts, body.boxed()))
    }
}

/// An answer in place of the server's.
fn made(status: u16, headers: &[(String, String)], body: String) -> io::Result<Response<Body>> {
    let status = StatusCode::from_u16(status).map_err(io::Error::other)?;
    let mut answer = Response::builder().status(status);
    for (name, value) in headers {
        answer = answer.header(name, value);
    }
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {});
    answer.body(body.boxed()).map_err(io::Error::other)
}

fn reset(connection: &Connection) -> io::Result<Response<Body>> {
    connection.reset_on_close()?;
    Err(io::Error::new(io::ErrorKind::ConnectionReset, "a reset is injected"))
}

/// The end of a body that is cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// As one that is whole.
    Orderly,
    /// With the connection.
    Broken,
}

/// The body of the server's answer on its way to the client.
struct Passing {
    body: Incoming,
    /// Bytes that may still pass.
    passed: u64,
    end: End,
    /// Whether bytes were left out.
    is_cut: bool,
    /// The length of the body for its header.
    declared: Option<u64>,
    /// The wait before each piece.
    delay: Option<Duration>,
    waiting: Option<Pin<Box<Sleep>>>,
    index: usize,
    proxy: Arc<Proxy>,
}

impl hyper::body::Body for Passing {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        if let Some(waiting) = &mut this.waiting {
            ready!(waiting.as_mut().poll(context));
            this.waiting = None;
        }
        if this.is_cut {
            let broken = (this.end == End::Broken)
                .then(|| Err(io::Error::other("a truncated body is injected")));
            return Poll::Ready(broken);
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        let Some(frame) = frame.transpose().map_err(io::Error::other)? else {
            return Poll::Ready(None);
        };
        // Trailers, which no storage reads, end a body too.
        let Ok(mut data) = frame.into_data() else { return Poll::Ready(None) };
        if let Ok(passed) = usize::try_from(this.passed)
            && data.len() > passed
        {
            data.truncate(passed);
            this.is_cut = true;
        }
        let length = data.len() as u64;
        this.passed -= length;
        this.proxy.log.update(this.index, |exchange| exchange.received_bytes += length);
        // While it waits for the end, the server sends what it has.
        let delay = this.delay.or_else(|| this.is_cut.then_some(Duration::from_millis(1)));
        this.waiting = delay.map(|delay| Box::pin(tokio::time::sleep(delay)));
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> SizeHint {
        self.declared.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
