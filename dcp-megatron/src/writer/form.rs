//! The two forms of a `torch_dist` checkpoint, by where the common state is.

pub(crate) use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT};
pub(crate) use crate::disk::config::METADATA_JSON;

/// The place of the common state of a `torch_dist` checkpoint. Never both places: readers of both
/// use the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MegatronForm {
    /// In `common.pt`, with four members in `metadata.json`: what Megatron-Core 0.6 to 0.18
    /// writes, and what every version since 0.6 reads.
    /// [`to_torch_dist`](crate::jobs::to_torch_dist) writes arguments of newer classes as plain
    /// values.
    #[default]
    CommonFile,
    /// Among the objects, as `common_state/shard_0_1`, with two members in `metadata.json`: what
    /// Megatron-Core 0.19 and later write, and no earlier one reads.
    CommonInside,
}

impl MegatronForm {
    /// The bytes of `metadata.json`, as Python's `json.dump` writes them. Megatron-Core up to 0.18
    /// fails on any other member.
    #[must_use]
    pub fn metadata_json(self) -> &'static str {
        match self {
            Self::CommonFile => {
                r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}"#
            }
            Self::CommonInside => {
                r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1}"#
            }
        }
    }
}
