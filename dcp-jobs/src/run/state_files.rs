//! The files of a step besides its weights that a resume needs, by which steps of one run are compared.

use std::collections::BTreeSet;

use dcp_core::format::Listing;
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::text::Quoted;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::incomplete_files::{is_lfs_pointer, unwritten};
use serde::de::IgnoredAny;

use super::StepNaming;
use super::recorded::TRAINER_STATE;

/// The files of a model folder without which its weights cannot be used.
const MODEL_FILES: [&str; 8] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
];
/// The ending of the files of DeepSpeed, each of which one rank or layer writes.
const DEEPSPEED: &str = "_states.pt";
/// The file of DeepSpeed that names the folder with its files.
const LATEST: &str = "latest";
/// A longer file is read at its start and its end only, in bytes.
const WHOLE_MAX: u64 = 64 << 10;
/// Bytes of the start and the end of a long file.
const PART_BYTES: u64 = 512;

/// The name by which the file at a path in the folder of a step is compared with that of other steps; `None`
/// for one that a resume does without. Numbers are `#`, as steps differ in them, but for those of ranks in the
/// names of DeepSpeed, where the file of one rank does not stand for that of another.
pub(super) fn compared_name(path: &str, byte_len: u64) -> Option<String> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    if parent.is_empty() && MODEL_FILES.contains(&name) {
        return (byte_len > 0).then(|| name.to_owned());
    }
    // A run inside is not needed for a resume.
    let is_inner = parent.contains('/')
        || name.ends_with(".metadata") && StepNaming::step_of(parent).is_some();
    if is_inner || !is_state(name) {
        return None;
    }
    Some(match name.ends_with(DEEPSPEED) {
        true => format!("{}/{name}", without_numbers(parent)),
        false => without_numbers(path),
    })
}

/// Whether a resume needs a file of that name besides the weights: `optimizer.pt`, `rng_state_0.pth`, the
/// index of an optimizer's own DCP checkpoint.
fn is_state(name: &str) -> bool {
    let is_weights = ["model", "pytorch_model", "consolidated"];
    let is_weights = is_weights.iter().any(|start| name.starts_with(start));
    let endings = [".pt", ".pth", ".pkl", ".bin", ".ckpt", ".metadata"];
    name == TRAINER_STATE || !is_weights && endings.iter().any(|ending| name.ends_with(ending))
}

/// A path with `#` in place of each number, as steps of a run differ in numbers.
fn without_numbers(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for c in path.chars() {
        match c {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            c => text.push(c),
        }
    }
    text
}

/// The files of a model folder among `files`, those of the step in the folder `name`, that were cut short or
/// never written, or are pointers of Git LFS.
pub(super) async fn unusable(
    storage: &dyn Storage,
    name: &str,
    files: &[ObjectMeta],
) -> Result<BTreeSet<&'static str>, StorageError> {
    let mut found = BTreeSet::new();
    for model_file in MODEL_FILES {
        let key = Key::new(format!("{name}/{model_file}"))?;
        let Some(file) = files.iter().find(|file| file.key == key) else { continue };
        match is_usable(storage, file).await {
            Ok(true) => {}
            Ok(false) => {
                found.insert(model_file);
            }
            // Another process has deleted it since it was listed.
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                found.insert(model_file);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

async fn is_usable(storage: &dyn Storage, file: &ObjectMeta) -> Result<bool, StorageError> {
    let (key, len) = (&file.key, file.byte_len);
    let is_short = len <= WHOLE_MAX;
    let head = storage.read_range(key, 0..if is_short { len } else { PART_BYTES }).await?;
    if head.trim_ascii().is_empty() || is_lfs_pointer(&head) || unwritten(&head).is_some() {
        return Ok(false);
    }
    if !key.file_name().ends_with(".json") {
        return Ok(true);
    }
    if is_short {
        return Ok(serde_json::from_slice::<IgnoredAny>(&head).is_ok());
    }
    let tail = storage.read_range(key, len - PART_BYTES..len).await?;
    Ok(head.trim_ascii_start().starts_with(b"{") && tail.trim_ascii_end().ends_with(b"}"))
}

/// Finds the problem of the file `latest` of DeepSpeed in the folder `name` of a step with these files: a
/// resume reads the folder that it names.
pub(super) async fn latest_problem(
    storage: &dyn Storage,
    name: &str,
    files: &[ObjectMeta],
) -> Result<Option<String>, StorageError> {
    let key = Key::new(format!("{name}/{LATEST}"))?;
    let Some(file) = files.iter().find(|file| file.key == key) else { return Ok(None) };
    let text = match storage.read_range(&key, 0..file.byte_len.min(PART_BYTES)).await {
        Ok(text) => text,
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let named = String::from_utf8_lossy(&text);
    let listing = Listing::new(files.iter().cloned());
    let root = listing.root();
    let folder = root.folder(name);
    let is_there = folder.is_some_and(|folder| folder.folder(named.trim()).is_some());
    let named = Quoted(named.trim());
    Ok((!is_there).then(|| format!("its {LATEST:?} names {named}, which is no folder in it")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_one_rank_of_deepspeed_does_not_stand_for_that_of_another() {
        let name = |path: &str| compared_name(path, 1);
        let rank = |step: u32, rank: u32| {
            name(&format!("global_step{step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        };
        assert_eq!(rank(10, 0), rank(20, 0));
        assert_ne!(rank(10, 0), rank(10, 1));
        assert_eq!(name("epoch_1_optimizer.pt"), name("epoch_2_optimizer.pt"));
        assert_eq!(name("config.json").as_deref(), Some("config.json"));
        assert_eq!(compared_name("config.json", 0), None);
        for path in ["model.bin", "README.md", "a/b/optimizer.pt", "sub/config.json"] {
            assert_eq!(name(path), None, "{path}");
        }
    }
}
