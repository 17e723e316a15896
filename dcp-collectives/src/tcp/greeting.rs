//! The first bytes of each side of a connection. They have a fixed length, so that a stranger cannot
//! make a rank allocate.

use std::io;

use super::secret::KEY_LEN;
use crate::mesh::frame::invalid;

/// The first bytes of every connection. A stranger hardly sends these.
const MAGIC: [u8; 8] = *b"dcp-coll";

/// The version of the handshake, and of the frames that follow it.
const VERSION: u32 = 3;

/// Bytes of a greeting.
pub(super) const GREETING_LEN: usize = 48;

/// The protection of a connection. Both sides must require the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Protection {
    pub(super) secret: bool,
    pub(super) tls: bool,
}

/// The first bytes of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) protection: Protection,
    pub(super) nonce: [u8; KEY_LEN],
}

impl Greeting {
    pub(super) fn to_bytes(self) -> [u8; GREETING_LEN] {
        let mut bytes = [0; GREETING_LEN];
        let flags = u32::from(self.protection.secret) | u32::from(self.protection.tls) << 1;
        let fields = MAGIC
            .into_iter()
            .chain(VERSION.to_le_bytes())
            .chain(flags.to_le_bytes())
            .chain(self.nonce);
        for (byte, value) in bytes.iter_mut().zip(fields) {
            *byte = value;
        }
        bytes
    }

    /// The greeting in these bytes.
    ///
    /// # Errors
    ///
    /// When they are not one of this version.
    pub(super) fn parse(bytes: &[u8; GREETING_LEN]) -> io::Result<Self> {
        let [head @ .., _, _, _, _] = bytes;
        if !head.starts_with(&MAGIC) {
            return Err(invalid("the peer does not speak this protocol"));
        }
        let [_, _, _, _, _, _, _, _, v0, v1, v2, v3, f0, f1, f2, f3, nonce @ ..] = *bytes;
        let version = u32::from_le_bytes([v0, v1, v2, v3]);
        if version != VERSION {
            return Err(invalid(format!("the peer speaks version {version}, this rank {VERSION}")));
        }
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        if flags > 3 {
            return Err(invalid("the peer requires a protection that this rank does not know"));
        }
        let protection = Protection { secret: flags & 1 != 0, tls: flags & 2 != 0 };
        Ok(Self { protection, nonce })
    }
}

/// Describes the difference when the sides require different protection, for the one that dials.
pub(super) fn difference(mine: Protection, theirs: Protection) -> Option<&'static str> {
    match (mine, theirs) {
        _ if mine == theirs => None,
        (Protection { secret: false, .. }, Protection { secret: true, .. }) => Some(
            "the peer requires a shared secret; set DCP_SECRET_FILE or DCP_SECRET, the same on all \
             ranks",
        ),
        (Protection { secret: true, .. }, Protection { secret: false, .. }) => {
            Some("this rank has a shared secret, the peer has none; set it on all ranks")
        }
        (Protection { tls: false, .. }, _) => Some("the peer requires TLS; set it on all ranks"),
        (Protection { tls: true, .. }, _) => {
            Some("this rank requires TLS, the peer does not; set it on all ranks")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn greetings_round_trip(secret: bool, tls: bool, nonce: [u8; KEY_LEN]) {
            let greeting = Greeting { protection: Protection { secret, tls }, nonce };
            prop_assert_eq!(Greeting::parse(&greeting.to_bytes()).unwrap(), greeting);
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 48)) {
            let mut bytes: [u8; GREETING_LEN] = bytes.try_into().unwrap();
            let _ = Greeting::parse(&bytes);
            bytes[..8].copy_from_slice(&MAGIC);
            let _ = Greeting::parse(&bytes);
        }
    }
}
