//! Python's pickle as data: read without running anything, written as `torch.save` does.
//!
//! [`Pickle::parse`] executes the opcodes of protocols 0 to 5 on an arena of [`Node`]s. Where
//! Python would import a name and call it, the machine only notes the name, the arguments and the
//! state in an [`ObjectNode`]; nothing is looked up and nothing is called. Strings and bytes are
//! slices of the input, shared references stay shared, and the memory used is proportional to the
//! length of the input, whatever the input claims.
//!
//! Large pickles such as `.metadata` are walked as nodes. [`Converter`] turns nodes into
//! [`Value`](dcp_core::Value)s, and [`Writer`] makes protocol-2 pickles byte for byte like
//! CPython's C pickler with `fix_imports`, the default. [`Writer::graph`] writes a part of a parsed
//! pickle again as it was, whatever objects it is made of.

mod arena;
mod convert;
mod cursor;
mod dump;
mod foreign;
mod limits;
mod machine;
mod names;
mod opcode;
mod replace;
mod rewrite;
mod stack;
mod walk;
mod writer;

pub use arena::{Construction, GlobalName, Node, NodeId, ObjectNode, Pickle, Span};
pub(crate) use convert::Shared;
pub use convert::{Converted, Converter, Hook};
pub(crate) use dump::not_alone;
pub use dump::{Dumper, TensorSink, dump};
pub use foreign::{ForeignName, Trust};
pub use limits::Limits;
pub use replace::ReplacedObject;
pub use rewrite::PersistentSink;
pub use writer::Writer;
