//! The classes in a `.metadata`.

use dcp_core::DType;

use crate::pickle::{NodeId, Pickle};

pub(super) const METADATA: &str = "torch.distributed.checkpoint.metadata";
/// The module of `TensorProperties` up to PyTorch 2.2.
pub(super) const SHARDED_METADATA: &str = "torch.distributed._shard.sharded_tensor.metadata";
pub(super) const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
pub(super) const OLMO_FILESYSTEM: &str = "olmo_core.distributed.checkpoint.filesystem";
/// The module of Megatron-Core's (0.15) subclass of `Metadata`.
const MEGATRON: &str = "megatron.core.dist_checkpointing.strategies.torch";

/// The module of ByteCheckpoint's (0.0.2) `Metadata` and `_StorageInfo`.
const BYTE_CHECKPOINT: &str = "bytecheckpoint.checkpointer.meta_type";

/// The meaning of a global.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Metadata,
    TensorMetadata,
    BytesMetadata,
    Chunk,
    Properties,
    MemoryFormat,
    Index,
    StorageInfo,
    StorageMeta,
    Size,
    Path,
    DType(DType),
    Other,
}

impl Class {
    /// Whether an index has so many instances of a class, by module and name, that they are read as
    /// records.
    pub(super) fn has_records(module: &str, name: &str) -> bool {
        matches!(Self::of(module, name), Self::Chunk | Self::Index | Self::StorageInfo)
    }

    pub(super) fn of(module: &str, name: &str) -> Self {
        match (module, name) {
            (METADATA | BYTE_CHECKPOINT, "Metadata") | (MEGATRON, "MCoreMetadata") => {
                Self::Metadata
            }
            (METADATA, "TensorStorageMetadata") => Self::TensorMetadata,
            (METADATA, "BytesStorageMetadata") => Self::BytesMetadata,
            (METADATA, "ChunkStorageMetadata") => Self::Chunk,
            (METADATA, "MetadataIndex") => Self::Index,
            (METADATA, "StorageMeta") => Self::StorageMeta,
            (METADATA | SHARDED_METADATA, "TensorProperties") => Self::Properties,
            (METADATA, "_MEM_FORMAT_ENCODING") | (SHARDED_METADATA, "MEM_FORMAT_ENCODING") => {
                Self::MemoryFormat
            }
            (FILESYSTEM | OLMO_FILESYSTEM | BYTE_CHECKPOINT, "_StorageInfo") => Self::StorageInfo,
            // Python 3.13 moved them to a module that earlier versions lack.
            ("pathlib" | "pathlib._local", "PosixPath" | "WindowsPath" | "PurePosixPath") => {
                Self::Path
            }
            ("torch", "Size") => Self::Size,
            ("torch", dtype) => dtype.parse().map_or(Self::Other, Self::DType),
            _ => Self::Other,
        }
    }
}

/// Describes a node for messages: a class by its full name, or a kind of data.
pub(super) fn describe(pickle: &Pickle<'_>, id: NodeId) -> String {
    use crate::pickle::Node;
    let named = |id| pickle.global_name(id).map(|(module, name)| format!("{module}.{name}"));
    match pickle.node(id) {
        Node::None => "None".into(),
        Node::Bool(_) => "a bool".into(),
        Node::Int(_) | Node::BigInt(_) => "an int".into(),
        Node::Float(_) => "a float".into(),
        Node::Str(_) | Node::EscapedStr(_) | Node::SurrogateStr(_) => "a str".into(),
        Node::Bytes(_) | Node::EscapedBytes(_) | Node::ByteArray(_) => "bytes".into(),
        Node::Tuple(_) => "a tuple".into(),
        Node::List(_) => "a list".into(),
        Node::Dict(_) => "a dict".into(),
        Node::Set(_) | Node::FrozenSet(_) => "a set".into(),
        Node::Global(_) => named(id).unwrap_or_default(),
        Node::Object(_) => match pickle.object(id).and_then(|object| named(object.class)) {
            Some(class) => format!("an object of class {class}"),
            None => "an object of unknown class".into(),
        },
        Node::Persistent(_) => "a persistent id".into(),
    }
}
