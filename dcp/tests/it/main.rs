//! The whole stack on a real file system: real processes, real kills, real TCP.

mod child;
mod disk;
mod kills;
mod ranks;
mod state;
