//! The existing model in a folder that is overwritten.

use std::collections::BTreeSet;

use dcp_core::error::StorageOp;
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use futures_util::StreamExt as _;

use super::ENDING;
use super::index_file::{INDEX_MAX, INDEX_NAME, IndexFile};
use super::layout::{HfPlan, SINGLE_NAME};
use super::write::HfWriteOptions;

/// The maximum number of tags to try for new names.
const TAGS_MAX: u32 = 10_000;

/// The existing model in a folder.
#[derive(Debug, Default)]
pub(super) struct Old {
    index: Option<Key>,
    /// Files that belong to it, or that loaders would read with it.
    pub(super) files: BTreeSet<Key>,
    /// All names in use.
    taken: BTreeSet<Key>,
}

impl Old {
    pub(super) async fn look(
        storage: &dyn Storage,
        plan: &HfPlan,
    ) -> Result<Self, CheckpointError> {
        let index = Key::new(INDEX_NAME).map_err(StorageError::from)?;
        let single = Key::new(SINGLE_NAME).map_err(StorageError::from)?;
        let mut old = Self::default();
        if storage.contains(&index).await? {
            old.files = indexed_files(storage, &index).await?;
            old.index = Some(index.clone());
            if plan.distributed || plan.single().is_some() {
                // It refers to no file of the new model.
                old.files.insert(index);
            }
        }
        let mut objects = storage.list_files(None);
        while let Some(meta) = objects.next().await {
            match meta {
                Ok(meta) if is_tensor_file(&meta.key) => {
                    old.taken.insert(meta.key);
                }
                Ok(_) => {}
                // Without listing, names are tested one by one.
                Err(error) if error.kind() == StorageErrorKind::Unsupported => {
                    let planned = plan.files.iter().map(|file| &file.name);
                    for key in planned.chain([&single]) {
                        if storage.contains(key).await? {
                            old.taken.insert(key.clone());
                        }
                    }
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if old.taken.contains(&single) {
            old.files.insert(single);
        }
        // Files that no index names belong to a model by their names: an unfinished write left
        // them.
        old.files.extend(old.taken.iter().filter(|key| is_numbered(key.as_str())).cloned());
        Ok(old)
    }

    pub(super) fn refuse(
        &self,
        plan: &HfPlan,
        options: &HfWriteOptions,
    ) -> Result<(), CheckpointError> {
        let Some(key) = self.in_the_way(plan).filter(|_| !options.overwrite) else { return Ok(()) };
        let error =
            StorageError::new(StorageErrorKind::AlreadyExists, StorageOp::Put, Some(key.clone()));
        Err(error.with_message("there is a model in this folder").into())
    }

    /// A file that the plan would replace.
    pub(super) fn in_the_way(&self, plan: &HfPlan) -> Option<&Key> {
        let named = plan.files.iter().map(|file| &file.name);
        self.index
            .as_ref()
            .or(self.files.first())
            // Without an index, loaders read every file as a part of the model.
            .or(self.taken.first().filter(|_| plan.distributed))
            .or_else(|| named.into_iter().find_map(|name| self.taken.get(name)))
    }

    /// The plan with names that are free.
    pub(super) fn free_names(&self, plan: &HfPlan) -> Result<HfPlan, CheckpointError> {
        let free = |plan: &HfPlan| !plan.files.iter().any(|file| self.taken.contains(&file.name));
        if free(plan) || plan.single().is_some() {
            return Ok(plan.clone());
        }
        for tag in 1..TAGS_MAX {
            let tagged = plan.tagged(&format!("g{tag}"))?;
            if free(&tagged) {
                return Ok(tagged);
            }
        }
        let problem = format!(
            "all {TAGS_MAX} names for new files exist already; delete files of unfinished saves"
        );
        let (kind, op) = (StorageErrorKind::AlreadyExists, StorageOp::Put);
        Err(StorageError::new(kind, op, None).with_message(problem).into())
    }
}

/// The tensor files that an index names in the folder itself; none for an invalid index. Nothing
/// else is ever removed because of an index.
async fn indexed_files(
    storage: &dyn Storage,
    index: &Key,
) -> Result<BTreeSet<Key>, CheckpointError> {
    if storage.stat(index).await?.byte_len > INDEX_MAX {
        return Ok(BTreeSet::new());
    }
    let index = IndexFile::parse(&storage.read_all(index).await?).unwrap_or_default();
    Ok(index.files().filter(|key| is_tensor_file(key)).cloned().collect())
}

fn is_tensor_file(key: &Key) -> bool {
    !key.as_str().contains('/') && key.as_str().ends_with(ENDING)
}

/// Whether a name has the pattern of a model in several files: `model-00001-of-00002.safetensors`,
/// with a tag after `model` when names were taken, or with `shard-00003-` in front for a rank's
/// parts.
fn is_numbered(name: &str) -> bool {
    numbers(name).is_some_and(|(at, count)| (1..=count).contains(&at))
}

/// The number and count in the name of a model's file.
fn numbers(name: &str) -> Option<(u32, u32)> {
    let number = |text: &str| {
        let digits = text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    let mut name = name.strip_suffix(ENDING)?;
    if let Some(rest) = name.strip_prefix("shard-") {
        let (rank, rest) = rest.split_once('-')?;
        let _: u32 = number(rank)?;
        name = rest;
    }
    let (mut at, count) = name.strip_prefix("model-")?.split_once("-of-")?;
    if let Some((tag, rest)) = at.split_once('-') {
        let _: u32 = tag.strip_prefix('g')?.parse().ok()?;
        at = rest;
    }
    number(at).zip(number(count))
}
