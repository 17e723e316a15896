//! From a bare connection to one with a rank of the same job at its other end.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use super::dial::DialError;
use super::greeting::{GREETING_LEN, Greeting, Protection, difference};
use super::sealed::{Keys, Sealed};
use super::secret::{KEY_LEN, Nonces, Secret, Side};
use super::wire::{self, read_exact, write_all};
use crate::mesh::socket::Socket;
use crate::mesh::{Channel, Patience};

/// The secret and the certificates that protect the connections of a rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Security {
    pub(super) secret: Option<Secret>,
    #[cfg(feature = "tls")]
    pub(super) tls: Option<super::tls::Tls>,
}

impl Security {
    fn protection(&self) -> Protection {
        #[cfg(feature = "tls")]
        let tls = self.tls.is_some();
        #[cfg(not(feature = "tls"))]
        let tls = false;
        Protection { secret: self.secret.is_some(), tls }
    }

    /// Whether the other side of a connection is known to be of the job.
    pub(super) fn is_strict(&self) -> bool {
        self.protection().secret || self.protection().tls
    }

    fn encrypt(
        &self,
        channel: Arc<dyn Channel>,
        side: Side,
        patience: Patience<'_>,
    ) -> io::Result<Arc<dyn Channel>> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return tls.wrap(channel, side, patience);
        }
        let _ = (side, patience);
        Ok(channel)
    }

    /// Protects a connection that this rank made.
    pub(super) fn dial(
        &self,
        stream: TcpStream,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn Channel>, DialError> {
        let channel: Arc<dyn Channel> = Arc::new(Socket::new(stream));
        let (mine, nonce) = self.greet(&*channel, patience)?;
        let theirs = heard(&*channel, patience)?;
        if let Some(reason) = difference(mine, theirs.protection) {
            return Err(DialError::Stranger(reason.to_owned()));
        }
        let nonces = Nonces { dialer: nonce, acceptor: theirs.nonce };
        let channel = self.encrypt(channel, Side::Dialer, patience)?;
        self.authenticate(channel, Side::Dialer, &nonces, patience)?.ok_or_else(|| {
            let reason = "the shared secret of the peer is another one (DCP_SECRET)";
            DialError::Stranger(reason.to_owned())
        })
    }

    /// Protects a connection that another process made, perhaps a stranger. Until this returns, nothing is allocated that the
    /// other side could make larger.
    pub(super) fn accept(
        &self,
        stream: TcpStream,
        patience: Patience<'_>,
    ) -> io::Result<Arc<dyn Channel>> {
        let channel: Arc<dyn Channel> = Arc::new(Socket::new(stream));
        let theirs = heard(&*channel, patience)?;
        let (mine, nonce) = self.greet(&*channel, patience)?;
        if mine != theirs.protection {
            return Err(wire::invalid("the peer has another protection (secret, TLS)"));
        }
        let nonces = Nonces { dialer: theirs.nonce, acceptor: nonce };
        let channel = self.encrypt(channel, Side::Acceptor, patience)?;
        self.authenticate(channel, Side::Acceptor, &nonces, patience)?
            .ok_or_else(|| wire::invalid("the peer does not have the shared secret"))
    }

    fn greet(
        &self,
        channel: &dyn Channel,
        patience: Patience<'_>,
    ) -> io::Result<(Protection, [u8; KEY_LEN])> {
        let mut nonce = [0; KEY_LEN];
        getrandom::fill(&mut nonce).map_err(io::Error::from)?;
        let protection = self.protection();
        write_all(channel, &Greeting { protection, nonce }.to_bytes(), patience)?;
        Ok((protection, nonce))
    }

    /// Exchanges proofs of the secret, that of the dialing side first: a stranger that dials gets
    /// nothing to try guesses of the secret on. `None`: the peer has another secret.
    fn authenticate(
        &self,
        channel: Arc<dyn Channel>,
        side: Side,
        nonces: &Nonces,
        patience: Patience<'_>,
    ) -> io::Result<Option<Arc<dyn Channel>>> {
        let Some(secret) = &self.secret else { return Ok(Some(channel)) };
        let broken = || wire::invalid("no HMAC");
        let proof = secret.prove(side, nonces).ok_or_else(broken)?;
        let verified = |patience| -> io::Result<bool> {
            let mut theirs = [0; KEY_LEN];
            read_exact(&*channel, &mut theirs, patience)?;
            Ok(secret.verify(side.other(), nonces, &theirs))
        };
        let holds = match side {
            Side::Dialer => {
                write_all(&*channel, &proof, patience)?;
                verified(patience)?
            }
            Side::Acceptor => {
                let holds = verified(patience)?;
                // A wrong proof in return says that the secrets differ.
                let answer = if holds { proof } else { [0; KEY_LEN] };
                write_all(&*channel, &answer, patience)?;
                holds
            }
        };
        if !holds {
            return Ok(None);
        }
        if self.protection().tls {
            // TLS has proofs of its own in its records.
            return Ok(Some(channel));
        }
        let key = |side| secret.key(side, nonces).ok_or_else(broken);
        let keys = Keys { mine: key(side)?, theirs: key(side.other())? };
        Ok(Some(Arc::new(Sealed::new(channel, &keys)?)))
    }
}

fn heard(channel: &dyn Channel, patience: Patience<'_>) -> io::Result<Greeting> {
    let mut bytes = [0; GREETING_LEN];
    read_exact(channel, &mut bytes, patience)?;
    Greeting::parse(&bytes)
}
