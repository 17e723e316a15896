//! Numbers of block-scaled weights.
