//! Connections with TLS 1.3, on which both ends show a certificate of the job's authority.

use std::fmt;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore};
use rustls::{ServerConfig, ServerConnection};

use super::secret::Side;
use crate::mesh::frame::{invalid, is_pause};
use crate::mesh::{Channel, Patience, TICK};

/// The name that certificates carry, unless [`Tls::server_name`] says another.
const NAME: &str = "dcp";

/// The longest file of certificates or of a key, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Bytes that are encrypted, or read, at once.
const PIECE: usize = 16 << 10;

/// The parts that a rank needs for TLS: its certificate with its key, and the authority that has signed
/// those of all ranks.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

/// The reason why there is no TLS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read, or holds something else.
    #[error("cannot read {what} from {path}: {message}")]
    File {
        /// The contents that the file should have.
        what: &'static str,
        /// The file.
        path: String,
        /// The problem of the file.
        message: String,
    },
    /// The certificate, its key and the authority cannot be used together.
    #[error("the certificates cannot be used: {message}")]
    Unusable {
        /// The problem of the certificates.
        message: String,
    },
}

impl Tls {
    /// Reads PEM files: the certificate of this rank with those between it and the authority, its key,
    /// and the certificates of authorities. All ranks may use the same certificate, whose name is
    /// `dcp` (a DNS name in `subjectAltName`) unless [`server_name`](Self::server_name) says another.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or they do not fit together.
    pub fn from_files(
        certificate: impl AsRef<Path>,
        key: impl AsRef<Path>,
        authorities: impl AsRef<Path>,
    ) -> Result<Self, TlsError> {
        let chain = certificates("the certificate", certificate.as_ref())?;
        let roots = certificates("the authorities", authorities.as_ref())?;
        let key = read("the key", key.as_ref(), |pem| {
            PrivateKeyDer::from_pem_slice(pem).map_err(|error| error.to_string())
        })?;
        let unusable =
            |message: &dyn fmt::Display| TlsError::Unusable { message: message.to_string() };
        let mut store = RootCertStore::empty();
        for root in roots {
            store.add(root).map_err(|error| unusable(&error))?;
        }
        let store = Arc::new(store);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&store), Arc::clone(&provider))
                .build()
                .map_err(|error| unusable(&error))?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unusable(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(|error| unusable(&error))?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unusable(&error))?
            .with_root_certificates(store)
            .with_client_auth_cert(chain, key)
            .map_err(|error| unusable(&error))?;
        let name = ServerName::try_from(NAME).map_err(|error| unusable(&error))?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name })
    }

    /// The name that the certificates of the other ranks carry.
    ///
    /// # Errors
    ///
    /// When it is no DNS name and no IP address.
    pub fn server_name(mut self, name: impl Into<String>) -> Result<Self, TlsError> {
        self.name = ServerName::try_from(name.into())
            .map_err(|error| TlsError::Unusable { message: error.to_string() })?;
        Ok(self)
    }

    /// Encrypts a connection.
    pub(super) fn wrap(
        &self,
        inner: Arc<dyn Channel>,
        side: Side,
        patience: Patience<'_>,
    ) -> io::Result<Arc<dyn Channel>> {
        let session: Connection = match side {
            Side::Dialer => ClientConnection::new(Arc::clone(&self.client), self.name.clone())
                .map_err(invalid)?
                .into(),
            Side::Acceptor => {
                ServerConnection::new(Arc::clone(&self.server)).map_err(invalid)?.into()
            }
        };
        let channel = TlsChannel {
            inner,
            session: Mutex::new(session),
            reading: Mutex::new(Raw { bytes: vec![0; PIECE].into(), unread: 0..0 }),
            writing: Mutex::default(),
        };
        channel.shake_hands(patience)?;
        Ok(Arc::new(channel))
    }
}

fn read<T>(
    what: &'static str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<T, TlsError> {
    super::file::read(path, MAX_FILE)
        .map_err(|error| error.to_string())
        .and_then(|pem| parse(&pem))
        .map_err(|message| TlsError::File { what, path: path.display().to_string(), message })
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    read(what, path, |pem| {
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        match all {
            Ok(all) if all.is_empty() => Err("there is no certificate in it".to_owned()),
            Ok(all) => Ok(all),
            Err(error) => Err(error.to_string()),
        }
    })
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A connection with TLS. While one thread waits for bytes of the other end, another can write: the
/// session is not locked during either.
struct TlsChannel {
    inner: Arc<dyn Channel>,
    session: Mutex<Connection>,
    reading: Mutex<Raw>,
    writing: Mutex<Pending>,
}

/// Encrypted bytes that came, and those of them that the session has not taken.
struct Raw {
    bytes: Box<[u8]>,
    unread: Range<usize>,
}

/// Encrypted bytes that are not sent yet.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    sent: usize,
}

/// Certificates that are not accepted are no matter of another attempt.
fn refused(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, error)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TlsChannel {
    fn shake_hands(&self, patience: Patience<'_>) -> io::Result<()> {
        loop {
            let left = patience.left().ok_or(io::ErrorKind::TimedOut)?;
            let outcome = self.flush(left.min(TICK)).and_then(|()| {
                if lock(&self.session).is_handshaking() {
                    self.fill(&mut lock(&self.reading), left.min(TICK))
                } else {
                    Ok(true)
                }
            });
            match outcome {
                Ok(_) if !lock(&self.session).is_handshaking() => {
                    if self.flush(left.min(TICK)).is_ok() {
                        return Ok(());
                    }
                }
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if is_pause(&error) => {}
                Err(error) => {
                    // The alert that says why, as far as it goes.
                    drop(self.flush(TICK));
                    return Err(error);
                }
            }
        }
    }

    /// Gives the session some encrypted bytes, no more than it takes before its plaintext is read.
    /// `false`: there are no more.
    fn fill(&self, raw: &mut Raw, wait: Duration) -> io::Result<bool> {
        if raw.unread.is_empty() {
            raw.unread = 0..self.inner.read(&mut raw.bytes, wait)?;
        }
        let mut bytes = raw.bytes.get(raw.unread.clone()).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(false);
        }
        let mut session = lock(&self.session);
        raw.unread.start += session.read_tls(&mut bytes)?;
        session.process_new_packets().map_err(refused)?;
        Ok(true)
    }

    fn send(&self, pending: &mut Pending, wait: Duration) -> io::Result<()> {
        {
            let mut session = lock(&self.session);
            while session.wants_write() {
                session.write_tls(&mut pending.bytes)?;
            }
        }
        while let Some(rest) = pending.bytes.get(pending.sent..).filter(|rest| !rest.is_empty()) {
            pending.sent += self.inner.write(rest, wait)?;
        }
        pending.bytes.clear();
        pending.sent = 0;
        self.inner.flush(wait)
    }
}

impl Channel for TlsChannel {
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize> {
        let mut raw = lock(&self.reading);
        loop {
            match lock(&self.session).reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if !self.fill(&mut raw, wait)? {
                return Ok(0);
            }
        }
    }

    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        let mut pending = lock(&self.writing);
        self.send(&mut pending, wait)?;
        let piece = bytes.get(..PIECE).unwrap_or(bytes);
        let len = lock(&self.session).writer().write(piece)?;
        match self.send(&mut pending, wait) {
            Err(error) if !is_pause(&error) => Err(error),
            _ => Ok(len),
        }
    }

    fn flush(&self, wait: Duration) -> io::Result<()> {
        self.send(&mut lock(&self.writing), wait)
    }

    fn finish(&self) {
        lock(&self.session).send_close_notify();
        drop(self.flush(TICK));
        self.inner.finish();
    }

    fn cut(&self) {
        self.inner.cut();
    }
}

impl fmt::Debug for TlsChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsChannel").field("inner", &self.inner).finish_non_exhaustive()
    }
}
