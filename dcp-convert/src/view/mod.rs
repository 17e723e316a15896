//! Checkpoints seen differently: readers over readers.

mod alike;
mod averaged;
mod cast;
mod joined;
mod mean;
mod merged;
mod scratch;
mod selected;
mod translated;

pub use averaged::{AverageOptions, Averaged, NonFloat};
pub use cast::Cast;
pub use merged::{Duplicates, Merged};
pub use selected::Selected;
