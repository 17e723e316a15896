//! The parsers of bytes that a stranger may send, for the fuzz target `handshake`.

use crate::mesh::frame;
use crate::tcp::fuzzing::{greeting, hello, record};

/// Gives the bytes to each parser.
pub fn handshake(bytes: &[u8]) {
    greeting(bytes);
    record(bytes);
    hello(bytes);
    let mut buffer = bytes.to_vec();
    while let Ok(Some(_)) = frame::take_item::<frame::Control>(&mut buffer) {}
}
