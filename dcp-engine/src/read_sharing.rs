//! Whether ranks share their reads, and how.

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
