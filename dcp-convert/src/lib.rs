//! Offline jobs on whole checkpoints: convert, reshard, verify.
