//! The `dcp` command.
fn main() {}
