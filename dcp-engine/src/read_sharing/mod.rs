//! Reads that the ranks of a group share: one of them reads a byte and sends it to those that need it, too.
//!
//! [`BroadcastReader`] is for a place that one rank alone can read: that rank reads for all.
//! [`ParallelReader`] is for a place that all can read. Each of its loads goes:
//!
//! ```text
//! offers ──── no two ranks need the same, or sharing cannot pay ──┐
//!    │                                                             │
//! plans → coordinator divides → assignment of each rank            ├──► each reads what it needs
//!    │                                                             │
//! speeds (given or measured) ── slower by the model ───────────────┘
//!    │
//! turns: read, send, receive → what a rank alone needs → all succeeded?
//! ```
//!
//! | step | file |
//! |---|---|
//! | the decision, which ends at the first step that says no | `decision.rs` |
//! | fingerprints of plans, and the ranks that share | `sharers.rs` |
//! | the model of the seconds of either way; the machines of ranks and measured speeds, which it has from | `cost_model.rs`; `machines.rs`, `measured_speeds.rs` |
//! | which rank reads what, and its messages | `division.rs`, `assignment.rs` |
//! | the turns; the messages, the next of which is read meanwhile, and their receiver | `shared_read.rs`; `exchange_message.rs`, `read_ahead.rs`, `receiver.rs` |
//! | what only one rank needs | `unshared_reads.rs` |
//!
//! Invariant: all ranks decide by the same numbers, which they have exchanged, so they take the same way and make
//! the same calls of the collective in the same order, also when one fails: it sends its error in place
//! of its message and goes on to receive.
//!
//! Stored elements are shared, not the shards that ranks request, so ranks with different layouts share, too;
//! and it is a reader, so planners and formats know nothing of it. Ranks measure because nothing says how
//! fast a storage is: a page cache beats any network, an object store loses to most.

mod assignment;
mod broadcast_reader;
mod cost_model;
mod decision;
mod division;
mod exchange_message;
mod machines;
mod measured_speeds;
mod parallel_reader;
mod read_ahead;
mod receiver;
mod shared_read;
mod sharers;
mod unshared_reads;

pub use broadcast_reader::BroadcastReader;
pub use parallel_reader::ParallelReader;

/// The way in which ranks exchange the data that they have read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exchange {
    /// One rank after the other sends one message to all, in turns (Megatron-Core's `broadcast`,
    /// which lets a rank send all it has before the next one begins).
    #[default]
    Broadcast,
    /// Every rank sends one message to every rank, in rounds (Megatron-Core's `gather_rounds`, where a
    /// round has one tensor of each rank, however large; here it has so many bytes).
    GatherRounds,
}

/// Whether the ranks of a group share their reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadSharing {
    /// One of the ranks that need the same reads it, and sends it to the others.
    Always,
    /// Each load takes the way that is expected to be faster: ranks share where that saves a tenth
    /// of the time.
    ///
    /// A load in which sharing could save 256 MiB per rank measures how fast ranks read and exchange,
    /// with 8 to 16 MiB per rank. Where ranks run on one machine, which may keep in memory what one
    /// of them has read, each also reads 4 to 12 MiB that another one has just read.
    ///
    /// A smaller load measures nothing. It is shared if ranks on several machines need the same: that
    /// takes the time of sending 512 MiB per rank at most, and a busy storage that every rank reads has
    /// no such limit. The ranks of one machine each read what they need, most often from its page cache.
    #[default]
    Auto,
    /// Every rank reads what it needs.
    Never,
}
