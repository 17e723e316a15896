//! An HTTP/1.1 server on a thread of its own, for tests with and without a runtime.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{self, Either};
use http_body_util::combinators::BoxBody;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// The body of an answer. An error within it closes the connection.
pub(super) type Body = BoxBody<Bytes, io::Error>;

/// A handler of the requests of a server.
pub(super) trait Handler: Send + Sync + 'static {
    /// Answers a request, or with an error closes the connection.
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        connection: Connection,
    ) -> impl Future<Output = io::Result<Response<Body>>> + Send;
}

/// The connection that a request came on.
#[derive(Clone, Debug)]
pub(super) struct Connection(Arc<TcpStream>);

impl Connection {
    /// Lets the peer see a reset, and not an end, when the connection closes.
    pub(super) fn reset_on_close(&self) -> io::Result<()> {
        socket2::SockRef::from(&*self.0).set_linger(Some(Duration::ZERO))
    }
}

/// A running server. Dropping it closes its connections.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves at 127.0.0.1, at a port that the system chooses.
    pub(super) fn start(handler: Arc<impl Handler>) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                let accepting = std::pin::pin!(accept(listener, handler));
                match future::select(accepting, stopped).await {
                    Either::Left(((), _)) | Either::Right(_) => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("http".to_owned()).spawn(serve)?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the address that it listens on.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// Serves every connection until the listener fails.
async fn accept(listener: TcpListener, handler: Arc<impl Handler>) {
    while let Ok((stream, _)) = listener.accept().await {
        let handler = handler.clone();
        tokio::spawn(async move {
            // A connection that breaks off is the client's affair, or a fault that was wanted.
            let _ = serve(stream, handler).await;
        });
    }
}

async fn serve(
    stream: tokio::net::TcpStream,
    handler: Arc<impl Handler>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    stream.set_nodelay(true)?;
    let stream = stream.into_std()?;
    let connection = Connection(Arc::new(stream.try_clone()?));
    let stream = TokioIo::new(tokio::net::TcpStream::from_std(stream)?);
    let service = service_fn(|request| handler.clone().answer(request, connection.clone()));
    http1::Builder::new().serve_connection(stream, service).await?;
    Ok(())
}
