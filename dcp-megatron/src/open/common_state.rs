//! Reads the common state, all of a state dict that is not sharded: from `common.pt` up to
//! Megatron-Core 0.18, from an object since 0.19.

use std::sync::Arc;

use dcp_core::storage::StorageExt as _;
use dcp_core::value::Dict;
use dcp_core::{FormatError, Key, Storage, StorageError, StorageErrorKind, Value};
use dcp_formats::torch_object::decode_object;
use dcp_formats::torch_save::decode_only_item;
use dcp_jobs::Source;
use dcp_jobs::read::read_object;

use crate::disk::common_state::{COMMON_FILE, COMMON_OBJECT};
use crate::error::MegatronError;

/// More than any common state has, in bytes.
const BYTES_MAX: u64 = 1 << 30;

/// A common state that was read.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// As it was stored: a dict, or what is written back unchanged and shows one.
    pub(crate) value: Value,
    /// The dict that it is or shows.
    pub(crate) dict: Dict,
}

impl Common {
    /// None at all, which only a tolerant reader takes.
    pub(crate) fn empty() -> Self {
        Self { value: Value::Dict(Dict::new()), dict: Dict::new() }
    }

    fn new(value: Value) -> Result<Self, MegatronError> {
        let Value::Dict(dict) = value.view() else {
            let problem = format!("is not a dict but {}", value.kind());
            return Err(MegatronError::CommonState { problem });
        };
        let dict = dict.clone();
        Ok(Self { value, dict })
    }
}

/// Whether there is a `common.pt`, which then is the common state even if there is another
/// inside, as Megatron-Core (0.19) decides it.
pub(crate) async fn is_in_file(storage: &dyn Storage) -> Result<bool, StorageError> {
    storage.contains(&Key::new(COMMON_FILE)?).await
}

/// Reads `common.pt`. Nothing in it is executed, and classes are only shown.
pub(crate) async fn from_file(storage: &Arc<dyn Storage>) -> Result<Common, MegatronError> {
    let key = Key::new(COMMON_FILE).map_err(StorageError::from)?;
    let len = match storage.stat(&key).await {
        Ok(meta) => meta.byte_len,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Err(absent()),
        Err(error) => return Err(error.into()),
    };
    if len > BYTES_MAX {
        let problem = format!("it has {len} bytes, more than {BYTES_MAX}");
        return Err(FormatError::new("common state", problem).in_file(COMMON_FILE, 0).into());
    }
    let bytes = storage.read_range(&key, 0..len).await?;
    let value = decode_object(&bytes).map_err(|error| error.in_file(COMMON_FILE, 0))?;
    Common::new(value)
}

/// Takes the common state out of the checkpoint itself.
pub(crate) async fn from_inside(raw: &Source) -> Result<Common, MegatronError> {
    let metadata = raw.metadata().await?;
    if metadata.get(COMMON_OBJECT).is_none() {
        return Err(absent());
    }
    let item = match read_object(raw, COMMON_OBJECT).await? {
        Value::Opaque(opaque) => decode_only_item(&opaque.encoded)?,
        Value::List(items) => {
            let items: Result<[Value; 1], _> = items.try_into();
            let [item] = items.map_err(|items| MegatronError::CommonState {
                problem: format!("in {COMMON_OBJECT:?} is a list of {}, not of one", items.len()),
            })?;
            item
        }
        other => {
            let problem = format!("in {COMMON_OBJECT:?} is not a list of one but {}", other.kind());
            return Err(MegatronError::CommonState { problem });
        }
    };
    Common::new(item)
}

fn absent() -> MegatronError {
    MegatronError::CommonState {
        problem: format!(
            "is gone: there is neither a {COMMON_FILE}, where Megatron-Core keeps it up to 0.18, \
             nor an object {COMMON_OBJECT:?}, where it keeps it since; get {COMMON_FILE} from \
             another copy of the checkpoint, or open this one tolerantly for its tensors alone"
        ),
    }
}
