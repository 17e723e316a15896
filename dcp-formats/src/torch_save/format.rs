//! Files of `torch.save` as a format that plugs in.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError, StorageReader as _};

use super::contents::{MAGIC_LEN, is_torch_save};
use super::reader::TorchSaveReader;

/// The maximum number of files to read when recognizing a folder.
const PEEKED_MAX: usize = 4;
/// The endings of `torch.save` file names.
pub const FILE_ENDINGS: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// Files of `torch.save`, and the model of transformers in a folder, `pytorch_model.bin`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TorchSaveFormat;

impl TorchSaveFormat {
    /// The file name of a transformers model, or of its variant.
    #[must_use]
    pub fn model_file(variant: Option<&str>) -> String {
        match variant {
            Some(variant) => format!("pytorch_model.{variant}.bin"),
            None => "pytorch_model.bin".to_owned(),
        }
    }

    /// The index of such a model in several files.
    #[must_use]
    pub fn index_file(variant: Option<&str>) -> String {
        match variant {
            Some(variant) => format!("pytorch_model.bin.index.{variant}.json"),
            None => "pytorch_model.bin.index.json".to_owned(),
        }
    }

    /// The models of transformers in a folder: the main one, `None`, and its variants, each in one file or in
    /// the files of an index.
    #[must_use]
    pub fn models(folder: &Folder<'_>) -> BTreeSet<Option<String>> {
        let variant = |name: &str| {
            let rest = name.strip_prefix("pytorch_model.")?;
            let variant = match rest.strip_prefix("bin.index.") {
                Some("json") => "",
                Some(rest) => rest.strip_suffix(".json")?,
                None if rest == "bin" => "",
                None => rest.strip_suffix(".bin")?,
            };
            let name = (!variant.is_empty()).then(|| variant.to_owned());
            (!variant.contains(['.', '-'])).then_some(name)
        };
        folder.files().filter_map(|(name, _)| variant(name)).collect()
    }
}

/// Whether a file name has an ending of `torch.save` files.
fn is_named(name: &str) -> bool {
    FILE_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Whether a file of that name may contain weights: trainers store all other state with
/// `torch.save` too.
fn may_be_weights(name: &str) -> bool {
    let other = ["optimizer", "scheduler", "rng_state", "training_args", "common", "scaler"];
    is_named(name) && !other.iter().any(|other| name.starts_with(other))
}

/// The program that writes files of this name, each of which has a part of the state or another form of
/// it.
fn program_of(name: &str) -> Option<&'static str> {
    const PROGRAMS: [(&str, &str, &str); 5] = [
        ("", "_model_states.pt", "they are DeepSpeed's"),
        ("", "_optim_states.pt", "they are DeepSpeed's"),
        ("model_world_size_", ".pt", "each is of one rank of verl"),
        ("pytorch_model_fsdp_rank", ".bin", "each is of one rank of accelerate"),
        ("pytorch_model_fsdp", ".bin", "they are accelerate's, each whole in itself"),
    ];
    let is_of =
        |(start, end, _): &&(&str, &str, &str)| name.starts_with(start) && name.ends_with(end);
    PROGRAMS.iter().find(is_of).map(|(_, _, program)| *program)
}

#[async_trait]
impl CheckpointFormat for TorchSaveFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new("torch_save", "torch.save")
            .with_landmarks(&["pytorch_model.bin", "pytorch_model.bin.index.json"])
            .with_file_endings(&FILE_ENDINGS)
            .with_model_folders()
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        let named = folder.files().filter(|(name, _)| is_named(name));
        let named = named.take(PEEKED_MAX).filter_map(|(name, _)| folder.key(name));
        named.map(|key| Peek::new(key, MAGIC_LEN)).collect()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if !Self::models(folder).is_empty() {
            return Some(Recognized::new(
                Evidence::Files,
                "holds the pytorch_model.bin of a Hugging Face model",
            ));
        }
        let peeked = |name: &str| folder.peeked(name).map(|head| is_torch_save(head));
        let mut named = folder.files().map(|(name, _)| name).filter(|name| is_named(name));
        // Unread files count only if their names are those of weights.
        let example = named.find(|name| peeked(name).unwrap_or_else(|| may_be_weights(name)))?;
        let mut description =
            format!("holds files of torch.save, such as {example:?}, not a DCP checkpoint");
        if let Some(program) = folder.files().find_map(|(name, _)| program_of(name)) {
            description.push_str(&format!(": {program}"));
        }
        Some(Recognized::new(Evidence::Loose, description))
    }

    fn recognize_file(&self, _name: &str, head: &[u8]) -> bool {
        is_torch_save(head)
    }

    /// There is no index: [`find_incomplete_files`](crate::find_incomplete_files) compares each
    /// file with its own directory.
    async fn examine(&self, _place: &Place) -> Result<Examined, StorageError> {
        Ok(Examined::default())
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
        name == Self::model_file(None) || name == Self::index_file(None)
    }

    /// Such files may be in any folder: readers open them by their own names.
    fn occupant(&self, _folder: &Folder<'_>) -> Option<Occupant> {
        None
    }

    /// `dcp_jobs::convert::to_torch_save` writes single files.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let storage = place.storage();
        let file = match place.file() {
            Some(file) => file.clone(),
            None => {
                let model = Key::new(Self::model_file(options.variant.as_deref()));
                let model = model.map_err(StorageError::from)?;
                if !storage.contains(&model).await? {
                    let message = format!("there is no {model} in the folder");
                    return Err(CheckpointError::NotACheckpoint { message });
                }
                model
            }
        };
        let reader = Arc::new(TorchSaveReader::new(Arc::clone(storage), file));
        reader.metadata().await?;
        let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::clone(&reader) as _);
        let opened =
            opened.with_notes(reader.notes().await?).with_single_pickle(reader.key().clone());
        Ok(opened.with_audit(Arc::clone(&reader) as _).with_extension(reader))
    }
}
