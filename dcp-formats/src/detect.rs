//! What a directory holds, judged by content as far as names are not proof.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use dcp_core::{Key, Storage, StorageError, StorageExt as _, counted};
use futures_util::StreamExt as _;

use crate::dcp::names::Named;
use crate::hf::{CONFIG_NAME, INDEX_ENDING, UNFINISHED_NAME};
use crate::torch_save;

/// Objects looked at before a listing is given up; a directory that holds a checkpoint at its
/// top shows it much earlier.
const LISTED_MAX: usize = 200_000;
/// How deep a checkpoint is looked for below the directory.
const DEPTH_MAX: usize = 2;
/// How many files are opened to see what they are.
const OPENED_MAX: usize = 4;

/// What a directory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Detected {
    /// A PyTorch DCP checkpoint: there is a `.metadata`.
    Dcp,
    /// One that was saved without collectives: there are only `__{rank}.metadata`.
    DcpRankLocal {
        /// The ranks, ascending.
        ranks: Vec<u32>,
    },
    /// Data files of a DCP checkpoint, but no `.metadata`: a save that did not finish.
    DcpUnfinished {
        /// Whether there is a `.metadata.tmp`, which is complete if the save died in its last
        /// step (PyTorch removes the old `.metadata` before it renames the new one).
        metadata_tmp: bool,
    },
    /// safetensors files, as Hugging Face models have them.
    Safetensors {
        /// How many at the top.
        files: usize,
        /// Whether there is a `*.safetensors.index.json`.
        indexed: bool,
    },
    /// The configuration of a Hugging Face model, without weights.
    HuggingFaceConfig,
    /// What the writer of a model keeps until all of it is there, without weights.
    ModelUnfinished,
    /// Files of `torch.save`.
    TorchSave {
        /// One of them.
        example: Key,
    },
    /// A checkpoint of Megatron-Core: a `metadata.json` beside a `.metadata`, a `common.pt` or
    /// arrays of zarr.
    Megatron,
    /// A checkpoint of Megatron-LM in its format `torch`: `mp_rank_*` folders.
    MegatronRanks,
    /// A training run of Megatron-LM: `latest_checkpointed_iteration.txt` and `iter_*` folders.
    MegatronRun,
    /// A training run or checkpoint of OLMo-core: `step*` folders or a `model_and_optim` one.
    OlmoRun,
    /// No objects: the directory is empty, or there is none.
    Empty,
    /// Anything else.
    Unknown,
}

/// A directory, and the checkpoints below it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Detection {
    /// What the directory itself holds.
    pub kind: Detected,
    /// What else it holds: another checkpoint in the same place, or what is left of one.
    pub also: Vec<Detected>,
    /// Folders, at most two levels down, that are DCP checkpoints; in natural order, so that the
    /// last one of a run comes last.
    pub checkpoints: Vec<Key>,
}

/// Looks at the names in a directory, and into a few files where names do not suffice.
///
/// # Errors
///
/// When the storage fails.
pub async fn detect(storage: &Arc<dyn Storage>) -> Result<Detection, StorageError> {
    let names = Names::collect(&**storage).await?;
    let mut kinds = names.kinds(&**storage).await?.into_iter();
    let nothing = names.top.is_empty() && names.folders.is_empty();
    let none = if nothing { Detected::Empty } else { Detected::Unknown };
    let kind = kinds.next().unwrap_or(none);
    Ok(Detection { kind, also: kinds.collect(), checkpoints: names.checkpoints() })
}

#[derive(Default)]
struct Names {
    top: BTreeSet<Key>,
    folders: BTreeSet<String>,
    /// Folders with a `.metadata` or `__0.metadata` in them.
    committed: BTreeSet<Key>,
    /// Whether a folder is an array of zarr.
    arrays: bool,
}

impl Names {
    async fn collect(storage: &dyn Storage) -> Result<Self, StorageError> {
        let mut names = Self::default();
        let mut objects = storage.list(None).take(LISTED_MAX);
        while let Some(meta) = objects.next().await {
            names.add(meta?.key);
        }
        Ok(names)
    }

    fn add(&mut self, key: Key) {
        let Some((folder, file)) = key.as_str().rsplit_once('/') else {
            self.top.insert(key);
            return;
        };
        let first = folder.split('/').next().unwrap_or(folder);
        if !self.folders.contains(first) {
            self.folders.insert(first.to_owned());
        }
        self.arrays |= file == ".zarray" && first == folder;
        if matches!(file, ".metadata" | "__0.metadata")
            && folder.split('/').count() <= DEPTH_MAX
            && let Ok(folder) = Key::new(folder)
        {
            self.committed.insert(folder);
        }
    }

    fn has(&self, name: &str) -> bool {
        self.top.iter().any(|key| key.as_str() == name)
    }

    fn checkpoints(&self) -> Vec<Key> {
        let mut all: Vec<_> = self.committed.iter().cloned().collect();
        all.sort_by_key(|key| natural(key.as_str()));
        all
    }

    /// All that is here, what it is to be taken for first.
    async fn kinds(&self, storage: &dyn Storage) -> Result<Vec<Detected>, StorageError> {
        let mut kinds = Vec::new();
        let named: BTreeMap<&Key, Named> =
            self.top.iter().filter_map(|key| Some((key, Named::parse(key)?))).collect();
        let any = |wanted: fn(&Named) -> bool| named.values().any(wanted);
        let rank = |named: &Named| match named {
            Named::RankMetadata { rank } => Some(*rank),
            _ => None,
        };
        let mut ranks: Vec<u32> = named.values().filter_map(rank).collect();
        ranks.sort_unstable();
        let mut unfinished = None;
        let metadata = any(|named| *named == Named::Metadata);
        if self.has("metadata.json") && (metadata || self.has("common.pt") || self.arrays) {
            kinds.push(Detected::Megatron);
        }
        if metadata {
            kinds.push(Detected::Dcp);
        } else if ranks.is_empty() {
            let metadata_tmp = any(|named| *named == Named::MetadataTmp);
            let data = any(|named| matches!(named, Named::Data { .. }));
            unfinished = (metadata_tmp || data).then_some(Detected::DcpUnfinished { metadata_tmp });
        }
        if !ranks.is_empty() {
            kinds.push(Detected::DcpRankLocal { ranks });
        }
        let ending = |endings: &'static [&str]| {
            self.top.iter().filter(|key| endings.iter().any(|e| key.as_str().ends_with(e)))
        };
        let files = ending(&[".safetensors"]).count();
        let indexed = ending(&[INDEX_ENDING]).next().is_some();
        let safetensors =
            (files > 0 || indexed).then_some(Detected::Safetensors { files, indexed });
        // An index makes a model; files alone may lie beside anything.
        let mut models = [safetensors, unfinished];
        if !indexed {
            models.reverse();
        }
        kinds.extend(models.into_iter().flatten());
        if self.folders.iter().any(|folder| numbered(folder, "mp_rank_")) {
            kinds.push(Detected::MegatronRanks);
        }
        if self.has("latest_checkpointed_iteration.txt")
            || self.folders.iter().any(|folder| numbered(folder, "iter_"))
        {
            kinds.push(Detected::MegatronRun);
        }
        if self.folders.contains("model_and_optim")
            || self.folders.iter().any(|folder| numbered(folder, "step"))
        {
            kinds.push(Detected::OlmoRun);
        }
        for key in ending(&[".pt", ".pth", ".bin", ".ckpt"]).take(OPENED_MAX) {
            if is_torch_save(storage, key).await? {
                kinds.push(Detected::TorchSave { example: key.clone() });
                break;
            }
        }
        if kinds.is_empty() && self.has(UNFINISHED_NAME) {
            kinds.push(Detected::ModelUnfinished);
        }
        if kinds.is_empty() && self.has(CONFIG_NAME) {
            kinds.push(Detected::HuggingFaceConfig);
        }
        Ok(kinds)
    }
}

/// Whether a file begins as an archive of `torch.save`, or as its stream before PyTorch 1.6.
///
/// # Errors
///
/// When the storage fails.
pub async fn is_torch_save(storage: &dyn Storage, key: &Key) -> Result<bool, StorageError> {
    /// Bytes of the longest beginning that tells one.
    const HEAD: u64 = 32;
    let len = storage.stat(key).await?.byte_len;
    let head = storage.read_range(key, 0..len.min(HEAD)).await?;
    Ok(torch_save::is_torch_save(&head))
}

fn numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// A sort key in which `step_9` comes before `step_10`.
#[must_use]
pub fn natural(name: &str) -> Vec<(String, u128)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits_at = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits_at);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (digits, tail) = tail.split_at(end);
        parts.push((text.to_owned(), digits.parse().unwrap_or(u128::MAX)));
        rest = tail;
    }
    parts
}

impl fmt::Display for Detected {
    /// A sentence without its subject: "is empty or does not exist".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dcp => f.write_str("is a PyTorch DCP checkpoint"),
            Self::DcpRankLocal { ranks } => {
                let ranks = counted(ranks.len() as u64, "rank");
                write!(f, "is a PyTorch DCP checkpoint of {ranks} saved without collectives")
            }
            Self::DcpUnfinished { metadata_tmp: false } => f.write_str(
                "has data files of a PyTorch DCP checkpoint but no .metadata: the save did not \
                 finish",
            ),
            Self::DcpUnfinished { metadata_tmp: true } => f.write_str(
                "has a .metadata.tmp but no .metadata: a save died before its last step; the file \
                 may be complete, and renaming it to .metadata then completes the checkpoint",
            ),
            Self::Safetensors { files, .. } => {
                let files = counted(*files as u64, "safetensors file");
                write!(f, "holds {files}, as Hugging Face models do, not a DCP checkpoint")
            }
            Self::HuggingFaceConfig => f.write_str(
                "has the config.json of a model, and no weights: the model was not written to its \
                 end, or not copied as a whole",
            ),
            Self::ModelUnfinished => write!(
                f,
                "has a {UNFINISHED_NAME}, and no weights: the model was not written to its end"
            ),
            Self::TorchSave { example } => {
                write!(f, "holds files of torch.save, such as {example:?}, not a DCP checkpoint")
            }
            Self::Megatron => f.write_str("is a checkpoint of Megatron-Core"),
            Self::MegatronRanks => {
                f.write_str("is a checkpoint of Megatron-LM, by ranks in mp_rank_* folders")
            }
            Self::MegatronRun => f.write_str("is the directory of a Megatron-LM run"),
            Self::OlmoRun => f.write_str("is a directory of OLMo-core"),
            Self::Empty => f.write_str("is empty or does not exist"),
            Self::Unknown => f.write_str("has no .metadata"),
        }
    }
}

impl Detection {
    /// What to tell someone who expected a DCP checkpoint here.
    #[must_use]
    pub fn hint(&self) -> String {
        let mut text = format!("not a checkpoint: the directory {}", self.kind);
        for also in &self.also {
            text.push_str(&format!("; it also {also}"));
        }
        match &*self.checkpoints {
            [] => {}
            [one] => text.push_str(&format!("; there is a checkpoint in {one:?}")),
            [.., last] => text.push_str(&format!(
                "; there are {} checkpoints in folders below it, such as {last:?}",
                self.checkpoints.len()
            )),
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_sort_as_numbers() {
        let mut names = vec!["step_10", "step_9", "step_9/ema", "a", "step_100"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["a", "step_9", "step_9/ema", "step_10", "step_100"]);
    }

    #[test]
    fn hints_name_the_last_checkpoint() {
        let key = |name| Key::new(name).unwrap();
        let detection = Detection {
            kind: Detected::OlmoRun,
            also: Vec::new(),
            checkpoints: vec![key("step9/model_and_optim"), key("step10/model_and_optim")],
        };
        assert!(detection.hint().ends_with(r#"such as "step10/model_and_optim""#));
    }
}
