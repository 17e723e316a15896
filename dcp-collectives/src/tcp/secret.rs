//! The secret that the ranks of a job share so that no other process can take part.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The shortest secret, in bytes.
const MIN_LEN: usize = 16;

/// The longest secret, in bytes.
const MAX_LEN: u64 = 64 << 10;

/// Bytes of a nonce, of a proof and of a key.
pub(super) const KEY_LEN: usize = 32;

/// A secret that the ranks of a job share: 16 bytes or more that cannot be guessed, for example from
/// `openssl rand -hex 32`. It is never shown.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

/// The reason why there is no usable secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It can be guessed.
    #[error("the secret has {len} bytes, it should have {MIN_LEN} or more")]
    TooShort {
        /// Its length.
        len: usize,
    },
    /// It cannot be read.
    #[error("cannot read the secret from {path}: {message}")]
    File {
        /// The file.
        path: String,
        /// The error of the read.
        message: String,
    },
}

impl Secret {
    /// The secret of these bytes.
    ///
    /// # Errors
    ///
    /// When there are fewer than 16.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, SecretError> {
        let bytes = bytes.as_ref();
        if bytes.len() < MIN_LEN {
            return Err(SecretError::TooShort { len: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }

    /// The secret in a file, without spaces and line ends around it.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is longer than 64 KiB, or has fewer than 16 bytes.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, SecretError> {
        let path = path.as_ref();
        let bytes = super::file::read(path, MAX_LEN).map_err(|error| SecretError::File {
            path: path.display().to_string(),
            message: error.to_string(),
        })?;
        Self::new(bytes.trim_ascii())
    }

    /// HMAC-SHA256 of a label and of both nonces.
    fn mac(&self, label: &[u8], nonces: &Nonces) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(b"dcp collectives 3 ");
        mac.update(label);
        mac.update(&nonces.dialer);
        mac.update(&nonces.acceptor);
        Some(mac)
    }

    /// Shows the peer that this side has the secret.
    pub(super) fn prove(&self, side: Side, nonces: &Nonces) -> Option<[u8; KEY_LEN]> {
        Some(self.mac(side.proof(), nonces)?.finalize().into_bytes().into())
    }

    /// Whether the peer, which is `side`, has the secret.
    pub(super) fn verify(&self, side: Side, nonces: &Nonces, proof: &[u8; KEY_LEN]) -> bool {
        self.mac(side.proof(), nonces).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    /// The key for the records that `side` sends on one connection.
    pub(super) fn key(&self, side: Side, nonces: &Nonces) -> Option<[u8; KEY_LEN]> {
        Some(self.mac(side.key(), nonces)?.finalize().into_bytes().into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A random number of each side of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nonces {
    pub(super) dialer: [u8; KEY_LEN],
    pub(super) acceptor: [u8; KEY_LEN],
}

/// A side of a connection. What one side sends is of no use as what the other does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Dialer,
    Acceptor,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Dialer => Self::Acceptor,
            Self::Acceptor => Self::Dialer,
        }
    }

    fn proof(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"proof of dialer.",
            Self::Acceptor => b"proof of acceptor.",
        }
    }

    fn key(self) -> &'static [u8] {
        match self {
            Self::Dialer => b"key of dialer.",
            Self::Acceptor => b"key of acceptor.",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown_and_not_short() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        let error = Secret::new("0123456789abcde").unwrap_err();
        assert_eq!(error, SecretError::TooShort { len: 15 });
        assert!(!error.to_string().contains("0123"));
    }

    #[test]
    fn a_proof_holds_for_one_side_one_connection_and_one_secret() {
        let secret = Secret::new([7; 32]).unwrap();
        let nonces = Nonces { dialer: [1; KEY_LEN], acceptor: [2; KEY_LEN] };
        let proof = secret.prove(Side::Dialer, &nonces).unwrap();
        assert!(secret.verify(Side::Dialer, &nonces, &proof));
        assert!(!secret.verify(Side::Acceptor, &nonces, &proof));
        let swapped = Nonces { dialer: nonces.acceptor, acceptor: nonces.dialer };
        assert!(!secret.verify(Side::Dialer, &swapped, &proof));
        let other = Secret::new([8; 32]).unwrap();
        assert!(!other.verify(Side::Dialer, &nonces, &proof));
        assert_ne!(secret.key(Side::Dialer, &nonces), secret.key(Side::Acceptor, &nonces));
    }
}
