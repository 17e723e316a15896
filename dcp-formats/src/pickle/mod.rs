//! Python's pickle as data: parsed without executing anything, written as `torch.save` does.
//!
//! [`Pickle::parse`] interprets the opcodes of protocols 0 to 5 on an arena of [`Node`]s. Where
//! Python imports a name and calls it, the machine records the name, the arguments and the state in
//! an [`ObjectNode`]. It looks up nothing and calls nothing. Strings and bytes are slices of the
//! input, shared references stay shared, and memory is proportional to the length of the input.
//!
//! Large pickles such as `.metadata` are processed as nodes. [`Converter`] converts nodes to
//! [`Value`](dcp_core::Value)s. [`Writer`] writes protocol 2 byte for byte like CPython's C pickler
//! with `fix_imports`, the default. [`Writer::graph`] rewrites a part of a parsed pickle unchanged,
//! with any objects.

mod arena;
mod convert;
mod cursor;
mod dump;
mod foreign;
mod harmless_names;
mod limits;
mod machine;
mod memo;
mod names;
mod opcode;
mod record;
mod repeated;
mod replace;
mod rewrite;
mod stack;
mod visitor;
mod writer;

pub use arena::{Construction, GlobalName, Node, NodeId, ObjectNode, Pickle, Span};
pub(crate) use convert::Shared;
pub use convert::{Converted, Converter, Hook};
pub(crate) use dump::not_alone;
pub use dump::{Dumper, TensorSink, dump};
pub use foreign::{ForeignName, Trust};
pub use limits::Limits;
pub(crate) use record::Field;
pub(crate) use repeated::Repeated;
pub use replace::ReplacedObject;
pub use rewrite::PersistentSink;
pub use writer::Writer;
