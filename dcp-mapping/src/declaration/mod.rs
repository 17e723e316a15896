//! Declarations of mappings in TOML: their language, and the families of this crate.

mod builtin;
mod families;
mod parser;
