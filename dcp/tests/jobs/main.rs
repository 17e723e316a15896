//! Jobs on whole checkpoints of every format and framework, as a program uses them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod buckets;
mod copies;
mod one_answer;
mod selected;
mod storages;
mod writes;
