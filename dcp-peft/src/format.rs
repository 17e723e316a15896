//! Folders of PEFT adapters as a format that plugs in.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave,
};
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageError, StorageErrorKind,
    StorageReader as _,
};
use dcp_formats::hf::HfReader;
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};

use crate::adapter_config::{AdapterConfig, CONFIG_NAME};

/// The file with the tensors of an adapter.
pub const WEIGHTS_NAME: &str = "adapter_model.safetensors";

/// The weights of a model, which an adapter may be saved beside.
const MODELS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Folders of PEFT adapters: `adapter_config.json` and `adapter_model.safetensors`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeftFormat;

/// The facts of an opened adapter besides its tensors, which jobs read without them.
#[derive(Debug)]
pub(crate) struct AdapterFacts {
    /// The configuration; the reason that a merge is refused, where the adapter is whole and of a kind that is
    /// only read.
    pub(crate) config: Result<AdapterConfig, FormatError>,
}

/// Reads the configuration of an adapter. It is damaged where it is none of PEFT; one that says what a merge
/// does not do is an adapter as any other for all other jobs.
async fn read_config(storage: &Arc<dyn Storage>) -> Result<AdapterFacts, CheckpointError> {
    let bad = |problem: String| CheckpointError::from(FormatError::new(CONFIG_NAME, problem));
    let key = Key::new(CONFIG_NAME).map_err(StorageError::from)?;
    let json = match storage.read_whole(&key, AdapterConfig::BYTES_MAX).await {
        Ok(whole) => whole.bytes,
        Err(error) if error.kind() == StorageErrorKind::NotFound => {
            return Err(bad("it is not there".to_owned()));
        }
        Err(error) if error.kind() == StorageErrorKind::TooLarge => {
            let max = AdapterConfig::BYTES_MAX;
            return Err(bad(format!("it has more than {max} bytes, the most that is read")));
        }
        Err(error) => return Err(error.into()),
    };
    if is_lfs_pointer(&json) {
        return Err(bad(format!("it {LFS_PROBLEM}")));
    }
    AdapterConfig::refuse_damaged(&json)?;
    Ok(AdapterFacts { config: AdapterConfig::parse(&json) })
}

#[async_trait]
impl CheckpointFormat for PeftFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new("peft", "PEFT adapter").with_landmarks(&[CONFIG_NAME, WEIGHTS_NAME])
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        let is_model = MODELS.iter().any(|name| folder.has(name));
        if is_model || !folder.has(WEIGHTS_NAME) {
            return None;
        }
        let found = Recognized::new(Evidence::Index, "is an adapter of PEFT");
        let problem = (!folder.has(CONFIG_NAME)).then(|| format!("there is no {CONFIG_NAME}"));
        Some(found.with_problem(problem))
    }

    /// A file of tensors alone is safetensors, whatever its name.
    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        if place.has_known_files() {
            return Ok(Examined::default());
        }
        let problem = match read_config(place.storage()).await {
            Ok(_) => None,
            Err(CheckpointError::Storage(error)) => return Err(error),
            Err(error) => Some(error.to_string()),
        };
        if problem.is_some() {
            return Ok(Examined::new(problem));
        }
        // Its header says how long the file is.
        let reader = weights(place.storage(), false)?;
        match reader.metadata().await {
            Ok(metadata) => Ok(Examined::default().with_compared(metadata.files().to_vec())),
            Err(CheckpointError::Storage(error)) => Err(error),
            Err(error) => Ok(Examined::new(Some(error.to_string()))),
        }
    }

    async fn tracker(&self, _run: &Place) -> Result<Option<RunTracker>, StorageError> {
        Ok(None)
    }

    async fn select(&self, _run: &Place) -> Result<Option<RunSelection>, StorageError> {
        Ok(None)
    }

    fn unfinished(
        &self,
        _folder: &Folder<'_>,
        _metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        None
    }

    fn owns(&self, _folder: &Folder<'_>, name: &str) -> bool {
        name == CONFIG_NAME || name == WEIGHTS_NAME
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        self.recognize(folder)?;
        Some(Occupant::Checkpoint(format!("{WEIGHTS_NAME:?} is of an adapter of PEFT")))
    }

    /// PEFT writes them.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    /// Opens the tensors of the adapter under the names that they have in the file.
    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let storage = place.storage();
        let facts = match read_config(storage).await {
            Err(CheckpointError::Format(error)) if options.tolerant => {
                AdapterFacts { config: Err(error) }
            }
            facts => facts?,
        };
        let reader = Arc::new(weights(storage, options.tolerant)?);
        reader.metadata().await?;
        let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::clone(&reader) as _);
        let opened = opened.with_audit(Arc::clone(&reader) as _).with_extension(reader);
        Ok(opened.with_extension(Arc::new(facts)))
    }
}

/// The reader of the tensors of an adapter.
fn weights(storage: &Arc<dyn Storage>, tolerant: bool) -> Result<HfReader, StorageError> {
    let key = Key::new(WEIGHTS_NAME)?;
    Ok(HfReader::builder(Arc::clone(storage)).file(key).tolerant(tolerant).build())
}
