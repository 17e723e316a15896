//! Views: readers that present other readers' checkpoints differently.

mod assembled;
mod averaged;
mod cast;
mod dequantized;
mod equality;
mod joined;
mod matrix;
mod mean;
mod merged;
mod quantized;
mod scales;
mod scratch;
mod selected;
mod stepped;
mod torchao;
mod translated;
mod unwrapped;

pub use assembled::{Assembled, AssembledBuilder, Piece, PieceFrom};
pub use averaged::{AverageOptions, Averaged, NonFloat};
pub use cast::Cast;
pub use dequantized::{DequantizeOptions, Dequantized};
pub use merged::{Duplicates, Merged};
pub(crate) use quantized::{archive, archived_value, with_quantizers};
pub(crate) use stepped::Stepped;
