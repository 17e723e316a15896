//! What a save of Megatron-Core left that did not finish.

use dcp::convert::Source;
use dcp::core::{Key, Storage, StorageExt};
use dcp::megatron::{
    COMMON_FILE, COMMON_OBJECT, CheckpointingConfig, INTEGRITY_FILE, METADATA_JSON,
};

use crate::failure::{Exit, Failure};
use crate::open::Opened;

/// A folder that would be a checkpoint of Megatron-Core if its save had finished, and is taken for
/// one of PyTorch as it is.
#[derive(Debug)]
pub(crate) struct Unfinished {
    /// What shows whose it is.
    has: &'static str,
    /// What its `metadata.json` would say.
    config: CheckpointingConfig,
}

impl Unfinished {
    /// Looks at a folder that can be read as a checkpoint of PyTorch. Since Megatron-Core 0.19 only
    /// what is in the index tells.
    pub(crate) async fn find(
        storage: &dyn Storage,
        source: &Source,
    ) -> Result<Option<Self>, Failure> {
        let contains = async |name: &str| storage.contains(&Key::new(name)?).await;
        if contains(METADATA_JSON).await? || !contains(".metadata").await? {
            return Ok(None);
        }
        let inside = source.metadata().await?.get(COMMON_OBJECT).is_some();
        let (has, config) = if contains(COMMON_FILE).await? {
            ("a common.pt", CheckpointingConfig::torch_dist())
        } else if inside {
            ("a common_state", CheckpointingConfig::torch_dist_with_common_inside())
        } else if contains(INTEGRITY_FILE).await? {
            ("an integrity.json", CheckpointingConfig::torch_dist_with_common_inside())
        } else {
            return Ok(None);
        };
        Ok(Some(Self { has, config }))
    }

    /// What is wrong, of the folder `subject`.
    pub(crate) fn problem(&self, subject: &str) -> String {
        format!(
            "{subject} has {} but no {METADATA_JSON}, which Megatron-Core writes last: the save did \
             not finish, or the file was not copied",
            self.has
        )
    }

    /// What to say where it is read all the same.
    pub(crate) fn note(&self) -> String {
        format!("{}; this is read as a checkpoint of PyTorch", self.problem("the folder"))
    }
}

/// Refuses to make something that looks whole of a checkpoint whose save did not finish, and whose
/// common state would be gone.
pub(crate) fn refuse(opened: &Opened) -> Result<(), Failure> {
    let Some(unfinished) = &opened.unfinished else { return Ok(()) };
    let message = unfinished.problem(&format!("{:?}", opened.uri));
    let whole = unfinished.config.to_json();
    Err(Failure::new(Exit::Bad, message).hint(format!(
        "take another iteration; if only the file was lost, put it back: {whole}; its tensors alone \
         can be had with --to safetensors"
    )))
}
