//! Latency of the collectives over loopback TCP, with threads as ranks.

fn main() {}
