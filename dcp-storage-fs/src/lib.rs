//! Checkpoint bytes on a file system: durable, atomic, concurrent.
