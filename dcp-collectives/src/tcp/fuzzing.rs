//! Parsers of the handshake, for a fuzz target.

use super::greeting::{GREETING_LEN, Greeting};
use super::sealed;
use super::secret::KEY_LEN;
use super::wire::{Hello, Presence, Reply};
use crate::mesh::frame::decode;

pub(crate) fn greeting(bytes: &[u8]) {
    if let Some((bytes, _)) = bytes.split_first_chunk::<GREETING_LEN>()
        && let Ok(greeting) = Greeting::parse(bytes)
    {
        assert_eq!(greeting.to_bytes(), *bytes, "a greeting is written as it was read");
    }
}

/// No bytes are a record of a key that nobody has.
pub(crate) fn record(bytes: &[u8]) {
    drop(sealed::opened(&[3; KEY_LEN], bytes));
}

pub(crate) fn hello(bytes: &[u8]) {
    drop((decode::<Hello>(bytes), decode::<Reply>(bytes), decode::<Presence>(bytes)));
}
