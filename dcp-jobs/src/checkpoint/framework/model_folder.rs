//! The folder with the configuration and tokenizer of a checkpoint's model.

use std::sync::Arc;

use dcp_core::Storage;

/// The folder with the configuration and tokenizer of the model, where that is not the folder of the checkpoint. A
/// format passes it as an [extension](dcp_core::format::OpenedCheckpoint::with_extension), and a model of Hugging
/// Face that is written has its files.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    storage: Arc<dyn Storage>,
}

impl ModelFolder {
    /// The folder that `storage` has.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// The storage of the folder.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }
}
