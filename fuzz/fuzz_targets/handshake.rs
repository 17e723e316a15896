//! What a stranger may send to a rank: greetings, records, items of the handshake, news.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dcp_collectives::fuzzing::handshake(bytes));
