//! The profiles of AWS's programs.

#![no_main]
#![allow(dead_code, reason = "the parser is private to its crate")]

#[path = "../../dcp-storage-object/src/opener/ini.rs"]
mod ini;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let read = ini::Ini::parse(bytes);
    if let Err(error) = &read {
        assert!(error.line <= bytes.len());
    }
    let _ = read.map(|ini| ini.section("default").cloned());
});
