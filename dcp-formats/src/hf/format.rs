//! Models of Hugging Face as a format that plugs in.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave,
};
use dcp_core::text::{Quoted, counted};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageError, StorageReader as _};

use super::complete::UNFINISHED_NAME;
use super::finding::{Finding, FindingKind};
use super::index_file::INDEX_NAME;
use super::indexed_files::{examine_index_file, examine_indexes};
use super::layout::SINGLE_NAME;
use super::other_program::{INDEX_HEAD_BYTES, other_program};
use super::reader::HfReader;
use super::sidecar_files::{CONFIG_ASIDE, CONFIG_NAME};
use super::variants::IndexName;
use crate::incomplete_files::is_torch_save;

/// Series of shards (`model-00001-of-00004.safetensors`) that are distinguished in one folder.
const SERIES_MAX: usize = 64;
/// Shards of one series that are counted.
const SHARDS_MAX: u32 = 1 << 16;

/// Folders of safetensors files, as Hugging Face's libraries and PyTorch's storage of that name
/// write them, and single files of safetensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct HuggingFaceFormat;

/// The files of a model in a folder.
#[derive(Debug, Default)]
struct Files {
    count: u64,
    /// A file that no number is in.
    single: bool,
    index: bool,
    /// Shards seen of `STEM-00001-of-00004.safetensors`, by stem and number of shards.
    series: BTreeMap<(String, u32), BTreeSet<u32>>,
}

impl Files {
    fn of(folder: &Folder<'_>) -> Self {
        let mut found = Self::default();
        for (name, _) in folder.files() {
            found.index |= IndexName::parse(name).is_some();
            if let Some(stem) = name.strip_suffix(super::ENDING) {
                found.add(stem);
            }
        }
        found
    }

    fn add(&mut self, stem: &str) {
        self.count += 1;
        let shard = stem.rsplit_once("-of-").and_then(|(front, of)| {
            let (name, number) = front.rsplit_once('-')?;
            Some((name, number.parse::<u32>().ok()?, of.parse::<u32>().ok()?))
        });
        let Some((name, number, of)) = shard.filter(|(_, _, of)| *of <= SHARDS_MAX) else {
            self.single = true;
            return;
        };
        let known = self.series.len();
        let key = (name.to_owned(), of);
        if known < SERIES_MAX || self.series.contains_key(&key) {
            self.series.entry(key).or_default().insert(number);
        }
    }

    fn problem(&self, folder: &Folder<'_>) -> Option<String> {
        if folder.has(CONFIG_ASIDE) && !folder.has(CONFIG_NAME) {
            return Some(format!(
                "there is a {CONFIG_ASIDE}: a writer died while it replaced the model"
            ));
        }
        if folder.has(UNFINISHED_NAME) && !self.index {
            let problem = "and no index: the model was not written to its end";
            return Some(format!("there is a {UNFINISHED_NAME}, {problem}"));
        }
        if folder.has(SINGLE_NAME) {
            // Loaders read it, whatever other files there are.
            return None;
        }
        if self.index {
            // The index names the files, and an overwrite that was killed leaves others.
            let nothing = !self.single && self.series.is_empty();
            return nothing.then(|| "the index is there, but no safetensors file".to_owned());
        }
        for ((name, of), found) in &self.series {
            if let Some(absent) = (1..=*of).find(|number| !found.contains(number)) {
                return Some(format!("{name}-{absent:05}-of-{of:05}.safetensors is missing"));
            }
        }
        // What each rank holds has no index.
        let promises = self.series.keys().any(|(name, _)| !name.starts_with("shard-"));
        promises.then(|| "there is no index: the model was not written to its end".to_owned())
    }
}

/// Whether several files without an index are read as one model, and none declares parts of tensors by its name.
fn may_repeat(folder: &Folder<'_>) -> bool {
    let is_whole = |name: &str| name.ends_with(super::ENDING) && !name.starts_with("shard-");
    let has_index = folder.files().any(|(name, _)| IndexName::parse(name).is_some());
    !has_index && folder.files().filter(|(name, _)| is_whole(name)).count() > 1
}

/// Finds a tensor that is in several files. Each of the files is read by its own name, so that nothing is lost.
async fn examine_repeated(place: &Place) -> Result<Examined, StorageError> {
    match HfReader::new(Arc::clone(place.storage())).metadata().await {
        // It has read every header, and compared the lengths of the files.
        Ok(metadata) => return Ok(Examined::default().with_compared(metadata.files().to_vec())),
        Err(CheckpointError::Storage(error)) => return Err(error),
        Err(_) => {}
    }
    let reader = HfReader::builder(Arc::clone(place.storage())).tolerant(true).build();
    let findings = match reader.findings().await {
        Ok(findings) => findings,
        Err(CheckpointError::Storage(error)) => return Err(error),
        // The headers are compared one by one.
        Err(_) => return Ok(Examined::default()),
    };
    let repeated = findings.iter().find(|finding| finding.kind == FindingKind::Twice);
    let problem = repeated.map(|Finding { fqn, file, message, .. }| {
        let file = file.as_ref().map_or_else(String::new, |file| format!("{file}: "));
        let fqn = fqn.as_ref().map_or_else(String::new, |fqn| format!("{}: ", Quoted(fqn)));
        format!("{file}{fqn}{message}")
    });
    let opens = problem.is_some();
    Ok(Examined::new(problem).with_opens(opens))
}

#[async_trait]
impl CheckpointFormat for HuggingFaceFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new("huggingface", "Hugging Face")
            .with_landmarks(&[INDEX_NAME, SINGLE_NAME])
            .with_model_folders()
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        let index = folder.file(INDEX_NAME).and_then(|_| folder.key(INDEX_NAME));
        index.map(|key| Peek::new(key, INDEX_HEAD_BYTES)).into_iter().collect()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        let files = Files::of(folder);
        if (files.count > 0 || files.index)
            && let Some(description) = other_program(folder)
        {
            return Some(Recognized::new(Evidence::Loose, description));
        }
        if files.count > 0 || files.index {
            let evidence = if files.index { Evidence::Index } else { Evidence::Files };
            let count = counted(files.count, "safetensors file");
            let description =
                format!("holds {count}, as Hugging Face models do, not a DCP checkpoint");
            let problem = files.problem(folder);
            return Some(Recognized::new(evidence, description).with_problem(problem));
        }
        if folder.has(UNFINISHED_NAME) {
            let description = format!(
                "has a {UNFINISHED_NAME}, and no weights: the model was not written to its end"
            );
            return Some(Recognized::new(Evidence::Trace, description));
        }
        folder.has(CONFIG_NAME).then(|| {
            Recognized::new(
                Evidence::Trace,
                "has the config.json of a model, and no weights: the model was not written to its \
                 end, or not copied as a whole",
            )
        })
    }

    fn recognize_file(&self, name: &str, head: &[u8]) -> bool {
        let is_tensors = name.ends_with(super::ENDING) || head.get(8) == Some(&b'{');
        IndexName::parse(name).is_some() || is_tensors && !is_torch_save(head)
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        if place.has_known_files() {
            return Ok(Examined::default());
        }
        match place.file() {
            Some(file) => examine_index_file(place, file).await,
            None => {
                let examined = examine_indexes(place).await?;
                match examined == Examined::default() && may_repeat(&place.listing().root()) {
                    true => examine_repeated(place).await,
                    false => Ok(examined),
                }
            }
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
        IndexName::parse(name).is_some() || name == CONFIG_NAME
    }

    /// An index, or weights under a name that loaders look for, make a folder a model, whatever
    /// else it holds. Other safetensors files may be in any folder.
    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        let is_model = |name: &str| {
            let is_weights = name.starts_with("model") && name.ends_with(super::ENDING);
            is_weights || IndexName::parse(name).is_some()
        };
        let (name, _) = folder.files().find(|(name, _)| is_model(name))?;
        Some(Occupant::Checkpoint(format!("{name:?} is of a Hugging Face model")))
    }

    /// `dcp_jobs::convert::to_hf` writes models: configuration and weights are replaced together.
    fn target(&self) -> Option<&dyn CheckpointTarget> {
        None
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let storage = place.storage();
        let mut reader = HfReader::builder(Arc::clone(storage)).tolerant(options.tolerant);
        match place.file() {
            Some(file) if IndexName::parse(file.file_name()).is_some() => {
                reader = reader.index(file.clone());
            }
            Some(file) => reader = reader.file(file.clone()),
            None => {}
        }
        if let Some(variant) = &options.variant {
            reader = reader.variant(variant);
        }
        let reader = Arc::new(reader.build());
        reader.metadata().await?;
        let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::clone(&reader) as _);
        let opened = opened.with_variants(reader.variants().await?.to_vec());
        Ok(opened.with_audit(Arc::clone(&reader) as _).with_extension(reader))
    }
}
